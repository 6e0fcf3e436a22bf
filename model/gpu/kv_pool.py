"""Bytes of the GPU's KV pool: keys and values by slot, in the model's dtype or in 8 bits (see `model.kv_pool`)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.kv_pool import ALL_ONES, EIGHT_BIT


class KVPool:
    """Pages whose layers have KV of one shape, with equally many layers in all groups.

    K and V of a layer are [kv_heads, slots, head_dim], or K alone where values are in keys (latent attention). A slot
    is page x page_size + offset.
    """

    def __init__(self, layout: KVLayout, pages: int, dtype: str, device: torch.device) -> None:
        """Allocates the pool, filled with zeros.

        Args:
            layout: Shape of pages.
            pages: The number of pages.
            dtype: Name of one of torch's floating-point types, "int8" or "fp8".
            device: Device of the pool.
        """
        self._page_size, self._device = layout.page_size, device
        self._eight_bit: torch.dtype | None = EIGHT_BIT.get(dtype)
        # As bytes: torch has index_copy_ and index_select for uint8, not for float8.
        stored = getattr(torch, dtype) if self._eight_bit is None else torch.uint8
        slots = pages * layout.page_size
        layers, kv = range(len(layout.groups[0].layers)), layout.groups[0].shape

        def zeros(width: int, kind: torch.dtype) -> list[tuple[Tensor, ...]]:
            shape = (kv.heads, slots, width)
            return [tuple(torch.zeros(shape, dtype=kind, device=device) for _ in kv.kept) for _ in layers]

        self._elements = zeros(kv.key_dim, stored)
        self._scales = zeros(1, torch.float32) if self._eight_bit is not None else []

    @property
    def eight_bit(self) -> torch.dtype | None:
        """Dtype of 8-bit elements. None for other elements."""
        return self._eight_bit

    def elements(self, layer: int) -> tuple[Tensor, ...]:
        """Returns what is kept of a layer, K and V, each [kv_heads, slots, head_dim]; uint8 for 8-bit elements."""
        return self._elements[layer]

    def scales(self, layer: int) -> tuple[Tensor, ...] | None:
        """Returns the scales of what is kept, each [kv_heads, slots, 1] float32. None without 8-bit elements."""
        return self._scales[layer] if self._scales else None

    def copy(self, pages: NDArray[np.int32]) -> None:
        """Copies pages in all layers.

        Args:
            pages: [n, 2] int32. Source page, target page; no page is both.
        """
        sources, targets = self._slots(pages[:, 0]), self._slots(pages[:, 1])
        for pair in (*self._elements, *self._scales):
            for store in pair:
                store.index_copy_(1, targets, store.index_select(1, sources))

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        """Returns pages in canonical form, [pages, page_bytes] uint8.

        For each layer what is kept as [tokens, kv_heads, head_dim], then the scales likewise with 8-bit elements.
        """
        slots, n = self._slots(pages), len(pages)
        parts = [
            store.index_select(1, slots).unflatten(1, (n, self._page_size)).permute(1, 2, 0, 3).reshape(n, -1)
            for pair in (*self._elements, *self._scales)
            for store in pair
        ]
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        """Fills pages.

        Args:
            pages: [n] int32.
            content: [n, page_bytes] uint8, as `export` returns it.
        """
        slots, n, at = self._slots(pages), len(pages), 0
        for pair in (*self._elements, *self._scales):
            for store in pair:
                heads, _, width = store.shape
                size = heads * self._page_size * width * store.element_size()
                part = content[:, at : at + size].contiguous().to(self._device).view(store.dtype)
                part = part.view(n, self._page_size, heads, width).permute(2, 0, 1, 3)
                store.index_copy_(1, slots, part.reshape(heads, n * self._page_size, width))
                at += size

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with bytes that are NaN in every floating-point type, as the other pools do."""
        slots = self._slots(pages)
        for pair in (*self._elements, *self._scales):
            for store in pair:
                store.view(torch.uint8).index_fill_(1, slots, ALL_ONES)

    def _slots(self, pages: NDArray[np.int32]) -> Tensor:
        """Returns all slots of these pages, page by page."""
        slots = pages[:, None].astype(np.int64) * self._page_size + np.arange(self._page_size)
        return torch.from_numpy(slots.reshape(-1)).to(self._device, non_blocking=True)
