"""Paged attention by the kernels of the CPU, over pages that lie in memory as these read them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cache_manager.layout import KVLayout
from model.attention.backend import StepShape
from model.attention.seen import Seen
from model.cpu.kernels.attention import write_attention
from model.cpu.kernels.eight_bit import EIGHT_BITS
from model.cpu.kernels.element import ELEMENTS
from model.cpu.kernels.heads import MOST_DIM, HeadNorm, write_heads
from model.cpu.kernels.kv import BLOCK, Heads
from model.cpu.kernels.memory import huge_zeros
from model.cpu.kernels.mixing import SUMS, Shape, part_bytes, write_join
from model.cpu.kernels.program import Call, Machine
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.values import LANES
from model.cpu.pages import Pages
from model.cpu.pieces import Pieces, divide

SINGLE, SEVERAL = 0, 1


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """Of one layer group."""

    slots: NDArray[np.int64]
    seen: Seen
    pieces: Pieces


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """tokens: of the step. tables: those whose addresses the pieces hold."""

    tokens: int
    tables: NDArray[np.int32]
    groups: tuple[GroupPlan, ...]


class GroupCells:
    """Where kernels find what changes with each step, for one layer group."""

    FIELDS = ("slots", "first", "last", "single", "singles", "several", "severals", "divided", "divideds", "partial")

    def __init__(self) -> None:
        self._numbers = np.zeros(len(self.FIELDS), np.int64)

    def at(self, name: str) -> int:
        """The address of a field."""
        return int(self._numbers.ctypes.data + 8 * self.FIELDS.index(name))

    def set(self, plan: GroupPlan, partial: Tensor) -> None:
        """partial: room for parts of results."""
        pieces = plan.pieces
        self._numbers[:] = [
            plan.slots.ctypes.data, plan.seen.first.ctypes.data, plan.seen.last.ctypes.data,
            pieces.single.ctypes.data, len(pieces.single), pieces.several.ctypes.data, len(pieces.several),
            pieces.divided.ctypes.data, len(pieces.divided), partial.data_ptr(),
        ]  # fmt: skip


def why_not(layout: KVLayout, dtype: str) -> str | None:
    """What keeps the kernels from such pages; None if nothing."""
    if getattr(torch, dtype, None) not in ELEMENTS:
        return f"there are none for {dtype}"
    if layout.head_dim % LANES or layout.head_dim > MOST_DIM:
        return f"a head has {layout.head_dim} elements, no multiple of {LANES} up to {MOST_DIM}"
    return None


class CpuAttention:
    """`AttentionBackend`, see `ReferenceAttention`; `why_not` says for which pages. dtype: of queries and products,
    float32 or bfloat16. eight_bit: what the KV is in, int8 or fp8; None where
    it is in the dtype too.
    """

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
    ) -> None:
        element, rows = ELEMENTS[getattr(torch, dtype)], layout.page_size % BLOCK != 0
        kind = EIGHT_BITS[eight_bit] if eight_bit is not None else None
        self.machine = machine
        self.heads = Heads(heads, layout.kv_heads, layout.head_dim, element, rows, kind)
        self._windows = [layout.window(group) for group in range(len(layout.groups))]
        self._place = {layer: (g, i) for g, layers in enumerate(layout.groups) for i, layer in enumerate(layers)}
        self._page_size = layout.page_size
        self.pool = [huge_zeros(pages * layout.page_size * self.heads.row_bytes) for _ in layout.groups[0]]
        self._pages = Pages(self.heads, layout.page_size, [part.view(pages, -1) for part in self.pool])
        several = max(1, SUMS // self.heads.shared)
        capped = soft_cap is not None
        self._shapes = Shape(self.heads, 1, False, capped), Shape(self.heads, several, True, capped)
        self._scaling = (scale or layout.head_dim**-0.5, soft_cap or 0.0)
        self.rows = np.zeros(1, np.int64)
        self.cells = [GroupCells() for _ in layout.groups]
        self._counters = np.zeros((len(self._place), 2), np.int64)
        self._threads = machine.team.threads
        self._partial = torch.zeros(0, dtype=torch.uint8)

    # A step

    def plan(self, shape: StepShape) -> CpuPlan:
        seen = {window: Seen.of(shape, window) for window in set(self._windows)}
        tables = np.ascontiguousarray(shape.tables)
        groups = tuple(
            GroupPlan(
                np.ascontiguousarray(shape.slots[group]),
                seen[window],
                divide(
                    shape, seen[window], tables[group], self._page_size, self.heads.kv_heads,
                    self._shapes[SEVERAL].tokens, self._threads,
                ),
            )
            for group, window in enumerate(self._windows)
        )  # fmt: skip
        return CpuPlan(len(shape.positions), tables, groups)

    def begin(self, plan: CpuPlan) -> None:
        """Before the kernels of a step run."""
        self.rows[0] = plan.tokens
        self._counters[:] = 0
        parts = max(group.pieces.parts for group in plan.groups)
        needed = parts * self.heads.heads * part_bytes(self._shapes[SINGLE])
        if needed > len(self._partial):
            self._partial = torch.zeros(2 * needed, dtype=torch.uint8)
        for cells, group in zip(self.cells, plan.groups, strict=True):
            cells.set(group, self._partial)

    def heads_name(self, norm: HeadNorm | None) -> str:
        """Of the kernel that writes a layer's KV."""
        return f"heads_{self.heads.stored}{'_' + norm.name if norm else ''}"

    def heads_writer(self, norm: HeadNorm | None) -> Writer:
        return write_heads(self.heads.element, norm, self.heads.rows, self.heads.eight_bit)

    def slots(self, layer: int) -> int:
        """The cell that holds where the slots of the step's tokens stand."""
        return self.cells[self._place[layer][0]].at("slots")

    def pool_of(self, layer: int) -> Tensor:
        return self.pool[self._place[layer][1]]

    def calls(self, layer: int, queries: Tensor, out: Tensor) -> list[Call]:
        """Attention of a layer. queries, out: of the element [tokens, heads x head_dim]."""
        group, place = self._place[layer]
        cells, counters = self.cells[group], self._counters[layer]
        stride = out.stride(0) * out.element_size()
        made = []
        for kind, pieces, count in ((SINGLE, "single", "singles"), (SEVERAL, "several", "severals")):
            shape = self._shapes[kind]
            made.append(
                Call(
                    f"attention_{shape.name}",
                    write_attention(shape),
                    (
                        cells.at(pieces), cells.at(count), cells.at("first"), cells.at("last"), counters[kind:],
                        queries, out, stride, self.pool[place], cells.at("partial"), self._page_size, *self._scaling,
                    ),
                )
            )  # fmt: skip
        join = self._shapes[SINGLE]
        made.append(
            Call(
                f"join_{join.name}",
                write_join(join),
                (cells.at("divided"), cells.at("divideds"), out, stride, cells.at("partial")),
            )
        )
        return made

    # One layer at a time, for whoever has tensors

    def write(self, layer: int, keys: Tensor, values: Tensor, plan: CpuPlan) -> None:
        h, slots, pool = self.heads, self.slots(layer), self.pool_of(layer)
        both = torch.cat((keys, values), 1).flatten(1).float()
        arguments = (self.rows, slots, slots, both, both.stride(0) * 4, 0, pool, 0, h.kv_heads, h.dim)
        nothing = (0,) * 8  # neither turned nor normalised
        call = Call(self.heads_name(None), self.heads_writer(None), (*arguments, *nothing))
        self._run(plan, [call])

    def attend(self, layer: int, queries: Tensor, plan: CpuPlan) -> Tensor:
        rounded = queries.to(self.heads.element.dtype).flatten(1).contiguous()
        out = torch.empty_like(rounded)
        self._run(plan, self.calls(layer, rounded, out))
        return out.view(queries.shape).to(queries.dtype)

    def _run(self, plan: CpuPlan, calls: list[Call]) -> None:
        self.begin(plan)
        self.machine.program(calls).run()

    # Pages

    def copy(self, pages: NDArray[np.int32]) -> None:
        self._pages.copy(pages)

    def export(self, pages: NDArray[np.int32]) -> Tensor:
        return self._pages.export(pages)

    def import_pages(self, pages: NDArray[np.int32], content: Tensor) -> None:
        self._pages.import_pages(pages, content)

    def poison(self, pages: NDArray[np.int32]) -> None:
        self._pages.poison(pages)
