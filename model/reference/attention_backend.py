"""Paged attention in plain torch: runs on any device, and tuned back ends are checked against it.

Queries are cut into tiles and keys into blocks at fixed absolute positions. Each (tile, block) is one product of fixed
shape. So the bits of a query's result depend on its own sequence alone: not on the batch, the chunk of a prefill, the
page size or the place of pages. The price is that a decode computes a whole tile.

torch.bmm gives each matrix of a batch the same bits for any number of matrices, where each is whole multiples of 16
bytes. It does not for any number of rows in a matrix (seen with torch 2.13 on AVX-512).

Softmax is the online form of Milakov and Gimelshein, 2018, block by block in order of position.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout, KVShape, LayerGroup
from model.attention.backend import StateSegments, StepShape
from model.attention.recurrence import LinearRecurrence, no_states
from model.attention.visible_keys import first_seen
from model.layers import soft_capped
from model.reference.row_pool import RowPool
from model.reference.states import PagedStates

BLOCK = 128  # keys in a block
TILE_ROWS = 8  # about queries x heads of a group in a tile: fewer waste less of a decode, more read keys less often


LEAST = torch.finfo(torch.float32).min  # below any score: a query may see nothing of the first block of its tile


@dataclass(frozen=True, slots=True, eq=False)
class _KeyBlock:
    """One block of keys for each of the first tiles.

    Attributes:
        positions: [tiles, BLOCK] int64. Positions of the keys.
        hidden: [tiles, rows, BLOCK] bool. True where a query must not see the key; None where all see all.
        offsets: [tiles, 1, BLOCK] float32. Keys' positions from the tile's first place on, for biases by distance:
            that a query would count from itself adds the same to all its scores.
    """

    positions: NDArray[np.int64]
    hidden: Tensor | None
    offsets: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Tiles:
    """Tiles of a step's queries, for layers with the same window. Tiles that see more blocks come first.

    Attributes:
        row: [tiles] int64. Batch row.
        gather: [tiles x tile] int64. Packed index of each query place; the number of tokens where it has no query.
        scatter: [tokens] int64. Query place of each packed token.
        blocks: Blocks of keys; the i-th is of the tiles that see more than i blocks.
    """

    row: NDArray[np.int64]
    gather: Tensor
    scatter: Tensor
    blocks: tuple[_KeyBlock, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Size of the tiles that queries are cut into. Layer groups with the same cut share tiles.

    Attributes:
        window: Window of the layers.
        chunked: See `LayerGroup`.
        shared: Query heads of a KV head.
        tile: Tokens of a tile.
    """

    window: int | None
    chunked: bool
    shared: int
    tile: int


