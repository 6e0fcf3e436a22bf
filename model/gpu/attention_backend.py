"""Paged attention by Triton's kernels, on a GPU.

The pool is `KVPool`'s, K and V of a layer as [kv_heads, slots, head_dim], or K alone (latent attention). A program
reads the tokens of one head, which are neighbours within a page: 4 KiB for 16 tokens of 128 elements in 16 bits. A
layout with all heads of a page in one run would only help copies of pages. This way page size, canonical form, scales
and poison are those of the reference.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StepShape
from model.attention.visible_keys import VisibleKeys
from model.gpu.attention import FIELDS, JOIN_FIELDS, attend_pieces, join_parts
from model.gpu.cache_write import write_slots
from model.gpu.formats import capability_of, format_of
from model.gpu.kv_pool import KVPool
from model.gpu.pieces import NO_PIECES, Division, LaunchKind, Round, divide
from model.gpu.plan import GpuGroupPlan, GpuPlan, GroupWork, Launch, Places, laid_out
from model.gpu.tuning import tuning_for

LOG2E = math.log2(math.e)
MOST_DIM = 256
MOST_VALUE_DIM, MOST_REST = 512, 256
"""Latent attention: elements of a value, and of a key after them."""
MOST_TILE_HEADS = 16  # most query heads of a KV head in a tile; where more share one, several programs read it
PARTS_AT_ONCE = 16  # partial results that are joined at once
COMPUTE = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
PARTS_BYTES = 128 * 2**20
"""Bytes of partial results: a quarter of a million of them for a head of 128."""
WAVES = 4
"""Programs for each multiprocessor that share the pieces of a plan that graphs compute."""


def why_not(layout: KVLayout) -> str | None:
    """Returns why the kernels cannot read such pages, None if they can."""
    kv = layout.groups[0].shape
    if not layout.same_shapes or (kv.key_dim != kv.value_dim and not kv.latent):
        return "its layers, or keys and values, differ in shape"
    if kv.latent:
        rest = kv.key_dim - kv.value_dim
        if kv.value_dim % 16 or rest % 16 or kv.value_dim > MOST_VALUE_DIM or rest > MOST_REST:
            return (
                f"a latent has {kv.value_dim} elements and {rest} rotated ones, no multiples of 16 up to "
                f"{MOST_VALUE_DIM} and {MOST_REST}"
            )
        return None
    if kv.key_dim % 16 or kv.key_dim > MOST_DIM:
        return f"a head has {kv.key_dim} elements, no multiple of 16 up to {MOST_DIM}"
    return None


Call = tuple[tuple[Any, ...], dict[str, Any]]


class TritonAttention:
    """`AttentionBackend` by kernels, see `ReferenceAttention`. `why_not` states the pages that it cannot have."""

    name = "triton"

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        heads: int,
        dtype: str,
        device: torch.device,
        compute: str,
        scale: float | None = None,
        soft_cap: float | None = None,
    ) -> None:
        """Allocates the KV pool.

        Args:
            layout: Layout of the KV pool.
            pages: The number of pages.
            heads: The number of query heads.
            dtype: Type of the KV, as in `KVPool`.
            device: Device of the pool.
            compute: Type that products are taken in, that of the weights. Sums are float32.
            scale: Factor of scores. None: 1 / sqrt(elements of a key).
            soft_cap: Bound of scores, by tanh. None for none.
        """
        self._layout, self._heads, self._device = layout, heads, device
        kv = layout.groups[0].shape
        self._kv_heads, self._head_dim, self._key_dim = kv.heads, kv.value_dim, kv.key_dim
        self._latent, self._rest = kv.latent, kv.key_dim - kv.value_dim
        self._heads_per_kv = heads // kv.heads
        self._tile_heads = min(_power_of_two(self._heads_per_kv), MOST_TILE_HEADS)
        self._head_tiles = -(-self._heads_per_kv // self._tile_heads)
        self._padded_dim = _power_of_two(self._head_dim)
        self._windows = [(group.window, group.chunked) for group in layout.groups]
        self._place = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self.pool = KVPool(layout, pages, dtype, device)
        self._slots = pages * layout.page_size
        name, capability = _device(device)
        self._format = format_of(self.pool.eight_bit, capability)
        elements = "float32" if compute == "float32" else "eight" if self._format else "half"
        self.tuning = tuning_for(name, capability, self._head_dim, elements)
        self._score_type, self._dtype = COMPUTE[compute], getattr(torch, compute)
        # Multiplied by the scales of values, weights can be too small for float16.
        self._value_type = tl.bfloat16 if elements == "eight" else self._score_type
        scale = scale or self._key_dim**-0.5
        self._capped = soft_cap is not None
        self._most_parts = PARTS_BYTES // (4 * heads * (self._head_dim + 2))
        self._parts = self._new_parts(0)
        self._no_sinks = torch.full((heads,), -torch.inf, device=device)
        self._rows: tuple[int, ...] = ()
        self._places: Places | None = None
        self._scale, self._cap = (scale / soft_cap, soft_cap * LOG2E) if soft_cap is not None else (scale * LOG2E, 0.0)

    # A step

    def plan(self, shape: StepShape) -> GpuPlan:
        work = self._work(shape)
        # A step of one token a sequence, in one round, goes into the place that graphs read, if it fits there.
        if self._places is not None and len(shape.slices) <= self._places.rows and shape.slices[:, 2].max() == 1:
            rows = next(rows for rows in self._rows if rows >= len(shape.slices))
            rounds = [part for one in work for part in one.division.rounds]
            once = len(rounds) == len(work) and all(part.parts <= self._most_parts for part in rounds)
            if once and (plan := self._places.filled(rows, work)):
                return plan
        return laid_out(work, self._device)

    def _work(self, shape: StepShape) -> list[GroupWork]:
        """Returns the work of each layer group."""
        seen = {window: VisibleKeys.of(shape, *window) for window in set(self._windows)}
        count = shape.slices[:, 2].astype(np.int64)
        slices = np.stack((np.arange(len(count)), np.cumsum(count) - count, count), axis=1)
        used = -(-max(int(part.last.max()) for part in seen.values()) // self._layout.page_size)
        tables = shape.tables[:, shape.slices[:, 0], :used]
        return [
            GroupWork(
                slots, seen[window].first, seen[window].last, table,
                divide(
                    slices, seen[window], table, self._layout.page_size, self.tuning, self._tile_heads,
                    self._most_parts,
                ),
            )
            for slots, table, window in zip(shape.slots, tables, self._windows, strict=True)
        ]  # fmt: skip

    def fix(self, rows: Sequence[int], context: int) -> None:
        """Fixes the place of plans of one token a sequence, so that graphs can be recorded.

        From now on such plans lie in one place, for at most as many sequences as the last of `rows`. They are filled up
        to the next of `rows` (`GpuPlan.rows`). The pool's last page becomes that of the rows that fill up.

        Args:
            rows: Numbers of sequences, ascending.
            context: Tokens of a sequence.
        """
        layout, most = self._layout, rows[-1]
        pages, chunks = -(-context // layout.page_size), -(-context // self.tuning.few.chunk)
        # Page tables, pieces, lists of tokens that share keys, and arrays with a few numbers for each row.
        numbers = len(layout.groups) * most * (pages + (FIELDS.value + 2) * chunks + 16) + 64 * len(layout.groups)
        spare = self._slots - layout.page_size
        programs = -(-self._wanted_programs() // (self._kv_heads * self._head_tiles))
        self._rows, self._places = tuple(rows), Places(most, numbers, programs, spare, self._device)
        self._parts_for(self._most_parts)

    def empty_plan(self, rows: int, shares: bool) -> GpuPlan:
        """Returns a plan in the fixed place, of sequences without a token, for recording a graph.

        Args:
            rows: Rows of the plan.
            shares: Whether it has a launch for keys that several sequences share.

        Raises:
            RuntimeError: `fix` was not called, or its place is too small.
        """
        if self._places is None:
            raise RuntimeError("there is no place for plans of graphs")
        kinds = [
            LaunchKind(self.tuning.few, True, True, NO_PIECES),
            LaunchKind(self.tuning.shared, True, True, NO_PIECES),
        ]
        none = np.empty(0, np.int64)
        only = Round(tuple(kinds[: 1 + shares]), np.empty((0, JOIN_FIELDS.value), np.int64), 0)
        work = GroupWork(none, none, none, none, Division(none, none, (only,)))
        plan = self._places.filled(rows, [work] * len(self._layout.groups))
        if plan is None:
            raise RuntimeError("the place for plans of graphs is too small")
        return plan

    def _wanted_programs(self) -> int:
        if self._device.type != "cuda":
            return WAVES
        return WAVES * torch.cuda.get_device_properties(self._device).multi_processor_count

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: GpuPlan) -> None:
        group, place = self._place[layer]
        arguments, options = self._to_write(place, _readable(keys), _readable(values), plan.groups[group].slots)
        write_slots[(len(keys),)](*arguments, **options)

    def attend(self, layer: int, queries: Tensor, plan: GpuPlan, sinks: Tensor | None = None) -> Tensor:
        number, place = self._place[layer]
        queries, group = _readable(queries), plan.groups[number]
        out = torch.empty((*queries.shape[:2], self._head_dim), dtype=queries.dtype, device=queries.device)
        scores = self._no_sinks if sinks is None else sinks * LOG2E
        for part in group.passes:
            parts = *self._parts_for(part.parts), scores
            for launch in part.launches:
                arguments, options = self._to_attend(place, queries, out, plan.packed, group, launch, parts)
                attend_pieces[(launch.programs, self._kv_heads * self._head_tiles)](*arguments, **options)
            if len(part.joins):
                arguments, options = self._to_join(out, part.joins, parts)
                join_parts[(len(part.joins), self._heads)](*arguments, **options)
        return out

    def _parts_for(self, parts: int) -> tuple[Tensor, Tensor]:
        """Returns room for partial results and their sums, which each layer of each step uses anew."""
        if parts > self._most_parts:  # one tile of tokens alone has more, see `divide`: not kept
            return self._new_parts(parts)
        if parts > len(self._parts[0]):
            self._parts = self._new_parts(max(parts, min(self._most_parts, 2 * len(self._parts[0]))))
        return self._parts

    def _new_parts(self, parts: int) -> tuple[Tensor, Tensor]:
        mixed, sums = (
            torch.empty((parts, self._heads, width), dtype=torch.float32, device=self._device)
            for width in (self._head_dim, 2)
        )
        return mixed, sums

    def prepare(self) -> None:
        """Compiles all kernels that a step can need, so that no request waits for a compiler.

        On a GPU it loads them too, so that a kernel that does not fit there is known at the start.
        """
        few, many = self.tuning.few, self.tuning.many
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        queries, keys = (
            torch.empty((0, heads, self._key_dim), dtype=self._dtype, device=self._device)
            for heads in (self._heads, self._kv_heads)
        )
        arguments, options = self._to_write(0, keys, keys, none)
        made = [write_slots.warmup(*arguments, grid=(1,), **options)]
        group, parts = GpuGroupPlan(none, none, none, none, ()), (*self._parts, self._no_sinks)
        for sizes, divided, looped in (
            (few, True, True), (many, True, False), (many, False, False), (self.tuning.shared, True, True),
        ):  # fmt: skip
            launch = Launch(sizes, divided, looped, 0, 1)
            arguments, options = self._to_attend(0, queries, queries, none, group, launch, parts)
            made.append(attend_pieces.warmup(*arguments, grid=(1, 1), **options))
        arguments, options = self._to_join(queries, none, parts)
        made.append(join_parts.warmup(*arguments, grid=(1, 1), **options))
        for kernel in made if self._device.type == "cuda" else ():
            kernel._init_handles()

    # Arguments of kernels, and constants that they are compiled with

    def _to_write(self, place: int, keys: Tensor, values: Tensor, slots: Tensor) -> Call:
        stores, scales = self._read(place)
        arguments = (
            keys, values, *stores, *scales, slots, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            self._slots,
        )  # fmt: skip
        return arguments, {
            "HEADS": self._kv_heads, "PADDED_HEADS": _power_of_two(self._kv_heads), "HEAD_DIM": self._key_dim,
            "PADDED_DIM": _power_of_two(self._key_dim), "KV_FORMAT": self._format, "KEYS_ALONE": self._latent,
        }  # fmt: skip

    def _to_attend(
        self, place: int, queries: Tensor, out: Tensor, packed: Tensor, group: GpuGroupPlan, launch: Launch,
        parts: tuple[Tensor, Tensor, Tensor],
    ) -> Call:  # fmt: skip
        layout, sizes, (stores, scales) = self._layout, launch.sizes, self._read(place)
        arguments = (
            out, queries, *stores, *scales, packed, launch.header, group.first, group.last, group.first_part, *parts,
            self._scale, self._cap, queries.stride(0), queries.stride(1), self._slots,
        )  # fmt: skip
        return arguments, {
            "HEADS_PER_KV": self._heads_per_kv, "HEAD_DIM": self._head_dim, "PADDED_DIM": self._padded_dim,
            "REST": self._rest, "PADDED_REST": max(16, _power_of_two(self._rest)),
            "PAGE_SIZE": layout.page_size, "KV_FORMAT": self._format,
            "TILE_TOKENS": sizes.tokens(self._tile_heads), "TILE_HEADS": self._tile_heads,
            "HEAD_TILES": self._head_tiles, "TILE_KEYS": sizes.tile,
            "CAPPED": self._capped, "DIVIDED": launch.divided, "LOOPED": launch.looped,
            "SCORE_TYPE": self._score_type, "VALUE_TYPE": self._value_type,
            "num_warps": sizes.warps, "num_stages": sizes.stages,
        }  # fmt: skip

    def _to_join(self, out: Tensor, joins: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Call:
        return (out, *parts, joins), {
            "HEAD_DIM": self._head_dim,
            "PADDED_DIM": self._padded_dim,
            "PARTS_AT_ONCE": PARTS_AT_ONCE,
        }

    def _read(self, place: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Returns elements and scales of K and V.

        Without scales the elements stand for them: kernels do not read them then. K stands for a V that is in it.
        """
        elements = self.pool.elements(place)
        scales = self.pool.scales(place) or elements
        return (elements[0], elements[-1]), (scales[0], scales[-1])

    # Pages

    def copy(self, pages: NDArray[np.int32]) -> None:
        self.pool.copy(pages)

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:  # noqa: ARG002 - all are alike
        return self.pool.export(pages)

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:  # noqa: ARG002
        self.pool.import_pages(pages, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self.pool.poison(pages)


def _readable(x: Tensor) -> Tensor:
    """Returns x with the elements of a head side by side and heads at multiples of 16, as kernels read it."""
    aligned = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2])
    return x if x.stride(2) == 1 and aligned else x.contiguous()


def _device(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Returns name and compute capability."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name, capability_of(device)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
