"""Bytes of the reference back end's KV pool: page by page, in a page layer by layer, in a layer token by token.

8-bit elements are int8, or float8 e4m3, with a scale for each token and head; see `model.kv_pool`.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout, LayerGroup
from model.kv_pool import ALL_ONES, EIGHT_BIT, to_eight_bit


class RowPool:
    """Pages of all layer groups, whose layers may have KV of any shape.

    A row is one token's KV in one layer: for each head what is kept of it, and with 8-bit elements the scales.

    Attributes:
        pages: [pages, page_bytes] uint8. The pool's memory.
    """

    def __init__(self, layout: KVLayout, pages: int, dtype: str, device: torch.device) -> None:
        """Allocates the pool, filled with zeros.

        Args:
            layout: Shape of pages.
            pages: The number of pages.
            dtype: Name of one of torch's floating-point types, "int8" or "fp8".
            device: Device of the pool.
        """
        self._layout, self._device = layout, device
        self._eight_bit = EIGHT_BIT.get(dtype)
        self._dtype = getattr(torch, dtype) if self._eight_bit is None else torch.uint8
        self._place = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self.pages = torch.zeros((pages, layout.page_bytes), dtype=torch.uint8, device=device)
        # [rows, heads, elements of a head] by layer, the rows from its first one on: `places` are indices in them.
        self._rows = {layer: self._rows_of(*place) for layer, place in self._place.items()}

    def _rows_of(self, group: int, index: int) -> Tensor:
        """Returns the rows from a group's layer `index` on; bytes where elements have 8 bits."""
        rows = self.pages.view(-1, self._layout.layer_bytes(group))[index * self._layout.page_size :]
        return rows.view(self._dtype).unflatten(1, (self._of(group).shape.heads, -1))

    def group_of(self, layer: int) -> int:
        """Returns the layer group of a layer."""
        return self._place[layer][0]

    def places(self, group: int, slots: NDArray[np.int64]) -> Tensor:
        """Returns where the rows of slots are in the group's first layer, int64 on the device.

        Args:
            group: Layer group.
            slots: int64 of any shape, page x page_size + offset.
        """
        size = self._layout.page_size
        between = self._layout.page_bytes // self._layout.layer_bytes(group) - size  # rows of the page's other layers
        return torch.from_numpy(slots + slots // size * between).to(self._device)

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes tokens.

        Args:
            layer: Index of the layer in the model.
            places: [tokens] int64, see `places`.
            keys: [tokens, kv_heads, key_dim].
            values: [tokens, kv_heads, value_dim].
        """
        kind = self._eight_bit
        kept = (keys, values)[: len(self._of(self.group_of(layer)).shape.kept)]
        if kind is None:
            row = torch.cat(kept, dim=-1).to(self._dtype)
        else:
            stored = [_stored(part, kind) for part in kept]
            row = torch.cat([part[i] for i in range(2) for part in stored], dim=-1)
        self._rows[layer].index_copy_(0, places, row)

    def read(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V of some tokens, [kv_heads, tokens, key_dim] and [kv_heads, tokens, value_dim] float32.

        Args:
            layer: Index of the layer in the model.
            places: [tokens] int64, see `places`.
        """
        kind, group = self._eight_bit, self._of(self._place[layer][0])
        heads = self._rows[layer].index_select(0, places).transpose(0, 1)
        if kind is None:
            kept = [_floats(part) for part in heads.split_with_sizes(group.shape.kept, dim=-1)]
        else:
            parts, scales = self._split(heads, group)
            kept = [
                _viewed(part, kind).float().mul_(_viewed(scale, torch.float32))
                for part, scale in zip(parts, scales, strict=True)
            ]
        return kept[0], kept[1] if len(kept) > 1 else kept[0][..., : group.shape.value_dim].contiguous()

    def _split(self, heads: Tensor, group: LayerGroup) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Cuts the last dimension, bytes of a head, into what is kept of it and, with 8-bit elements, their scales."""
        kept = group.shape.kept
        sizes = [elements * self._layout.element_bytes for elements in kept]
        scales = [self._layout.scale_bytes] * len(kept) if self._eight_bit is not None else []
        parts = heads.split([*sizes, *scales], dim=-1)
        return parts[: len(kept)], parts[len(kept) :]

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copies pages.

        Args:
            pages: [n, 2] int32. Source page, target page; no page is both.
        """
        sources, targets = (self._to_device(column) for column in pages.T)
        self.pages.index_copy_(0, targets, self.pages.index_select(0, sources))

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        """Returns pages in canonical form, as `AttentionBackend.export` does."""
        content = self.pages.index_select(0, self._to_device(pages))
        made = torch.zeros_like(content)
        for group in np.unique(groups).tolist():
            chosen = self._to_device(np.flatnonzero(groups == group))
            if group in self._layout.state_tables:
                made[chosen] = content.index_select(0, chosen)
                continue
            kept, scales = self._split(self._heads(content.index_select(0, chosen), group), self._of(group))
            parts = [kept, *([scales] if scales else [])]
            form = torch.cat([torch.cat([p.flatten(2) for p in pair], 2).flatten(1) for pair in parts], 1)
            made[chosen, : form.shape[1]] = form
        return made

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        """Fills pages from canonical form, as `AttentionBackend.import_pages` does."""
        made = torch.zeros((len(pages), self._layout.page_bytes), dtype=torch.uint8, device=self._device)
        for group in np.unique(groups).tolist():
            chosen = self._to_device(np.flatnonzero(groups == group))
            form = content.to(self._device).index_select(0, chosen)
            if group in self._layout.state_tables:
                made[chosen] = form
                continue
            own = torch.empty_like(form)
            kept, scales = self._split(self._heads(own, group), self._of(group))
            at = 0
            for pair in (kept, *([scales] if scales else [])):
                width = sum(part[0, 0].numel() for part in pair)
                layers = form[:, at : at + len(self._of(group).layers) * width].unflatten(1, (-1, width))
                for part, of_layer in zip(pair, layers.split([p[0, 0].numel() for p in pair], 2), strict=True):
                    part.copy_(of_layer.unflatten(2, part.shape[2:]))
                at += layers[0].numel()
            made[chosen, : self._layout.group_bytes(group)] = own[:, : self._layout.group_bytes(group)]
        self.pages.index_copy_(0, self._to_device(pages), made)

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with NaN; with int8 elements, their scales."""
        self.pages.index_fill_(0, self._to_device(pages), ALL_ONES)

    def _of(self, group: int) -> LayerGroup:
        return self._layout.groups[group]

    def _heads(self, content: Tensor, group: int) -> Tensor:
        """Returns a view of pages' content, [pages, layers, tokens, heads, bytes of a head]."""
        of = self._of(group)
        used = content[:, : self._layout.group_bytes(group)]
        return used.unflatten(1, (len(of.layers), self._layout.page_size, of.shape.heads, -1))

    def _to_device(self, numbers: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device, non_blocking=True)


def _stored(rows: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns [..., bytes] uint8: 8-bit elements, and their scales."""
    elements, scales = to_eight_bit(rows, kind)
    return elements, scales.contiguous().view(torch.uint8)


def _floats(elements: Tensor) -> Tensor:
    """Returns contiguous float32. Other types are converted and put in order in one pass."""
    if elements.dtype == torch.float32:  # `to` returns these as they are, in whatever order
        return elements.contiguous()
    return elements.to(torch.float32, memory_format=torch.contiguous_format)


def _viewed(content: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns bytes as elements; the last dimension holds whole ones."""
    return content.contiguous().view(dtype)
