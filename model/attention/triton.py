"""Paged attention by kernels in Triton, on a GPU.

The pool is `KVPool`'s, K and V of a layer as [kv_heads, slots, head_dim]: a program reads the tokens of one head, which
lie side by side within a page there, 4 KiB for 16 of 128 elements in 16 bits. A page's heads in one run would help its
copies only; and page size, canonical form, scales and poison stay those of the reference.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StepShape
from model.attention.seen import Seen
from model.gpu.attention import attend_pieces, join_parts
from model.gpu.cache_write import write_slots
from model.gpu.formats import format_of
from model.gpu.pieces import Pieces, divide
from model.gpu.tuning import SOME, Sizes, tuning_for
from model.kv_pool import KVPool

LOG2E = math.log2(math.e)
MOST_DIM = 256
MOST_ROOM = 16  # query heads of a KV head in a tile; where more share one, several programs read it
AT_ONCE = 16  # parts that are joined in one go
COMPUTE = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
ALIGNED = 4
"""Numbers that each array of a plan is padded to: Triton compiles a kernel anew for arrays that do not begin at whole
16 bytes.
"""


def why_not(layout: KVLayout) -> str | None:
    """What keeps the kernels from such pages; None if nothing."""
    if layout.head_dim % 16 or layout.head_dim > MOST_DIM:
        return f"a head has {layout.head_dim} elements, no multiple of 16 up to {MOST_DIM}"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Pieces of one kind, on the device. divided: whether its keys may be. parts, sums: room for what `join_parts`
    joins.
    """

    sizes: Sizes
    divided: bool
    pieces: Tensor
    joins: Tensor
    parts: Tensor
    sums: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """Of one layer group. All int32, on the device. slots, first, last: [tokens]. table: [slices, width]."""

    slots: Tensor
    table: Tensor
    first: Tensor
    last: Tensor
    work: tuple[Work, ...]


