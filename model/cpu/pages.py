"""Pages in the layout of the CPU's kernels, and their canonical form, in which all back ends exchange them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.cpu.kernels.kv import BLOCK, Heads
from model.cpu.kernels.memory import huge_zeros
from model.kv_pool import ALL_ONES


class Pages:
    """Pages of all layer groups.

    If all groups' pages have one form, each layer of a group has memory of its own, which holds the layer's part of
    every page: attention then reads consecutive pages as one stream. If they differ, one memory has all, page by page.
    """

    def __init__(self, layout: KVLayout, pages: int, heads: Sequence[Heads]) -> None:
        """Allocates the pages.

        Args:
            layout: Layout of the KV pool.
            pages: The number of pages.
            heads: By group, the layout of keys and values.
        """
        self._layout, self._heads, self._page_size = layout, heads, layout.page_size
        self._apart = layout.same_shapes and not layout.recurrent
        count = len(layout.groups[0].layers) if self._apart else 1
        self._parts = [huge_zeros(pages * layout.page_bytes // count).view(pages, -1) for _ in range(count)]

    @property
    def memory(self) -> Tensor:
        """All pages, one after the other, as bytes, where one memory has all."""
        return self._parts[0].view(-1)

    def rows_a_page(self, group: int) -> int:
        """Returns the tokens of one layer of a group that fit into a page's memory there."""
        return self._parts[0].shape[1] // self._heads[group].row_bytes

    def rows_of(self, group: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns [n] int64: which of the rows of a layer's memory hold n slots, page x page_size + offset."""
        others = self.rows_a_page(group) - self._page_size
        return slots + slots // self._page_size * others if others else slots

    def from_layer(self, group: int, index: int) -> Tensor:
        """Returns the memory of a layer from its part of page 0 on, as bytes."""
        return self._parts[index].view(-1) if self._apart else self._parts[0].view(-1)[self._start(group, index) :]

    def _start(self, group: int, index: int) -> int:
        return index * self._page_size * self._heads[group].row_bytes

    def _layers(self, group: int) -> list[Tensor]:
        """Returns for each layer of a group its part of all pages, [pages, bytes] uint8."""
        if self._apart:
            return self._parts
        starts = [self._start(group, index) for index in range(len(self._layout.groups[group].layers) + 1)]
        return [self._parts[0][:, start:end] for start, end in pairwise(starts)]

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copies pages in all layers.

        Args:
            pages: [n, 2] int32. Source page, target page.
        """
        sources, targets = (torch.from_numpy(column.astype(np.int64)) for column in pages.T)
        for part in self._parts:
            part.index_copy_(0, targets, part.index_select(0, sources))

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        """Returns pages in canonical form, [pages, page_bytes] uint8. See `AttentionBackend.export`."""
        made = torch.zeros((len(pages), self._layout.page_bytes), dtype=torch.uint8)
        for group, chosen, which in _by_group(pages, groups):
            if group in self._layout.state_tables:
                made[which] = self._parts[0].index_select(0, chosen)
                continue
            own = [self._token_by_token(group, part.index_select(0, chosen)) for part in self._layers(group)]
            parts = [*(part for pair, _ in own for part in pair), *(part for _, pair in own for part in pair)]
            # `clone`: torch calls a tensor of one element contiguous whatever its stride, which `view` does not take.
            whole = [part.reshape(len(chosen), -1).clone(memory_format=torch.contiguous_format) for part in parts]
            form = [part.view(torch.uint8) for part in whole]
            made[which, : self._layout.group_bytes(group)] = torch.cat(form, dim=1)
        return made

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        """Fills pages with content that `export` made."""
        for group, chosen, which in _by_group(pages, groups):
            if group in self._layout.state_tables:
                self._parts[0].index_copy_(0, chosen, content[which])
                continue
            layers, form = self._layers(group), content[which]
            made = [torch.empty((len(chosen), layer.shape[1]), dtype=torch.uint8) for layer in layers]
            own = [self._token_by_token(group, part) for part in made]
            at = 0
            for to in (*(part for pair, _ in own for part in pair), *(part for _, pair in own for part in pair)):
                size = to[0].numel() * to.element_size()
                to.copy_(form[:, at : at + size].contiguous().view(to.dtype).view(to.shape))
                at += size
            for layer, part in zip(layers, made, strict=True):
                layer.index_copy_(0, chosen, part)

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with NaN; with int8 elements, their scales."""
        chosen = torch.from_numpy(pages.astype(np.int64))
        for part in self._parts:
            part.index_fill_(0, chosen, ALL_ONES)

    def _token_by_token(self, group: int, content: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns views of pages by token: of keys and values, and of the scales of both, if they have some.

        The dimensions of a view are pages, then all tokens of a page, then heads, then the elements of a head. Tokens
        and elements may take several dimensions each.

        Args:
            group: Layer group of the pages.
            content: [pages, bytes] uint8, as a layer's part of pages lies in memory.
        """
        h, n = self._heads[group], len(content)
        if h.latent:
            return self._latents(h, content)
        if h.rows:
            rows = content.view(n, self._page_size, h.kv_heads, -1)
            if not h.eight_bit:
                return rows.view(h.element.dtype).unflatten(-1, (2, h.dim)).unbind(3), ()
            return rows[..., : 2 * h.dim].unflatten(-1, (2, h.dim)).unbind(3), _floats(rows, 2 * h.dim).unbind(3)
        blocks = content.view(n, self._page_size // BLOCK, h.kv_heads, 2, h.part_bytes)
        if h.eight_bit:
            numbers = blocks[..., : h.number_bytes]
            keys = numbers[:, :, :, 0].unflatten(-1, (h.dim, BLOCK)).permute(0, 1, 4, 2, 3)
            values = numbers[:, :, :, 1].unflatten(-1, (BLOCK, h.dim)).permute(0, 1, 3, 2, 4)
            scales = _floats(blocks, h.number_bytes).permute(3, 0, 1, 4, 2)
            return (keys, values), (scales[0], scales[1])
        packed, elements = h.element.packed, blocks.view(h.element.dtype)
        keys = elements[:, :, :, 0].unflatten(-1, (h.dim // packed, BLOCK, packed)).permute(0, 1, 4, 2, 3, 5)
        values = elements[:, :, :, 1].unflatten(-1, (BLOCK // packed, h.dim, packed)).permute(0, 1, 3, 5, 2, 4)
        return (keys, values), ()

    def _latents(self, h: Heads, content: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns what `_token_by_token` does for keys alone."""
        n = len(content)
        if h.rows:
            rows = content.view(n, self._page_size, 1, -1)
            if not h.eight_bit:
                return (rows.view(h.element.dtype),), ()
            return (rows[..., : h.dim],), (_floats(rows, h.dim),)
        blocks = content.view(n, self._page_size // BLOCK, -1)
        if not h.eight_bit:
            elements = blocks.view(h.element.dtype).unflatten(-1, (h.dim // h.element.packed, BLOCK, h.element.packed))
            return (elements.transpose(2, 3),), ()
        numbers = blocks[..., : h.number_bytes].unflatten(-1, (h.dim, BLOCK)).transpose(2, 3)
        return (numbers,), (_floats(blocks, h.number_bytes).unsqueeze(-1),)


def _by_group(pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields each group among those of pages, its pages, and their indices, int64."""
    for group in np.unique(groups).tolist():
        which = np.flatnonzero(groups == group)
        yield group, torch.from_numpy(pages[which].astype(np.int64)), torch.from_numpy(which)


def _floats(content: Tensor, first: int) -> Tensor:
    """Returns the float32 from byte `first` of the last dimension on."""
    return content[..., first:].view(torch.float32)
