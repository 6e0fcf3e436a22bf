"""Paged attention by the kernels of the CPU, over pages in the layout that these read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout, KVShape, LayerGroup
from model.attention.backend import StateSegments, StepShape
from model.attention.visible_keys import VisibleKeys
from model.cpu.kernels.attention import write_attention
from model.cpu.kernels.attention_tiles import TILED_ROWS, can_have_tiles
from model.cpu.kernels.eight_bit import EIGHT_BITS, EightBit
from model.cpu.kernels.element import ELEMENTS, Element
from model.cpu.kernels.heads import MOST_DIM, HeadNorm, write_heads
from model.cpu.kernels.kv import BLOCK, Heads
from model.cpu.kernels.latent import LatentsKind, latents_call
from model.cpu.kernels.math import LOG2E
from model.cpu.kernels.mixing import SUMS, Shape, part_bytes, write_join
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.values import LANES
from model.cpu.pages import Pages
from model.cpu.pieces import Pieces, divide
from model.cpu.states import CpuStates

SINGLE, SEVERAL = 0, 1
MOST_RESULT = 2**17  # elements of a token's result; a thread has two such states of 4 bytes on its stack
MOST_TOGETHER = 12  # query heads that share a latent and are one thread's work: two tokens of them fill `mixing.SUMS`


@dataclass(frozen=True, slots=True, eq=False)
class CpuGroupPlan:
    """Plan of one layer group.

    Attributes:
        slots: [tokens] int64. Slots of the step's own KV.
        seen: Keys that each token sees.
        pieces: Pieces of work.
    """

    slots: NDArray[np.int64]
    seen: VisibleKeys
    pieces: Pieces


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """Plan of a step.

    Attributes:
        tokens: Tokens of the step.
        tables: Page tables, which pieces hold addresses in, so they must live as long as the plan.
        groups: Plans of the layer groups.
        segments: What recurrent layers go through; None for a model without some.
    """

    tokens: int
    tables: NDArray[np.int32]
    groups: tuple[CpuGroupPlan, ...]
    segments: StateSegments | None = None


class GroupCells:
    """Cells in which kernels find the numbers of one step, for one layer group."""

    FIELDS = ("slots", "first", "last", "single", "singles", "several", "severals", "divided", "divideds", "partial")

    def __init__(self) -> None:
        self._numbers = np.zeros(len(self.FIELDS), np.int64)

    def at(self, name: str) -> int:
        """Returns the address of a cell."""
        return int(self._numbers.ctypes.data + 8 * self.FIELDS.index(name))

    def set(self, plan: CpuGroupPlan, partial: Tensor) -> None:
        """Fills the cells; `partial` is room for partial results."""
        pieces = plan.pieces
        self._numbers[:] = [
            plan.slots.ctypes.data, plan.seen.first.ctypes.data, plan.seen.last.ctypes.data,
            pieces.single.ctypes.data, len(pieces.single), pieces.several.ctypes.data, len(pieces.several),
            pieces.divided.ctypes.data, len(pieces.divided), partial.data_ptr(),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class CpuGroup:
    """One layer group.

    Attributes:
        window: Window of its layers.
        chunked: See `LayerGroup`.
        heads: Heads of its layers.
        shapes: Shapes of attention's kernels: one token a piece, several tokens a piece.
        scaling: Factor of scores, and their soft cap; 0.0 without one.
        slopes: [heads] float32. Slopes of biases by distance, in base 2. None without some.
        cells: Cells of its numbers.
    """

    window: int | None
    chunked: bool
    heads: Heads
    shapes: tuple[Shape, Shape]
    scaling: tuple[float, float]
    slopes: Tensor | None
    cells: GroupCells

    @staticmethod
    def of(
        group: LayerGroup,
        heads: Heads,
        scale: float | None,
        soft_cap: float | None,
        slopes: Sequence[float],
        has_tiles: bool,
    ) -> "CpuGroup":
        capped, sloped, tiled = soft_cap is not None, bool(slopes), has_tiles and can_have_tiles(heads)
        several = max(1, (TILED_ROWS if tiled else SUMS) // heads.shared)
        shapes = (
            Shape(heads, tokens, listed, capped, sloped=sloped, tiled=tiled)
            for tokens, listed in ((1, False), (several, True))
        )
        by_head = torch.tensor(slopes, dtype=torch.float32) * LOG2E if sloped else None
        scaling = scale or heads.dim**-0.5, soft_cap or 0.0
        return CpuGroup(
            group.window, group.chunked, heads, (next(shapes), next(shapes)), scaling, by_head, GroupCells()
        )


def why_not(layout: KVLayout, dtype: str, heads: int) -> str | None:
    """Returns why the kernels cannot read such pages by so many query heads, None if they can."""
    if getattr(torch, dtype, None) not in ELEMENTS:
        return f"there are none for {dtype}"
    for kv in (group.shape for group in layout.groups):
        if kv.latent and kv.value_dim % LANES:
            return f"a latent has {kv.value_dim} elements, no multiple of {LANES}"
        if kv.key_dim != kv.value_dim and not kv.latent:
            return f"keys have {kv.key_dim} elements a head, values {kv.value_dim}"
        if kv.key_dim % LANES or kv.key_dim > MOST_DIM:
            return f"a head has {kv.key_dim} elements, no multiple of {LANES} up to {MOST_DIM}"
        if heads * kv.value_dim > MOST_RESULT:
            return f"{heads} heads have values of {kv.value_dim} elements, more than {MOST_RESULT} in all"
    return None


def _heads_of(kv: KVShape, heads: int, element: Element, rows: bool, kind: EightBit | None) -> Heads:
    if not kv.latent:
        return Heads(heads, kv.heads, kv.key_dim, element, rows, kind)
    together = max(count for count in range(1, MOST_TOGETHER + 1) if heads % count == 0)
    return Heads(heads, heads // together, kv.key_dim, element, rows, kind, latent=kv.value_dim)


class CpuAttention:
    """`AttentionBackend` by kernels, see `ReferenceAttention`. `why_not` states the pages that it cannot have."""

    name = "cpu"

    def __init__(
        self,
        machine: Machine,
        layout: KVLayout,
        pages: int,
        heads: int,
        dtype: str,
        scale: float | None = None,
        soft_cap: float | None = None,
        eight_bit: str | None = None,
        slopes: Sequence[float] = (),
    ) -> None:
        """Allocates the KV pool.

        Args:
            machine: Compiles and runs kernels.
            layout: Layout of the KV pool.
            pages: The number of pages.
            heads: The number of query heads.
            dtype: Type of queries and products, float32 or bfloat16.
            scale: Factor of scores. None: 1 / sqrt(key_dim).
            soft_cap: Bound of scores, by tanh. None for none.
            eight_bit: Type of the KV, int8 or fp8. None: `dtype`.
            slopes: What a score of each head loses for each token between query and key. () for nothing.
        """
        element, rows = ELEMENTS[getattr(torch, dtype)], layout.page_size % BLOCK != 0
        kind = EIGHT_BITS[eight_bit] if eight_bit is not None else None
        self.machine = machine
        self._page_size = layout.page_size
        self._groups = [
            CpuGroup.of(
                group,
                _heads_of(group.shape, heads, element, rows, kind),
                scale,
                soft_cap,
                slopes,
                machine.compiler.has_tiles,
            )
            for group in layout.groups
        ]
        self._place = {layer: (g, i) for g, group in enumerate(layout.groups) for i, layer in enumerate(group.layers)}
        self._pages = Pages(layout, pages, [group.heads for group in self._groups])
        self.states = CpuStates(layout, self._pages.memory) if layout.recurrent else None
        self.rows = np.zeros(1, np.int64)
        self._counters = np.zeros(2, np.int64)  # pieces of one layer that threads have claimed, of both kinds
        self._threads = machine.team.threads
        self._partial = torch.zeros(0, dtype=torch.uint8)

    # A step

    def plan(self, shape: StepShape) -> CpuPlan:
        kinds = [(group.window, group.chunked) for group in self._groups]
        seen = {kind: VisibleKeys.of(shape, *kind) for kind in set(kinds)}
        tables = np.ascontiguousarray(shape.tables)
        groups = tuple(
            CpuGroupPlan(
                self._pages.rows_of(number, np.ascontiguousarray(shape.slots[number])),
                seen[kind],
                divide(
                    shape, seen[kind], tables[number], self._page_size, group.heads.kv_heads,
                    group.shapes[SEVERAL].tokens, self._threads,
                ),
            )
            for number, (group, kind) in enumerate(zip(self._groups, kinds, strict=True))
        )  # fmt: skip
        return CpuPlan(len(shape.positions), tables, groups, shape.segments)

    def begin(self, plan: CpuPlan) -> None:
        """Sets the cells of a step, before its kernels run."""
        self.rows[0] = plan.tokens
        self._counters[:] = 0
        if self.states is not None:
            self.states.begin(plan.segments)
        pairs = list(zip(self._groups, plan.groups, strict=True))
        needed = max(of.pieces.parts * group.heads.heads * part_bytes(group.shapes[SINGLE]) for group, of in pairs)
        if needed > len(self._partial):
            self._partial = torch.zeros(2 * needed, dtype=torch.uint8)
        for group, of in pairs:
            group.cells.set(of, self._partial)

    def heads_of(self, layer: int) -> Heads:
        """Returns the heads of a layer."""
        return self._groups[self._place[layer][0]].heads

    def heads_name(self, norm: HeadNorm | None, scaled: bool = False) -> str:
        """Returns the name of the kernel that writes a layer's KV; it is the same for all shapes."""
        return f"heads_{self._groups[0].heads.stored}{'_scaled' if scaled else ''}{'_' + norm.name if norm else ''}"

    def heads_writer(self, norm: HeadNorm | None, scaled: bool = False) -> Writer:
        heads = self._groups[0].heads
        return write_heads(heads.element, norm, heads.rows, heads.eight_bit, scaled)

    def slots(self, layer: int) -> int:
        """Returns the address of the cell that holds the address of the step's slots."""
        return self._groups[self._place[layer][0]].cells.at("slots")

    def pool_of(self, layer: int) -> Tensor:
        """Returns the pool from the layer's part of page 0 on, as bytes."""
        return self._pages.from_layer(*self._place[layer])

    def calls(self, layer: int, queries: Tensor, out: Tensor, sinks: Tensor | None = None) -> list[Call]:
        """Returns the calls of a layer's attention.

        Args:
            layer: Index of the layer in the model.
            queries: [tokens, heads x key_dim] of the element.
            out: The result, [tokens, heads x value_dim].
            sinks: See `AttentionBackend.attend`.
        """
        number, _ = self._place[layer]
        group, pool = self._groups[number], self.pool_of(layer)
        cells, between = group.cells, self._pages.rows_a_page(number)
        stride = out.stride(0) * out.element_size()
        scores = 0 if sinks is None else sinks.float() * LOG2E
        made = []
        for kind, pieces, count in ((SINGLE, "single", "singles"), (SEVERAL, "several", "severals")):
            shape = replace(group.shapes[kind], sinks=sinks is not None)
            made.append(
                Call(
                    f"attention_{shape.name}",
                    write_attention(shape),
                    (
                        cells.at(pieces), cells.at(count), cells.at("first"), cells.at("last"), self._counters[kind:],
                        queries, out, stride, pool, cells.at("partial"), self._page_size, between, scores,
                        0 if group.slopes is None else group.slopes, *group.scaling,
                    ),
                )
            )  # fmt: skip
        join = replace(group.shapes[SINGLE], sinks=sinks is not None, tiled=False)
        made.append(
            Call(
                f"join_{join.name}",
                write_join(join),
                (cells.at("divided"), cells.at("divideds"), out, stride, cells.at("partial"), scores, self._counters),
            )
        )
        return made

    # One layer at a time, for tensors

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: CpuPlan) -> None:
        h, slots, pool = self.heads_of(layer), self.slots(layer), self.pool_of(layer)
        if h.latent:
            self._run(plan, [self._keys_call(h, slots, keys.flatten(1).float(), pool)])
            return
        both = torch.cat((keys, values), 1).flatten(1).float()
        arguments = (self.rows, slots, slots, both, both.stride(0) * 4, 0, pool, 0, h.kv_heads, h.kv_heads, h.dim)
        nothing = (0,) * 13  # neither rotated nor normalised
        call = Call(self.heads_name(None), self.heads_writer(None), (*arguments, *nothing))
        self._run(plan, [call])

    def _keys_call(self, h: Heads, slots: int, keys: Tensor, pool: Tensor) -> Call:
        """Makes the call that writes keys of latent attention, [tokens, key_dim] float32, as they are."""
        no_queries, no_rotation, no_norm = (0,) * 5, (0,) * 3, (0, 0, 0.0)
        arguments = self.rows, slots, slots, keys, keys.stride(0) * 4, *no_queries, pool, 0, 0, h.dim
        return latents_call(h, (*arguments, *no_rotation, *no_norm), LatentsKind(normed=False, rotated=False))

    def attend(self, layer: int, queries: Tensor, plan: CpuPlan, sinks: Tensor | None = None) -> Tensor:
        h = self.heads_of(layer)
        rounded = queries.to(h.element.dtype).flatten(1).contiguous()
        out = rounded.new_empty((len(queries), h.heads * h.value_dim))
        self._run(plan, self.calls(layer, rounded, out, sinks))
        return out.view(len(queries), h.heads, h.value_dim).to(queries.dtype)

    def _run(self, plan: CpuPlan, calls: list[Call]) -> None:
        self.begin(plan)
        self.machine.program(calls).run()

    # Pages

    def copy(self, pages: NDArray[np.int32]) -> None:
        self._pages.copy(pages)

    def export(self, pages: NDArray[np.int32], groups: NDArray[np.int32]) -> Tensor:
        return self._pages.export(pages, groups)

    def import_pages(self, pages: NDArray[np.int32], groups: NDArray[np.int32], content: Tensor) -> None:
        self._pages.import_pages(pages, groups, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self._pages.poison(pages)
