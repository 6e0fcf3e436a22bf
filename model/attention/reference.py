"""Paged attention in plain torch: runs anywhere, and is what the tuned back ends are checked against.

Queries are cut into tiles and keys into blocks at fixed absolute positions, and each (tile, block) is one product of
fixed shape. So the bits of a query's result depend on nothing but its own sequence: not on the batch, the chunk it came
in, the page size or where its pages lie. (torch.bmm gives each matrix of a batch the same bits for any number of
matrices, where each is whole multiples of 16 bytes, but not for any number of rows in a matrix; seen with torch 2.13 on
AVX-512.) The price is that a decode computes a whole tile.

Softmax is the online form of Milakov and Gimelshein, 2018, block by block in order of position.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StepShape
from model.kv_pool import KVPool

BLOCK = 128  # keys in a block
TILE_ROWS = 8  # queries x heads of a group in a tile, about: fewer waste less of a decode, more read keys less often


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """One block of keys for the first `tiles` tiles. slots: [tiles x BLOCK]. hidden: [tiles, rows, BLOCK], True where a
    query must not look; None where all may.
    """

    tiles: int
    slots: Tensor
    hidden: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePlan:
    """slots: [tokens] of the step's own KV. gather: [tiles x tile] packed index of each query place, tokens where there
    is none. scatter: [tokens] query place of each packed token. Tiles with more blocks come first.
    """

    slots: Tensor
    gather: Tensor
    scatter: Tensor
    tiles: int
    blocks: tuple[_Block, ...]


class ReferenceAttention:
    """`AttentionBackend` for one layer group. dtype: of the KV, as in `KVPool`."""

    name = "reference"

    def __init__(self, layout: KVLayout, pages: int, heads: int, dtype: str, device: torch.device) -> None:
        self._page_size, self._kv_heads = layout.page_size, layout.kv_heads
        self._group = heads // layout.kv_heads
        # Whole 16 bytes in each matrix: MKL's product has other bits for one of a batch that starts elsewhere.
        whole = 4 // math.gcd(self._group, 4)
        self._tile = -(-max(1, TILE_ROWS // self._group) // whole) * whole
        self._device = device
        self.pool = KVPool(layout, pages, dtype, device)

    def plan(self, shape: StepShape) -> ReferencePlan:
        row, start, count = shape.slices.astype(np.int64).T
        end, tile = start + count, self._tile
        tiles_of = (end - 1) // tile - start // tile + 1
        owner = np.repeat(np.arange(len(row)), tiles_of)  # the slice of each tile
        number = start[owner] // tile + _ranges(tiles_of)  # which tile of its sequence
        last = np.minimum((number + 1) * tile, end[owner]) - 1  # its last query
        depth = last // BLOCK + 1
        order = np.argsort(-depth, kind="stable")
        owner, number, depth = owner[order], number[order], depth[order]
        positions = number[:, None] * tile + np.arange(tile)
        inside = (positions >= start[owner, None]) & (positions < end[owner, None])
        first = np.cumsum(count) - count  # packed index of each slice's first token
        tokens = int(count.sum())
        gather = np.where(inside, first[owner, None] + positions - start[owner, None], tokens)
        scatter = np.empty(tokens, np.int64)
        scatter[gather[inside]] = np.flatnonzero(inside)
        blocks = tuple(
            self._block(index, row[owner], end[owner], positions, depth, shape.tables[0])
            for index in range(int(depth[0]))
        )
        return ReferencePlan(
            self._to_device(shape.slots[0]),
            self._to_device(gather.reshape(-1)),
            self._to_device(scatter),
            len(owner),
            blocks,
        )

    def _block(
        self,
        index: int,
        row: NDArray[np.int64],
        end: NDArray[np.int64],
        positions: NDArray[np.int64],
        depth: NDArray[np.int64],
        table: NDArray[np.int32],
    ) -> _Block:
        tiles = int(np.count_nonzero(depth > index))
        keys = index * BLOCK + np.arange(BLOCK)
        hidden = keys[None, None, :] > positions[:tiles, :, None]
        # Past the end of a sequence its last key stands in: hidden, but finite, where a freed page might hold NaN.
        held = np.minimum(keys[None, :], end[:tiles, None] - 1)
        slots = table[row[:tiles, None], held // self._page_size].astype(np.int64) * self._page_size
        slots += held % self._page_size
        mask = self._to_device(hidden.repeat(self._group, axis=1)) if hidden.any() else None
        return _Block(tiles, self._to_device(slots.reshape(-1)), mask)

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: ReferencePlan) -> None:
        self.pool.write(layer, plan.slots, keys, values)

    def attend(self, layer: int, queries: Tensor, plan: ReferencePlan) -> Tensor:
        _, heads, dim = queries.shape
        kv_heads, group, tiles = self._kv_heads, self._group, plan.tiles
        rows = self._tile * group
        padded = torch.cat((queries.float() * dim**-0.5, queries.new_zeros((1, heads, dim), dtype=torch.float32)))
        q = padded[plan.gather].view(tiles, self._tile, kv_heads, group, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, rows, dim)
        top = q.new_full((kv_heads, tiles, rows, 1), -torch.inf)
        total = q.new_zeros((kv_heads, tiles, rows, 1))
        mixed = q.new_zeros((kv_heads, tiles, rows, dim))
        for block in plan.blocks:
            n = block.tiles
            k, v = (part.view(kv_heads * n, BLOCK, dim) for part in self.pool.read(layer, block.slots))
            scores = torch.bmm(q[:, :n].reshape(kv_heads * n, rows, dim), k.transpose(1, 2))
            scores = scores.view(kv_heads, n, rows, BLOCK)
            if block.hidden is not None:
                scores.masked_fill_(block.hidden, -torch.inf)
            new_top = torch.maximum(top[:, :n], scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            faded = torch.exp(top[:, :n] - new_top)
            product = torch.bmm(weights.view(kv_heads * n, rows, BLOCK), v).view(kv_heads, n, rows, dim)
            top[:, :n] = new_top
            total[:, :n].mul_(faded).add_(weights.sum(-1, keepdim=True))
            mixed[:, :n].mul_(faded).add_(product)
        out = (mixed / total).view(kv_heads, tiles, self._tile, group, dim).permute(1, 2, 0, 3, 4)
        return out.reshape(tiles * self._tile, heads, dim)[plan.scatter].to(queries.dtype)

    def copy(self, pages: NDArray[np.int32]) -> None:
        self.pool.copy(pages)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self.pool.poison(pages)

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[0 .. c0 - 1, 0 .. c1 - 1, ...]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
