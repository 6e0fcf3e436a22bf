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

from cache_manager.layout import MOST_TOKENS, KVLayout
from model.attention.backend import StepShape
from model.kv_pool import KVPool
from model.layers import soft_capped

BLOCK = 128  # keys in a block
TILE_ROWS = 8  # queries x heads of a group in a tile, about: fewer waste less of a decode, more read keys less often


LEAST = torch.finfo(torch.float32).min  # below any score: a query may see nothing of the first block of its tile


@dataclass(frozen=True, slots=True, eq=False)
class _Keys:
    """One block of keys for each of the first tiles. positions: [tiles, BLOCK]. hidden: [tiles, rows, BLOCK], True
    where a query must not look; None where all may.
    """

    positions: NDArray[np.int64]
    hidden: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """How the queries of a step are cut, for layers with the same window. Tiles that see more blocks come first.

    row: [tiles] batch row. gather: [tiles x tile] packed index of each query place, tokens where there is none.
    scatter: [tokens] query place of each packed token.
    """

    row: NDArray[np.int64]
    gather: Tensor
    scatter: Tensor
    blocks: tuple[_Keys, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _GroupPlan:
    """For one layer group. slots: [tokens] of the step's own KV. keys: by block, [tiles x BLOCK] slots."""

    tiles: _Tiles
    slots: Tensor
    keys: tuple[Tensor, ...]


ReferencePlan = tuple[_GroupPlan, ...]


class ReferenceAttention:
    """`AttentionBackend` for models whose queries, keys and values are alike in all layers. dtype: of the KV, as in
    `KVPool`. scale: of the scores, 1 / sqrt(head_dim) unless told. soft_cap: scores then stay within it, by tanh.
    """

    name = "reference"

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        heads: int,
        dtype: str,
        device: torch.device,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        self._scale, self._soft_cap = scale or layout.head_dim**-0.5, soft_cap
        self._page_size, self._kv_heads = layout.page_size, layout.kv_heads
        self._windows = [layout.window(group) for group in range(len(layout.groups))]
        self._place = {layer: (g, i) for g, layers in enumerate(layout.groups) for i, layer in enumerate(layers)}
        self._group = heads // layout.kv_heads
        # Whole 16 bytes in each matrix: MKL's product has other bits for one of a batch that starts elsewhere.
        whole = 4 // math.gcd(self._group, 4)
        self._tile = -(-max(1, TILE_ROWS // self._group) // whole) * whole
        self._device = device
        self.pool = KVPool(layout, pages, dtype, device)

    def plan(self, shape: StepShape) -> ReferencePlan:
        slices = shape.slices.astype(np.int64)
        tiles = {window: self._cut(slices, shape.whole, window) for window in set(self._windows)}
        return tuple(
            _GroupPlan(
                tiles[window],
                self._to_device(shape.slots[group]),
                tuple(self._slots(shape.tables[group], tiles[window].row, keys) for keys in tiles[window].blocks),
            )
            for group, window in enumerate(self._windows)
        )

    def _cut(self, slices: NDArray[np.int64], whole: NDArray[np.int64], window: int | None) -> _Tiles:
        row, start, count = slices.T
        end, tile = start + count, self._tile
        tiles_of = (end - 1) // tile - start // tile + 1
        owner = np.repeat(np.arange(len(row)), tiles_of)  # the slice of each tile
        number = start[owner] // tile + _ranges(tiles_of)  # which tile of its sequence
        last = np.minimum((number + 1) * tile, end[owner]) - 1  # its last query
        before = number * tile + 1 - (window or MOST_TOKENS)  # no query of the tile sees a key that is further back
        inside_whole = number * tile < whole[owner]
        last, before = np.where(inside_whole, np.maximum(last, whole[owner] - 1), last), before * ~inside_whole
        first = np.maximum(before, 0) // BLOCK
        depth = last // BLOCK + 1 - first
        order = np.argsort(-depth, kind="stable")
        owner, number, first, depth = owner[order], number[order], first[order], depth[order]
        positions = number[:, None] * tile + np.arange(tile)
        inside = (positions >= start[owner, None]) & (positions < end[owner, None])
        packed = np.cumsum(count) - count  # packed index of each slice's first token
        tokens = int(count.sum())
        gather = np.where(inside, packed[owner, None] + positions - start[owner, None], tokens)
        scatter = np.empty(tokens, np.int64)
        scatter[gather[inside]] = np.flatnonzero(inside)
        blocks = []
        for i in range(int(depth[0])):
            n = int(np.count_nonzero(depth > i))
            keys = (first[:n, None] + i) * BLOCK + np.arange(BLOCK)
            blocks.append(self._block(keys, slices[owner[:n]], whole[owner[:n]], positions[:n], window))
        return _Tiles(row[owner], self._to_device(gather.reshape(-1)), self._to_device(scatter), tuple(blocks))

    def _block(
        self,
        keys: NDArray[np.int64],
        slices: NDArray[np.int64],
        whole: NDArray[np.int64],
        positions: NDArray[np.int64],
        window: int | None,
    ) -> _Keys:
        """keys: [tiles, BLOCK] positions. slices, whole: [tiles] of each. positions: [tiles, tile] of the queries."""
        hidden = keys[:, None, :] > positions[:, :, None]
        if window is not None:
            hidden |= keys[:, None, :] <= positions[:, :, None] - window
        if whole.any():
            both_ways = positions < whole[:, None]
            hidden = np.where(both_ways[:, :, None], (keys >= whole[:, None])[:, None, :], hidden)
        # Past the end of a sequence, and before what its first query sees, a key stands in that is hidden, but finite,
        # where a freed page might hold NaN.
        _, start, count = slices.T
        first = np.where(start < whole, 0, np.maximum(start + 1 - (window or MOST_TOKENS), 0))
        mask = self._to_device(hidden.repeat(self._group, axis=1)) if hidden.any() else None
        return _Keys(np.clip(keys, first[:, None], (start + count)[:, None] - 1), mask)

    def _slots(self, table: NDArray[np.int32], row: NDArray[np.int64], keys: _Keys) -> Tensor:
        where = keys.positions
        slots = table[row[: len(where), None], where // self._page_size].astype(np.int64) * self._page_size
        slots += where % self._page_size
        return self._to_device(slots.reshape(-1))

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: ReferencePlan) -> None:
        group, place = self._place[layer]
        self.pool.write(place, plan[group].slots, keys, values)

    def attend(self, layer: int, queries: Tensor, plan: ReferencePlan) -> Tensor:
        group, place = self._place[layer]
        cut = plan[group].tiles
        _, heads, dim = queries.shape
        kv_heads, shared, tiles = self._kv_heads, self._group, len(cut.row)
        rows = self._tile * shared
        padded = torch.cat((queries.float() * self._scale, queries.new_zeros((1, heads, dim), dtype=torch.float32)))
        q = padded[cut.gather].view(tiles, self._tile, kv_heads, shared, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, rows, dim)
        top = q.new_full((kv_heads, tiles, rows, 1), LEAST)
        total = q.new_zeros((kv_heads, tiles, rows, 1))
        mixed = q.new_zeros((kv_heads, tiles, rows, dim))
        for block, slots in zip(cut.blocks, plan[group].keys, strict=True):
            n = len(block.positions)
            k, v = (part.view(kv_heads * n, BLOCK, dim) for part in self.pool.read(place, slots))
            scores = torch.bmm(q[:, :n].reshape(kv_heads * n, rows, dim), k.transpose(1, 2))
            scores = scores.view(kv_heads, n, rows, BLOCK)
            if self._soft_cap is not None:
                scores = soft_capped(scores, self._soft_cap)
            if block.hidden is not None:
                scores.masked_fill_(block.hidden, -torch.inf)
            new_top = torch.maximum(top[:, :n], scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            faded = torch.exp(top[:, :n] - new_top)
            product = torch.bmm(weights.view(kv_heads * n, rows, BLOCK), v).view(kv_heads, n, rows, dim)
            top[:, :n] = new_top
            total[:, :n].mul_(faded).add_(weights.sum(-1, keepdim=True))
            mixed[:, :n].mul_(faded).add_(product)
        out = (mixed / total).view(kv_heads, tiles, self._tile, shared, dim).permute(1, 2, 0, 3, 4)
        return out.reshape(tiles * self._tile, heads, dim)[cut.scatter].to(queries.dtype)

    def copy(self, pages: NDArray[np.int32]) -> None:
        self.pool.copy(pages)

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        return self.pool.export(pages)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        self.pool.import_pages(pages, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self.pool.poison(pages)

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """[0 .. c0 - 1, 0 .. c1 - 1, ...]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
