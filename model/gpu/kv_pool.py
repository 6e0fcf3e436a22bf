"""Bytes of the GPU's KV pool: pages one after the other, in the model's dtype or in 8 bits (see `model.kv_pool`)."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.kv_pool import ALL_ONES, EIGHT_BIT

ALIGNMENT = 64  # bytes; pages begin at multiples, so that kernels copy whole 16 bytes, whatever the element
ELEMENTS = torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8  # to move bytes in, widest first


@dataclass(frozen=True, slots=True)
class PagePart:
    """Part of a page: keys or values of one layer, or the scales of either.

    Attributes:
        offset: Bytes from the beginning of the page.
        heads: KV heads.
        width: Bytes of a token's row of one head.
    """

    offset: int
    heads: int
    width: int


@dataclass(frozen=True, slots=True)
class PartRun:
    """Parts of one shape that follow each other. In canonical form their tokens come before their heads.

    Attributes:
        offset: Bytes from the beginning of the page.
        parts: The number of parts.
        heads: KV heads.
        width: Bytes of a token's row of one head.
        element: Type that rows are moved in. Few wide elements are quicker to move than their bytes.
    """

    offset: int
    parts: int
    heads: int
    width: int
    element: torch.dtype

    @staticmethod
    def of(parts: Iterable[PagePart], multiple: int) -> "list[PartRun]":
        """Returns the runs of parts in the order of their offsets.

        Args:
            parts: Parts that follow each other without gaps.
            multiple: Greatest common divisor of the bytes from page to page, in the pool and in canonical form.
        """
        made = list[PartRun]()
        for (heads, width), run in groupby(parts, lambda part: (part.heads, part.width)):
            same = list(run)
            step = gcd(same[0].offset, width, multiple)
            element = next(element for element in ELEMENTS if step % element.itemsize == 0)
            made.append(PartRun(same[0].offset, len(same), heads, width, element))
        return made

    def of_pages(self, pages: Tensor, page_size: int) -> Tensor:
        """Returns the run in pages [n, stride] uint8, a view [n, parts, page_size, heads, elements]."""
        return self._within(pages, page_size, self.heads, page_size).transpose(2, 3)

    def of_form(self, form: Tensor, page_size: int) -> Tensor:
        """Returns the run in canonical form [n, page_bytes] uint8, a view [n, parts, page_size, heads, elements]."""
        return self._within(form, page_size, page_size, self.heads)

    def _within(self, pages: Tensor, page_size: int, outer: int, inner: int) -> Tensor:
        size = self.parts * self.heads * page_size * self.width
        run = pages[:, self.offset : self.offset + size].view(self.element)
        return run.unflatten(1, (self.parts, outer, inner, self.width // self.element.itemsize))


class KVPool:
    """Pages in one memory.

    A page has for each layer of its group K and V, or K alone where values are in keys (latent attention), each
    [kv_heads, page_size, head_dim]. With 8-bit elements the scales of all follow, each [kv_heads, page_size] float32.
    A page of a recurrent layer's state has units, as `cache_manager.states` places them.

    Attributes:
        count: The number of pages.
        stride: Bytes from a page to the next one.
    """

    def __init__(self, layout: KVLayout, pages: int, dtype: str, device: torch.device) -> None:
        """Allocates the pool, filled with zeros.

        Args:
            layout: Shape of pages.
            pages: The number of pages.
            dtype: Name of one of torch's floating-point types, "int8" or "fp8".
            device: Device of the pool.
        """
        self._layout, self._device, self.count = layout, device, pages
        self._eight_bit: torch.dtype | None = EIGHT_BIT.get(dtype)
        # As bytes: torch has index_copy_ and index_select for uint8, not for float8.
        self._stored = getattr(torch, dtype) if self._eight_bit is None else torch.uint8
        self.stride = -(-layout.page_bytes // ALIGNMENT) * ALIGNMENT
        self._pages = torch.zeros((pages, self.stride), dtype=torch.uint8, device=device)
        self._words = self._pages.view(torch.int64)  # to move whole pages: torch moves element by element
        self._elements, self._scales = zip(*(self._parts(group) for group in range(len(layout.groups))), strict=True)
        # Parts have the same places in a page and in canonical form.
        ordered = [[*chain(*e, *s)] for e, s in zip(self._elements, self._scales, strict=True)]
        multiple = gcd(self.stride, layout.page_bytes)
        self._runs = [PartRun.of(parts, multiple) for parts in ordered]
        self._used = [sum(part.heads * part.width for part in parts) * layout.page_size for parts in ordered]

    def _parts(self, group: int) -> tuple[list[list[PagePart]], list[list[PagePart]]]:
        """Returns for each layer of a group its elements, and its scales if it has some."""
        shape, at, made = self._layout.groups[group].shape, 0, []
        layers = range(len(self._layout.groups[group].layers))
        scales = self._layout.scale_bytes
        for widths in ([n * self._stored.itemsize for n in shape.kept], [scales] * (len(shape.kept) if scales else 0)):
            kind = list[list[PagePart]]()
            for _ in layers:
                kind.append([])
                for width in widths:
                    kind[-1].append(PagePart(at, shape.heads, width))
                    at += shape.heads * self._layout.page_size * width
            made.append(kind)
        return made[0], made[1]

    @property
    def eight_bit(self) -> torch.dtype | None:
        """Dtype of 8-bit elements. None for other elements."""
        return self._eight_bit

    @property
    def floats(self) -> Tensor:
        """The pool as float32, from page 0 on: what states of recurrent layers are kept in."""
        return self._pages.view(-1).view(torch.float32)

    def elements(self, group: int, layer: int) -> list[Tensor]:
        """Returns what is kept of a layer, K and V: the pool from its part of page 0 on; uint8 for 8-bit elements.

        Args:
            group: The layer's group.
            layer: Index of the layer in it.
        """
        return [self._pages.view(-1)[part.offset :].view(self._stored) for part in self._elements[group][layer]]

    def scales(self, group: int, layer: int) -> list[Tensor]:
        """Returns the scales of what is kept of a layer, likewise, float32; none without 8-bit elements."""
        return [self._pages.view(-1)[part.offset :].view(torch.float32) for part in self._scales[group][layer]]

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copies pages.

        Args:
            pages: [n, 2] int32. Source page, target page; no page is both.
        """
        sources, targets = self._on_device(pages[:, 0]), self._on_device(pages[:, 1])
        self._words.index_copy_(0, targets, self._words[sources])

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        """Returns pages in canonical form, as `AttentionBackend.export` does."""
        made = torch.empty((len(pages), self._layout.page_bytes), dtype=torch.uint8, device=self._device)
        for group, chosen, which in self._by_group(pages, groups):
            form = self._to_form(group, self._words[chosen].view(torch.uint8))
            if len(form) == len(pages):
                return form
            made.index_copy_(0, which, form)
        return made

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        """Fills pages from canonical form, as `AttentionBackend.import_pages` does."""
        content = content.to(self._device)
        for group, chosen, which in self._by_group(pages, groups):
            form = content if len(which) == len(content) else content.index_select(0, which)
            self._words.index_copy_(0, chosen, self._from_form(group, form).view(torch.int64))

    def _to_form(self, group: int, pages: Tensor) -> Tensor:
        """Returns pages [n, stride] in canonical form, [n, page_bytes]."""
        if group >= len(self._layout.groups):  # of a state
            return pages[:, : self._layout.page_bytes].contiguous()
        made = pages.new_empty((len(pages), self._layout.page_bytes))
        return self._moved(group, pages, made, to_form=True)

    def _from_form(self, group: int, form: Tensor) -> Tensor:
        """Returns pages [n, stride] of canonical form, [n, page_bytes]."""
        made = form.new_empty((len(form), self.stride))
        if group >= len(self._layout.groups):  # of a state
            made[:, : form.shape[1]] = form
            made[:, form.shape[1] :] = 0
            return made
        return self._moved(group, made, form, to_form=False)

    def _moved(self, group: int, pages: Tensor, form: Tensor, to_form: bool) -> Tensor:
        """Fills one of pages [n, stride] and their canonical form [n, page_bytes] from the other one; returns it."""
        for run in self._runs[group]:
            sides = run.of_pages(pages, self._layout.page_size), run.of_form(form, self._layout.page_size)
            source, target = sides if to_form else reversed(sides)
            target.copy_(source)
        made = form if to_form else pages
        made[:, self._used[group] :] = 0
        return made

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with bytes that are NaN in every floating-point type, as the other pools do."""
        self._pages.index_fill_(0, self._on_device(pages), ALL_ONES)

    def _by_group(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yields each group among those of pages, its pages, and their indices, int64."""
        for group in np.unique(groups).tolist():
            which = np.flatnonzero(groups == group)
            yield group, self._on_device(pages[which]), self._on_device(which)

    def _on_device(self, numbers: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device, non_blocking=True)