@dataclass(frozen=True, slots=True)
class _Group:
    """One layer group.

    Attributes:
        shape: KV of its layers.
        scale: Factor of scores.
        cut: Cut of its queries.
    """

    shape: KVShape
    scale: float
    cut: _Cut

    @staticmethod
    def of(group: LayerGroup, heads: int, scale: float | None) -> "_Group":
        """Returns the entry of a layer group, for `heads` query heads."""
        shared = heads // group.shape.heads
        # Whole 16 bytes in each matrix: MKL's product has other bits for one of a batch that starts elsewhere.
        whole = 4 // math.gcd(shared, 4)
        tile = -(-max(1, TILE_ROWS // shared) // whole) * whole
        return _Group(group.shape, scale or group.shape.key_dim**-0.5, _Cut(group.window, group.chunked, shared, tile))


@dataclass(frozen=True, slots=True, eq=False)
class _GroupPlan:
    """Plan of one layer group.

    Attributes:
        tiles: Tiles of the queries.
        own: [tokens] int64. Places of the step's own KV in the pool.
        keys: By block, [tiles x BLOCK] int64. Places of its keys.
    """

    tiles: _Tiles
    own: Tensor
    keys: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReferencePlan:
    """Plan of a step.

    Attributes:
        groups: Plans of the layer groups.
        segments: What recurrent layers go through; None for a model without some.
    """

    groups: tuple[_GroupPlan, ...]
    segments: StateSegments | None


class ReferenceAttention:
    """`AttentionBackend` for KV of any shape, with equally many query heads in all layers."""

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
        slopes: Sequence[float] = (),
    ) -> None:
        """Allocates the KV pool.

        Args:
            layout: Layout of the KV pool.
            pages: The number of pages.
            heads: The number of query heads.
            dtype: Type of the KV, as in `RowPool`.
            device: Device of the pool.
            scale: Factor of scores. None: 1 / sqrt(key_dim).
            soft_cap: Bound of scores, by tanh. None for none.
            slopes: What a score of each head loses for each token between query and key. () for nothing.
        """
        self._slopes = torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None
        self._soft_cap, self._device = soft_cap, device
        self._page_size = layout.page_size
        self._groups = [_Group.of(group, heads, scale) for group in layout.groups]
        self.pool = RowPool(layout, pages, dtype, device)
        self._states = PagedStates(layout, self.pool.pages)

    def plan(self, shape: StepShape) -> ReferencePlan:
        slices = shape.slices.astype(np.int64)
        cuts = {group.cut: self._cut(slices, shape.bidirectional, group.cut) for group in self._groups}
        groups = tuple(self._plan_of(shape, number, cuts[group.cut]) for number, group in enumerate(self._groups))
        return ReferencePlan(groups, shape.segments)

    def _plan_of(self, shape: StepShape, group: int, tiles: _Tiles) -> _GroupPlan:
        """Returns the plan of one layer group, over tiles that groups may share."""
        keys = tuple(self._places(group, shape.tables[group], tiles.row, block) for block in tiles.blocks)
        return _GroupPlan(tiles, self.pool.places(group, shape.slots[group]), keys)

    def _cut(self, slices: NDArray[np.int64], bidirectional: NDArray[np.int64], cut: "_Cut") -> _Tiles:
        row, start, count = slices.T
        end, tile = start + count, cut.tile
        tiles_of = (end - 1) // tile - start // tile + 1
        owner = np.repeat(np.arange(len(row)), tiles_of)  # the slice of each tile
        number = start[owner] // tile + _ranges(tiles_of)  # which tile of its sequence
        last = np.minimum((number + 1) * tile, end[owner]) - 1  # its last query
        before = first_seen(number * tile, cut.window, cut.chunked)  # no query of the tile sees a key before this
        in_prefix = number * tile < bidirectional[owner]
        last, before = np.where(in_prefix, np.maximum(last, bidirectional[owner] - 1), last), before * ~in_prefix
        first = before // BLOCK
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
            blocks.append(self._block(keys, slices[owner[:n]], bidirectional[owner[:n]], positions[:n], cut))
        return _Tiles(row[owner], self._to_device(gather.reshape(-1)), self._to_device(scatter), tuple(blocks))

    def _block(
        self,
        keys: NDArray[np.int64],
        slices: NDArray[np.int64],
        bidirectional: NDArray[np.int64],
        positions: NDArray[np.int64],
        cut: "_Cut",
    ) -> _KeyBlock:
        """Makes the i-th block of some tiles.

        Args:
            keys: [tiles, BLOCK] int64. Positions of the keys.
            slices: [tiles, 3] int64. Slice of each tile.
            bidirectional: [tiles] int64. Bidirectional prefix of each tile's sequence.
            positions: [tiles, tile] int64. Positions of the queries.
            cut: The layers' cut.
        """
        hidden = keys[:, None, :] > positions[:, :, None]
        if cut.window is not None:
            hidden |= keys[:, None, :] < first_seen(positions, cut.window, cut.chunked)[:, :, None]
        if bidirectional.any():
            both_ways = positions < bidirectional[:, None]
            hidden = np.where(both_ways[:, :, None], (keys >= bidirectional[:, None])[:, None, :], hidden)
        # Keys past the end of a sequence, or before the first that its first query sees, are replaced by one that is
        # hidden too, but finite: a freed page might hold NaN.
        _, start, count = slices.T
        first = np.where(start < bidirectional, 0, first_seen(start, cut.window, cut.chunked))
        mask = self._to_device(hidden.repeat(cut.shared, axis=1)) if hidden.any() else None
        seen = np.clip(keys, first[:, None], (start + count)[:, None] - 1)
        return _KeyBlock(seen, mask, self._to_device((seen - positions[:, :1]).astype(np.float32)[:, None]))

    def _places(self, group: int, table: NDArray[np.int32], row: NDArray[np.int64], keys: _KeyBlock) -> Tensor:
        """Returns [tiles x BLOCK] int64: places of a block's keys in the pool."""
        where = keys.positions
        slots = table[row[: len(where), None], where // self._page_size].astype(np.int64) * self._page_size
        slots += where % self._page_size
        return self.pool.places(group, slots.reshape(-1))

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: ReferencePlan) -> None:
        self.pool.write(layer, plan.groups[self.pool.group_of(layer)].own, keys, values)

    def attend(self, layer: int, queries: Tensor, plan: ReferencePlan, sinks: Tensor | None = None) -> Tensor:
        number = self.pool.group_of(layer)
        group, cut = self._groups[number], plan.groups[number].tiles
        _, heads, dim = queries.shape
        shape, shared, tiles, tile = group.shape, group.cut.shared, len(cut.row), group.cut.tile
        kv_heads, rows = shape.heads, tile * shared
        padded = torch.cat((queries.float() * group.scale, queries.new_zeros((1, heads, dim), dtype=torch.float32)))
        q = padded[cut.gather].view(tiles, tile, kv_heads, shared, dim)
        q = q.permute(2, 0, 1, 3, 4).reshape(kv_heads, tiles, rows, dim)
        top = q.new_full((kv_heads, tiles, rows, 1), LEAST)
        total = q.new_zeros((kv_heads, tiles, rows, 1))
        mixed = q.new_zeros((kv_heads, tiles, rows, shape.value_dim))
        for block, places in zip(cut.blocks, plan.groups[number].keys, strict=True):
            n = len(block.positions)
            k, v = (part.view(kv_heads * n, BLOCK, -1) for part in self.pool.read(layer, places))
            scores = torch.bmm(q[:, :n].reshape(kv_heads * n, rows, dim), k.transpose(1, 2))
            scores = scores.view(kv_heads, n, rows, BLOCK)
            if self._soft_cap is not None:
                scores = soft_capped(scores, self._soft_cap)
            if self._slopes is not None:
                by_row = (
                    self._slopes.view(kv_heads, 1, 1, shared).expand(-1, -1, tile, -1).reshape(kv_heads, 1, rows, 1)
                )
                scores += by_row * block.offsets
            if block.hidden is not None:
                scores.masked_fill_(block.hidden, -torch.inf)
            new_top = torch.maximum(top[:, :n], scores.amax(-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            faded = torch.exp(top[:, :n] - new_top)
            product = torch.bmm(weights.view(kv_heads * n, rows, BLOCK), v).view(kv_heads, n, rows, -1)
            top[:, :n] = new_top
            total[:, :n].mul_(faded).add_(weights.sum(-1, keepdim=True))
            mixed[:, :n].mul_(faded).add_(product)
        if sinks is not None:
            sink = sinks.view(kv_heads, 1, 1, shared, 1).expand(-1, -1, tile, -1, -1).reshape(kv_heads, 1, rows, 1)
            new_top = torch.maximum(top, sink)
            faded = torch.exp(top - new_top)
            mixed, total = mixed * faded, total * faded + torch.exp(sink - new_top)
        out = (mixed / total).view(kv_heads, tiles, tile, shared, shape.value_dim).permute(1, 2, 0, 3, 4)
        return out.reshape(tiles * tile, heads, shape.value_dim)[cut.scatter].to(queries.dtype)

    def convolve(
        self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None, activated: bool, plan: ReferencePlan
    ) -> Tensor:
        if plan.segments is None:
            raise no_states(layer)
        return self._states.convolve(layer, x, taps, bias, activated, plan.segments)

    def recur(self, layer: int, recurrence: LinearRecurrence, plan: ReferencePlan) -> Tensor:
        if plan.segments is None:
            raise no_states(layer)
        return self._states.recur(layer, recurrence, plan.segments)

    def copy(self, pages: NDArray[np.int32]) -> None:
        self.pool.copy(pages)

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        return self.pool.export(pages, groups)

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        self.pool.import_pages(pages, groups, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self.pool.poison(pages)

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.bool_] | NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _ranges(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns [0 .. c0 - 1, 0 .. c1 - 1, ...]."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
