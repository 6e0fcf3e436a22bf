"""Paged attention by Triton's kernels, on a GPU.

The pool is `KVPool`'s. A program reads the tokens of one head, which are neighbours within a page: 4 KiB for 16 tokens
of 128 elements in 16 bits. Layer groups may differ in shape: each has kernels of its own.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StepShape
from model.attention.recurrence import LinearRecurrence, no_states
from model.attention.visible_keys import VisibleKeys
from model.gpu.attention import FIELDS, attend_pieces, join_parts
from model.gpu.cache_write import write_slots
from model.gpu.flashinfer import FlashInferPrompts, LongSlices, pages_of
from model.gpu.formats import capability_of, page_format_of
from model.gpu.heads_kind import HeadsKind
from model.gpu.heads_kind import why_not as why_not_of_shape
from model.gpu.kv_pool import KVPool
from model.gpu.packer import ALIGNED
from model.gpu.pieces import Division, divide
from model.gpu.plan import MIXED, GpuGroupPlan, GpuPlan, GroupWork, Launch, Places, laid_out
from model.gpu.state_plan import StateWork
from model.gpu.states import Call, GpuStates
from model.gpu.tuning import Tuning, tuning_for
from model.recurrent import RecurrentShape

LOG2E = math.log2(math.e)
PARTS_AT_ONCE = 16  # partial results that are joined at once
COMPUTE = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
PARTS_BYTES = 256 * 2**20
"""Bytes of partial results: half a million of them for a head of 128."""
WAVES = 4
"""Programs for each multiprocessor that share the pieces of a plan that graphs compute."""


def why_not(layout: KVLayout) -> str | None:
    """Returns why the kernels cannot read such pages, None if they can."""
    return next((reason for group in layout.groups if (reason := why_not_of_shape(group.shape))), None)


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
        tuning: Tuning | None = None,
        prompts: FlashInferPrompts | None = None,
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
            tuning: Tile sizes. None: those of the table, `model.gpu.tuning`.
            prompts: Computes long slices in the kernels' place. None for nothing but kernels.
        """
        self._prompts = prompts
        self._layout, self._heads, self._device = layout, heads, device
        self._windows = [(group.window, group.chunked) for group in layout.groups]
        self._place = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self.pool = KVPool(layout, pages, dtype, device)
        self._states = GpuStates(layout, self.pool, device)
        self._slots = pages * layout.page_size
        name, capability = _device(device)
        self._format = page_format_of(self.pool.eight_bit, capability)
        elements = "float32" if compute == "float32" else "eight" if self._format else "half"
        self._capped, self._cap = soft_cap is not None, LOG2E * (soft_cap or 0.0)
        self._kinds = [
            HeadsKind(
                heads,
                group.shape,
                tuning or tuning_for(name, capability, group.shape.value_dim, elements),
                (scale or group.shape.key_dim**-0.5) * (LOG2E if soft_cap is None else 1 / soft_cap),
            )
            for group in layout.groups
        ]
        self._score_type, self._dtype = COMPUTE[compute], getattr(torch, compute)
        # Multiplied by the scales of values, weights can be too small for float16.
        self._value_type = tl.bfloat16 if elements == "eight" else self._score_type
        self._widest = max(kind.dim for kind in self._kinds)
        self._most_parts = PARTS_BYTES // (4 * heads * (self._widest + 2))
        self._parts = self._new_parts(0)
        self._no_sinks = torch.full((heads,), -torch.inf, device=device)
        self._decodes: Places | None = None
        self._mixed: Places | None = None

    # A step

    def plan(self, shape: StepShape) -> GpuPlan:
        prompts = None if self._prompts is None else self._prompts.plan(shape)
        work, states = self._work(shape, prompts), None if shape.segments is None else StateWork.of(shape.segments)
        if prompts is not None:
            return replace(laid_out(work, self._device, states), prompts=prompts)
        decodes = shape.slices[:, 2].max() == 1
        places = self._decodes if decodes else self._mixed
        # A step in one round goes into the place that graphs read, if it fits there.
        rounds = [part for one in work for part in one.division.rounds]
        once = len(rounds) == len(work) and all(part.parts <= self._most_parts for part in rounds)
        if places is not None and once:
            launched = work
            if not decodes:
                launched = [one.in_launches(kind.tuning) for one, kind in zip(work, self._kinds, strict=True)]
            if plan := places.filled(shape.slots.shape[1], launched, states):
                return plan
        return laid_out(work, self._device, states)

    def _work(self, shape: StepShape, prompts: LongSlices | None) -> list[GroupWork]:
        """Returns the kernels' work of each layer group. prompts: slices that are not theirs."""
        seen = {window: VisibleKeys.of(shape, *window) for window in set(self._windows)}
        count = shape.slices[:, 2].astype(np.int64)
        slices = np.stack((np.arange(len(count)), np.cumsum(count) - count, count), axis=1)
        others = slices if prompts is None else slices[~prompts.taken]
        used = -(-max(int(part.last.max()) for part in seen.values()) // self._layout.page_size)
        tables = shape.tables[:, shape.slices[:, 0], :used]
        return [
            GroupWork(
                slots, seen[window].first, seen[window].last, table,
                divide(
                    others if prompts is not None and group in prompts.groups else slices, int(count.sum()),
                    seen[window], table, self._layout.page_size, kind.tuning, kind.tile_heads, self._most_parts,
                ),
            )
            for group, (slots, table, window, kind) in enumerate(
                zip(shape.slots, tables, self._windows, self._kinds, strict=True)
            )
        ]  # fmt: skip

    @property
    def can_mix(self) -> bool:
        """Whether graphs can compute any step. Those of recurrent layers have one token a sequence."""
        return not self._layout.states.pages

    def fix(self, rows: Sequence[int], tokens: Sequence[int], context: int) -> None:
        """Fixes the places of plans, so that graphs can be recorded.

        From now on plans lie in one place if they fit there, and are filled up (`GpuPlan.rows`): those of one token a
        sequence to the next of `rows`, others to the next of `tokens`. The pool's last page becomes that of the rows
        that fill up.

        Args:
            rows: Numbers of sequences, ascending.
            tokens: Numbers of tokens of a step, ascending; () for no graphs of such steps.
            context: Tokens of a sequence.
        """
        layout, most = self._layout, rows[-1]
        pages = -(-context // layout.page_size)
        chunks = -(-context // min(kind.tuning.few.chunk for kind in self._kinds))
        # Page tables, pieces, lists of tokens that share keys, arrays with a few numbers for each row; states' pages.
        numbers = len(layout.groups) * most * (pages + (FIELDS.value + 2) * chunks + 16) + 64 * len(layout.groups)
        numbers += 2 * layout.states.pages * (most + ALIGNED) + 8 * (most + ALIGNED)
        spare = self._slots - layout.page_size
        programs = -(-self._wanted_programs() // min(kind.columns for kind in self._kinds))
        self._decodes = Places(rows, False, numbers, programs, spare, self._device)
        if tokens and self.can_mix:
            numbers += len(layout.groups) * tokens[-1] * (FIELDS.value + 16)
            self._mixed = Places(tokens, True, numbers, programs, spare, self._device)
        self.keep_parts()

    def keep_parts(self) -> None:
        """Allocates room for the most partial results that are kept from step to step."""
        self._parts_for(self._most_parts)

    def empty_plan(self, rows: int, kinds: Sequence[int]) -> GpuPlan:
        """Returns a plan in the fixed place, without tokens, for recording a graph.

        Args:
            rows: Rows of the plan.
            kinds: Its launches: MIXED, or of one token a sequence FEW, with or without SHARED.

        Raises:
            RuntimeError: `fix` was not called, or its place is too small.
        """
        places = self._mixed if kinds == MIXED else self._decodes
        if places is None:
            raise RuntimeError("there is no place for plans of graphs")
        pages, none = self._layout.states.pages, np.empty(0, np.int64)
        states = StateWork.nothing(pages, rows) if pages else None
        work = [GroupWork(none, none, none, none, Division.nothing(kind.tuning, kinds)) for kind in self._kinds]
        plan = places.filled(rows, work, states)
        if plan is None:
            raise RuntimeError("the place for plans of graphs is too small")
        return plan

    def _wanted_programs(self) -> int:
        if self._device.type != "cuda":
            return WAVES
        return WAVES * torch.cuda.get_device_properties(self._device).multi_processor_count

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: GpuPlan) -> None:
        group, _ = self._place[layer]
        arguments, options = self._to_write(layer, _readable(keys), _readable(values), plan.groups[group].slots)
        write_slots[(len(keys),)](*arguments, **options)

    def attend(self, layer: int, queries: Tensor, plan: GpuPlan, sinks: Tensor | None = None) -> Tensor:
        number, within = self._place[layer]
        queries, group, kind = _readable(queries), plan.groups[number], self._kinds[number]
        out = torch.empty((*queries.shape[:2], kind.dim), dtype=queries.dtype, device=queries.device)
        scores = self._no_sinks if sinks is None else sinks * LOG2E
        for part in group.passes:
            parts = *self._parts_for(part.parts), scores
            for launch in part.launches:
                arguments, options = self._to_attend(layer, queries, out, plan.packed, group, launch, parts)
                attend_pieces[(launch.programs, kind.columns)](*arguments, **options)
            if len(part.joins):
                arguments, options = self._to_join(layer, out, part.joins, parts)
                join_parts[(len(part.joins), self._heads)](*arguments, **options)
        if plan.prompts is not None and number in plan.prompts.groups:
            plan.prompts.attend(number, queries, pages_of(self.pool, self._layout, number, within), out, sinks)
        return out

    def convolve(
        self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None, activated: bool, plan: GpuPlan
    ) -> Tensor:
        if plan.states is None:
            raise no_states(layer)
        return self._states.convolve(layer, x, taps, bias, activated, plan.states)

    def recur(self, layer: int, recurrence: LinearRecurrence, plan: GpuPlan) -> Tensor:
        if plan.states is None:
            raise no_states(layer)
        return self._states.recur(layer, recurrence, plan.states)

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
            for width in (self._widest, 2)
        )
        return mixed, sums

    def prepare(self, recurrent: Sequence[RecurrentShape | None] = ()) -> None:
        """Compiles all kernels that a step can need, so that no request waits for a compiler.

        On a GPU it loads them too, so that a kernel that does not fit there is known at the start.

        Args:
            recurrent: Shape of each layer's recurrence, as in `ModelConfig`.
        """
        made = [kernel for group in self._layout.groups for kernel in self._prepared(group.layers[0])]
        layers = {shape: layer for layer, shape in enumerate(recurrent) if shape is not None}
        made += [kernel for shape, layer in layers.items() for kernel in self._states.prepared(layer, shape)]
        for kernel in made if self._device.type == "cuda" else ():
            kernel._init_handles()
        if self._prompts is not None:
            self._prompts.prepare(self.pool)

    def _prepared(self, layer: int) -> list[Any]:
        """Compiles the kernels of a layer's group."""
        kind = self._kinds[self._place[layer][0]]
        tuning, shape = kind.tuning, kind.shape
        none = torch.empty(0, dtype=torch.int32, device=self._device)
        queries, keys = (
            torch.empty((0, heads, shape.key_dim), dtype=self._dtype, device=self._device)
            for heads in (self._heads, shape.heads)
        )
        arguments, options = self._to_write(layer, keys, keys, none)
        made = [write_slots.warmup(*arguments, grid=(1,), **options)]
        group, parts = GpuGroupPlan(none, none, none, none, ()), (*self._parts, self._no_sinks)
        for sizes, divided, looped in (
            (tuning.few, True, True), (tuning.many, True, False), (tuning.many, False, False),
            (tuning.shared, True, True), (tuning.many, True, True),
        ):  # fmt: skip
            launch = Launch(sizes, divided, looped, 0, 1)
            arguments, options = self._to_attend(layer, queries, queries, none, group, launch, parts)
            made.append(attend_pieces.warmup(*arguments, grid=(1, 1), **options))
        arguments, options = self._to_join(layer, queries, none, parts)
        made.append(join_parts.warmup(*arguments, grid=(1, 1), **options))
        return made

    # Arguments of kernels, and constants that they are compiled with

    def _to_write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> Call:
        stores, scales, strides = self._read(layer)
        arguments = (
            keys, values, *stores, *scales, slots, keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
            *strides,
        )  # fmt: skip
        kind = self._kinds[self._place[layer][0]]
        return arguments, kind.to_write(self._layout.page_size) | {"KV_FORMAT": self._format}

    def _to_attend(
        self, layer: int, queries: Tensor, out: Tensor, packed: Tensor, group: GpuGroupPlan, launch: Launch,
        parts: tuple[Tensor, Tensor, Tensor],
    ) -> Call:  # fmt: skip
        kind, (stores, scales, strides) = self._kinds[self._place[layer][0]], self._read(layer)
        arguments = (
            out, queries, *stores, *scales, packed, launch.header, group.first, group.last, group.first_part, *parts,
            kind.scale, self._cap, queries.stride(0), queries.stride(1), *strides,
        )  # fmt: skip
        return arguments, kind.to_attend(self._layout.page_size, launch.sizes) | {
            "KV_FORMAT": self._format, "CAPPED": self._capped, "DIVIDED": launch.divided, "LOOPED": launch.looped,
            "SCORE_TYPE": self._score_type, "VALUE_TYPE": self._value_type,
        }  # fmt: skip

    def _to_join(self, layer: int, out: Tensor, joins: Tensor, parts: tuple[Tensor, Tensor, Tensor]) -> Call:
        kind = self._kinds[self._place[layer][0]]
        return (out, *parts, joins), kind.to_join() | {"PARTS_AT_ONCE": PARTS_AT_ONCE}

    def _read(self, layer: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], tuple[int, int]]:
        """Returns elements of K and V, scales of both, and the strides from page to page of elements and of scales.

        Without scales the elements stand for them: kernels do not read them then. K stands for a V that is in it.
        """
        place = self._place[layer]
        elements = self.pool.elements(*place)
        scales = self.pool.scales(*place) or elements
        strides = self.pool.stride // elements[0].itemsize, self.pool.stride // 4
        return (elements[0], elements[-1]), (scales[0], scales[-1]), strides

    # Pages

    def copy(self, pages: NDArray[np.int32]) -> None:
        self.pool.copy(pages)

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        return self.pool.export(pages, groups)

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        self.pool.import_pages(pages, groups, content)

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
