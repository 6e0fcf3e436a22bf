"""Pages as the kernels of the CPU read them, and the form in which all back ends exchange them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.cpu.kernels.kv import BLOCK, Heads


class Pages:
    """contents: of each layer of a group, uint8 [pages, bytes of a page in it]."""

    def __init__(self, heads: Heads, page_size: int, contents: list[Tensor]) -> None:
        self._heads, self._page_size, self._contents = heads, page_size, contents

    def copy(self, pages: NDArray[np.int32]) -> None:
        """pages: [n, 2] of page to copy from, page to copy to."""
        sources, targets = (torch.from_numpy(column.astype(np.int64)) for column in pages.T)
        for content in self._contents:
            content.index_copy_(0, targets, content.index_select(0, sources))

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        """uint8 [pages, bytes of a page in all layers], see `AttentionBackend`."""
        chosen = torch.from_numpy(pages.astype(np.int64))
        own = [self._token_by_token(content.index_select(0, chosen)) for content in self._contents]
        parts = [*(part for pair, _ in own for part in pair), *(part for _, pair in own for part in pair)]
        return torch.cat([part.reshape(len(pages), -1).contiguous().view(torch.uint8) for part in parts], dim=1)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        """content: as `export` made it."""
        chosen = torch.from_numpy(pages.astype(np.int64))
        made = [torch.empty((len(pages), own.shape[1]), dtype=torch.uint8) for own in self._contents]
        own = [self._token_by_token(part) for part in made]
        at = 0
        for to in (*(part for pair, _ in own for part in pair), *(part for _, pair in own for part in pair)):
            size = to[0].numel() * to.element_size()
            to.copy_(content[:, at : at + size].contiguous().view(to.dtype).view(to.shape))
            at += size
        for pool, part in zip(self._contents, made, strict=True):
            pool.index_copy_(0, chosen, part)

    def poison(self, pages: NDArray[np.int32]) -> None:
        """Fills pages with NaN, or their scales where they have some."""
        chosen = torch.from_numpy(pages.astype(np.int64))
        for content in self._contents:
            numbers, scales = self._token_by_token(content)
            for part in scales or numbers:
                part.index_fill_(0, chosen, torch.nan)

    def _token_by_token(self, content: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """content: pages as they lie in memory. Views of their keys and values, and of the scales of both where they
        have some: first all tokens of a page, then heads, then the elements of a head, each in one or more dimensions.
        """
        h, n = self._heads, len(content)
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


def _floats(content: Tensor, first: int) -> Tensor:
    """The float32 from this byte of the last dimension on."""
    return content[..., first:].view(torch.float32)
