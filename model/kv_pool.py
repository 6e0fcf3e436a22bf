"""The bytes of the KV pool: keys and values by slot, in the model's dtype or in 8 bits.

8-bit elements are int8, or float8 e4m3 (Micikevicius et al., FP8 Formats for Deep Learning, 2022), with one float32
scale for each token and head, K and V apart: largest magnitude / largest value of the format. It is known when the
token is written, and nothing that was written before is ever scaled anew; so pages can be shared as they are.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout

EIGHT_BIT = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KVPool:
    """Pages of one layer group's layers. K and V of a layer are [kv_heads, slots, head_dim]; slot: page x page_size +
    offset. dtype: a name of torch's floating-point types, "int8" or "fp8".
    """

    def __init__(self, layout: KVLayout, pages: int, dtype: str, device: torch.device) -> None:
        self._page_size, self._device = layout.page_size, device
        self._eight_bit: torch.dtype | None = EIGHT_BIT.get(dtype)
        # As bytes: torch has index_copy_ and index_select for uint8, not for float8.
        stored = getattr(torch, dtype) if self._eight_bit is None else torch.uint8
        slots = pages * layout.page_size
        layers = range(len(layout.groups[0]))

        def zeros(width: int, kind: torch.dtype) -> list[tuple[Tensor, Tensor]]:
            shape = (layout.kv_heads, slots, width)
            made = [torch.zeros(shape, dtype=kind, device=device) for _ in range(2 * len(layers))]
            return list(zip(made[::2], made[1::2], strict=True))

        self._elements = zeros(layout.head_dim, stored)
        self._scales = zeros(1, torch.float32) if self._eight_bit is not None else []

    @property
    def eight_bit(self) -> torch.dtype | None:
        """Of the elements, where they have 8 bits."""
        return self._eight_bit

    def elements(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V, [kv_heads, slots, head_dim]; bytes where they have 8 bits."""
        return self._elements[layer]

    def scales(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Of K and V, float32 [kv_heads, slots, 1]; None where there are none."""
        return self._scales[layer] if self._scales else None

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values: [tokens, kv_heads, head_dim], into these slots [tokens]."""
        for which, rows in enumerate((keys, values)):
            rows = rows.transpose(0, 1)
            if self._eight_bit is not None:
                rows, scale = _to_eight_bit(rows, self._eight_bit)
                self._scales[layer][which].index_copy_(1, slots, scale)
            store = self._elements[layer][which]
            store.index_copy_(1, slots, rows.to(store.dtype))

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of these slots, float32 [kv_heads, slots, head_dim]."""
        keys, values = (self._read(layer, which, slots) for which in (0, 1))
        return keys, values

    def _read(self, layer: int, which: int, slots: Tensor) -> Tensor:
        rows = self._elements[layer][which].index_select(1, slots)
        if self._eight_bit is None:
            return rows.float()
        return rows.view(self._eight_bit).float().mul_(self._scales[layer][which].index_select(1, slots))

    def copy(self, pages: NDArray[np.int32]) -> None:
        """pages: [n, 2] of page to copy from, page to copy to; no page is both."""
        sources, targets = self._slots(pages[:, 0]), self._slots(pages[:, 1])
        for pair in (*self._elements, *self._scales):
            for store in pair:
                store.index_copy_(1, targets, store.index_select(1, sources))

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        """Pages in canonical form: uint8 [pages, page_bytes], for each layer K and V as [tokens, kv_heads, head_dim],
        then, with 8 bits, their scales likewise.
        """
        slots, n = self._slots(pages), len(pages)
        parts = [
            store.index_select(1, slots).unflatten(1, (n, self._page_size)).permute(1, 2, 0, 3).reshape(n, -1)
            for pair in (*self._elements, *self._scales)
            for store in pair
        ]
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        """content: as `export` made it."""
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
        """Fills pages with NaN."""
        slots = self._slots(pages)
        for pair in self._scales or self._elements:
            for store in pair:
                store.index_fill_(1, slots, torch.nan)

    def _slots(self, pages: NDArray[np.int32]) -> Tensor:
        """All slots of these pages."""
        slots = pages[:, None].astype(np.int64) * self._page_size + np.arange(self._page_size)
        return torch.from_numpy(slots.reshape(-1)).to(self._device, non_blocking=True)


def _to_eight_bit(rows: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """rows: [..., head_dim]. Returns their elements as bytes of `kind`, and the scales [..., 1]."""
    rows = rows.float()
    scale = rows.abs().amax(-1, keepdim=True).div_(LARGEST[kind])
    scale.masked_fill_(scale == 0, 1.0)
    scaled = rows / scale
    if kind is torch.int8:
        scaled = scaled.round_()
    return scaled.clamp_(-LARGEST[kind], LARGEST[kind]).to(kind).view(torch.uint8), scale