TritonPlan = tuple[GroupPlan, ...]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class TritonAttention:
    """`AttentionBackend`, see `ReferenceAttention`; `why_not` says for which pages. compute: the dtype that products
    are taken in, that of the weights; sums are float32.
    """

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
        self._layout, self._heads, self._device = layout, heads, device
        self._group = heads // layout.kv_heads
        self._room = min(_power_of_two(self._group), MOST_ROOM)
        self._shares = -(-self._group // self._room)
        self._wide = _power_of_two(layout.head_dim)
        self._windows = [layout.window(group) for group in range(len(layout.groups))]
        self._place = {layer: (g, i) for g, layers in enumerate(layout.groups) for i, layer in enumerate(layers)}
        self.pool = KVPool(layout, pages, dtype, device)
        self._slots = pages * layout.page_size
        name, capability = _device(device)
        self._format = format_of(self.pool.eight_bit, capability)
        elements = "float32" if compute == "float32" else "eight" if self._format else "half"
        self.tuning = tuning_for(name, capability, layout.head_dim, elements)
        self._compute, self._dtype = COMPUTE[compute], getattr(torch, compute)
        # With their scales, weights can be too small for float16.
        self._mix = tl.bfloat16 if elements == "eight" else self._compute
        scale = scale or layout.head_dim**-0.5
        self._capped = soft_cap is not None
        self._scale, self._cap = (scale / soft_cap, soft_cap * LOG2E) if soft_cap is not None else (scale * LOG2E, 0.0)

    # A step

    def plan(self, shape: StepShape) -> TritonPlan:
        seen = {window: Seen.of(shape, window) for window in set(self._windows)}
        divided = {window: self._divide(shape, seen[window]) for window in seen}
        used = -(-max(int(part.last.max()) for part in seen.values()) // self._layout.page_size)
        tables = shape.tables[:, shape.slices[:, 0], :used]
        tables = np.pad(tables, ((0, 0), (0, 0), (0, -used % ALIGNED)))
        arrays: list[NDArray] = [part for window in seen for part in (seen[window].first, seen[window].last)]
        arrays += [part for work in divided.values() for _, kind in work for part in (kind.pieces, kind.joins)]
        for slots, table in zip(shape.slots, tables, strict=True):
            arrays += [slots, table]
        on_device = iter(self._to_device(arrays))
        ends = {window: (next(on_device), next(on_device)) for window in seen}
        work = {
            window: tuple(self._work(sizes, kind, next(on_device), next(on_device)) for sizes, kind in kinds)
            for window, kinds in divided.items()
        }
        return tuple(
            GroupPlan(next(on_device), next(on_device), *ends[window], work[window]) for window in self._windows
        )

    def _divide(self, shape: StepShape, seen: Seen) -> list[tuple[Sizes, Pieces]]:
        few, many = self.tuning.few, self.tuning.many
        count = shape.slices[:, 2].astype(np.int64)
        slices = np.stack((np.arange(len(count)), np.cumsum(count) - count, count), axis=1)
        least, some = count <= few.tokens(self._room), count < SOME
        kinds = []
        for which, sizes, chunk in (
            (least, few, few.chunk), (~least & some, many, many.chunk), (~least & ~some, many, None),
        ):  # fmt: skip
            if which.any():
                kinds.append((sizes, divide(slices[which], seen, sizes.tokens(self._room), chunk)))
        return kinds

    def _work(self, sizes: Sizes, kind: Pieces, pieces: Tensor, joins: Tensor) -> Work:
        parts, sums = (
            torch.empty((kind.parts, self._heads, width), dtype=torch.float32, device=self._device)
            for width in (self._layout.head_dim, 2)
        )
        return Work(sizes, kind.divided, pieces, joins, parts, sums)

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: TritonPlan) -> None:
        group, place = self._place[layer]
        given, options = self._to_write(place, _readable(keys), _readable(values), plan[group].slots)
        write_slots[(len(keys),)](*given, **options)

    def attend(self, layer: int, queries: Tensor, plan: TritonPlan) -> Tensor:
        group, place = self._place[layer]
        queries = _readable(queries)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for work in plan[group].work:
            given, options = self._to_attend(place, queries, out, plan[group], work)
            attend_pieces[(len(work.pieces), self._layout.kv_heads * self._shares)](*given, **options)
            if len(work.joins):
                given, options = self._to_join(out, work)
                join_parts[(len(work.joins), self._heads)](*given, **options)
        return out

    def prepare(self) -> None:
        """Compiles all that a step can need, so that no request waits for a compiler. Only on a GPU."""
        layout, few, many = self._layout, self.tuning.few, self.tuning.many
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        queries, keys = (
            torch.empty((0, heads, layout.head_dim), dtype=self._dtype, device=self._device)
            for heads in (self._heads, layout.kv_heads)
        )
        parts = torch.empty(0, dtype=torch.float32, device=self._device)
        given, options = self._to_write(0, keys, keys, none)
        write_slots.warmup(*given, grid=(1,), **options)
        plan = GroupPlan(none, none.view(0, ALIGNED), none, none, ())
        for sizes, divided in ((few, True), (many, True), (many, False)):
            work = Work(sizes, divided, none, none, parts, parts)
            given, options = self._to_attend(0, queries, queries, plan, work)
            attend_pieces.warmup(*given, grid=(1, 1), **options)
            given, options = self._to_join(queries, work)
            join_parts.warmup(*given, grid=(1, 1), **options)

    # What kernels are given, and compiled with

    def _to_write(self, place: int, keys: Tensor, values: Tensor, slots: Tensor) -> Call:
        layout, (stores, scales) = self._layout, self._read(place)
        given = (
            keys, values, *stores, *scales, slots, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            self._slots,
        )  # fmt: skip
        return given, {
            "HEADS": layout.kv_heads, "ROOM": _power_of_two(layout.kv_heads), "DIM": layout.head_dim,
            "WIDE": self._wide, "FORMAT": self._format,
        }  # fmt: skip

    def _to_attend(self, place: int, queries: Tensor, out: Tensor, plan: GroupPlan, work: Work) -> Call:
        layout, sizes, (stores, scales) = self._layout, work.sizes, self._read(place)
        given = (
            out, queries, *stores, *scales, plan.table, plan.first, plan.last, work.pieces, work.parts, work.sums,
            self._scale, self._cap, queries.stride(0), queries.stride(1), self._slots, plan.table.shape[1],
        )  # fmt: skip
        return given, {
            "GROUP": self._group, "ROOM": self._room, "SHARES": self._shares, "TOKENS": sizes.tokens(self._room),
            "DIM": layout.head_dim, "WIDE": self._wide, "TILE": sizes.tile, "PAGE": layout.page_size,
            "FORMAT": self._format, "CAPPED": self._capped, "DIVIDED": work.divided, "COMPUTE": self._compute,
            "MIX": self._mix, "num_warps": sizes.warps, "num_stages": sizes.stages,
        }  # fmt: skip

    def _to_join(self, out: Tensor, work: Work) -> Call:
        given = (out, work.parts, work.sums, work.joins)
        return given, {"DIM": self._layout.head_dim, "WIDE": self._wide, "AT_ONCE": AT_ONCE}

    def _read(self, place: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Elements and scales of K and V; what stands for scales where there are none is not looked at."""
        elements = self.pool.elements(place)
        return elements, self.pool.scales(place) or elements

    # Pages

    def copy(self, pages: NDArray[np.int32]) -> None:
        self.pool.copy(pages)

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        return self.pool.export(pages)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        self.pool.import_pages(pages, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self.pool.poison(pages)

    def _to_device(self, arrays: list[NDArray]) -> list[Tensor]:
        """As int32, all in one transfer."""
        room = [array.size + -array.size % ALIGNED for array in arrays]
        packed = torch.empty(sum(room), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        host, at = packed.numpy(), 0
        for array, size in zip(arrays, room, strict=True):
            host[at : at + array.size] = array.reshape(-1)
            at += size
        parts = packed.to(self._device, non_blocking=True).split(room)
        return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _readable(x: Tensor) -> Tensor:
    """The same, with the elements of a head side by side and heads at whole 16 bytes, as kernels read them."""
    aligned = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:2])
    return x if x.stride(2) == 1 and aligned else x.contiguous()


def _device(device: torch.device) -> tuple[str, tuple[int, int]]:
    """Name and compute capability; of what is no GPU, where Triton interprets its kernels, those of no device."""
    if device.type != "cuda":
        return device.type, (0, 0)
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
