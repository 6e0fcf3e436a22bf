"""Packs the plan of a step, of attention and states, into one array of int32, which goes to the device in one transfer.

A plan is laid out anew for each step, or, for steps that CUDA graphs replay, always in the same places. A graph finds
the arrays at the addresses that it was recorded with. Only the number of pieces and the places of pieces and page
tables change: kernels read these from the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.gpu.attention import HEADER, JOIN_FIELDS
from model.gpu.flashinfer import LongSlices
from model.gpu.packer import Ints, Packer
from model.gpu.pieces import FEW, MANY, SHARED, Division
from model.gpu.state_plan import StatePlan, StateWork
from model.gpu.tuning import TileSizes, Tuning

MIXED = (FEW, MANY, SHARED)
"""Launches of a graph for any step."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One launch of `attend_pieces`.

    Attributes:
        sizes: Tile sizes of the kernel.
        divided: Whether pieces may be chunks of keys, with partial results.
        looped: Whether programs share the pieces. If not, each program has one.
        header: Index of the pieces' header in the plan.
        programs: The number of programs for each KV head.
    """

    sizes: TileSizes
    divided: bool
    looped: bool
    header: int
    programs: int


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """Launches whose partial results fit at one time, then the joining of these.

    Attributes:
        launches: Launches, in their order.
        joins: [n, JOIN_FIELDS] int32.
        parts: The number of partial results.
    """

    launches: tuple[Launch, ...]
    joins: Tensor
    parts: int


@dataclass(frozen=True, slots=True, eq=False)
class GpuGroupPlan:
    """Plan of one layer group, on the device.

    Attributes:
        slots: [tokens] int32. Slots of the step's own KV.
        first: [tokens] int32. First key that each token sees.
        last: [tokens] int32. Key after the last.
        first_part: [tokens] int32, as in `attend_pieces`.
        passes: Passes, in their order.
    """

    slots: Tensor
    first: Tensor
    last: Tensor
    first_part: Tensor
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GpuPlan:
    """Plan of a step.

    Attributes:
        packed: int32. All of the plan, on the device.
        groups: Plans of the layer groups.
        rows: Rows of the graphs that may compute the plan, see `Places`; 0 for none.
        mixed: Whether these graphs are those for any step, not those for one token a sequence.
        states: Plan of the recurrent layers. None for a model without some.
        prompts: Slices that FlashInfer computes; None without any.
    """

    packed: Tensor
    groups: tuple[GpuGroupPlan, ...]
    rows: int = 0
    mixed: bool = False
    states: StatePlan | None = None
    prompts: LongSlices | None = None

    @property
    def shares(self) -> bool:
        """Whether any keys are read once for several sequences."""
        return any(len(part.launches) > 1 for group in self.groups for part in group.passes)


@dataclass(frozen=True, slots=True, eq=False)
class GroupWork:
    """Content of a plan for one layer group, on the host.

    Attributes:
        slots: [tokens].
        first: [tokens]. First key that each token sees.
        last: [tokens]. Key after the last.
        table: [lines, width]. Page ids.
        division: Pieces of work.
    """

    slots: Ints
    first: Ints
    last: Ints
    table: Ints
    division: Division

    def in_launches(self, tuning: Tuning) -> "GroupWork":
        """Returns the same work in the launches of graphs for any step. Raises ValueError, see `Division`."""
        return replace(self, division=self.division.in_launches(tuning, MIXED))


def laid_out(work: Sequence[GroupWork], device: torch.device, states: StateWork | None = None) -> GpuPlan:
    """Returns a plan in a place of its own."""
    packer = Packer()
    groups = [_put(packer, one, 0) for one in work]
    _put_lists(packer, groups)
    placed = None if states is None else states.put(packer)
    packed = packer.host(device).to(device, non_blocking=True)
    made = None if placed is None else placed.on(packed)
    return GpuPlan(packed, tuple(group.on(packed, None) for group in groups), states=made)


class Places:
    """Fixed places of plans that are laid out alike, for CUDA graphs."""

    def __init__(
        self, sizes: Sequence[int], mixed: bool, numbers: int, programs: int, spare: int, device: torch.device
    ) -> None:
        """Allocates the places.

        Args:
            sizes: Rows of plans, one for each token, ascending. A plan is filled up to the next of them.
            mixed: Whether plans are of any step, not of one token a sequence.
            numbers: Numbers of int32 that a plan may have.
            programs: Programs of each launch.
            spare: A slot that no sequence has, for rows that fill up a plan.
            device: Device of the plans.
        """
        self._sizes, self._mixed, self._programs, self._spare, self._device = sizes, mixed, programs, spare, device
        self._packed = torch.zeros(numbers, dtype=torch.int32, device=device)

    def filled(self, tokens: int, work: Sequence[GroupWork], states: StateWork | None = None) -> GpuPlan | None:
        """Lays out a plan in one pass.

        Args:
            tokens: Tokens of the step, which the first rows of the plan are for.
            work: Work of the layer groups.
            states: Work of the recurrent layers.

        Returns:
            The plan. None where it has no room.
        """
        rows = next((size for size in self._sizes if size >= tokens), None)
        if rows is None:
            return None
        packer, most = Packer(), self._sizes[-1]
        groups = [_put(packer, _filled_up(one, rows, self._spare), most) for one in work]
        placed = None if states is None else states.filled_up(rows).put(packer, most)
        _put_lists(packer, groups)
        if packer.size > len(self._packed):
            return None
        self._packed[: packer.size].copy_(packer.host(self._device), non_blocking=True)
        made = None if placed is None else placed.on(self._packed)
        on_device = tuple(group.on(self._packed, self._programs) for group in groups)
        return GpuPlan(self._packed, on_device, rows, self._mixed, made)


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Places of the arrays that a group's layers read.

    Attributes:
        headers: [launches, HEADER] int64. Content of the headers.
        headers_at: Place of the headers.
        arrays: Places of slots, first, last and first_part.
        joins: Place of each round's joins.
    """

    work: GroupWork
    headers: NDArray[np.int64]
    headers_at: int
    arrays: tuple[int, ...]
    joins: tuple[int, ...]

    def on(self, packed: Tensor, programs: int | None) -> GpuGroupPlan:
        """Returns the group's plan on the device; `programs` of each launch, None for one a piece."""
        tokens, launch, passes = len(self.work.slots), 0, list[Pass]()
        for part, at in zip(self.work.division.rounds, self.joins, strict=True):
            launches = []
            for kind in part.kinds:
                header = self.headers_at + launch * HEADER
                launches.append(Launch(kind.sizes, kind.divided, kind.looped, header, programs or len(kind.pieces)))
                launch += 1
            joins = packed[at : at + part.joins.size].view(part.joins.shape)
            passes.append(Pass(tuple(launches), joins, part.parts))
        slots, first, last, first_part = (packed[at : at + tokens] for at in self.arrays)
        return GpuGroupPlan(slots, first, last, first_part, tuple(passes))


def _put(packer: Packer, work: GroupWork, room: int) -> _Placed:
    """Packs the arrays whose addresses a launch gets; `room` is for tokens."""
    division = work.division
    headers = np.zeros((sum(len(part.kinds) for part in division.rounds), HEADER), np.int64)
    headers_at = packer.put(headers, len(MIXED) * HEADER if room else 0)
    arrays = tuple(packer.put(array, room) for array in (work.slots, work.first, work.last, division.first_part))
    joins = tuple(packer.put(part.joins, room * JOIN_FIELDS.value) for part in division.rounds)
    return _Placed(work, headers, headers_at, arrays, joins)


def _put_lists(packer: Packer, groups: Sequence[_Placed]) -> None:
    """Packs the arrays that kernels find by the headers, and fills in the headers."""
    for group in groups:
        division = group.work.division
        kinds = [kind for part in division.rounds for kind in part.kinds]
        table, order = packer.put(group.work.table), packer.put(division.order)
        for header, kind in zip(group.headers, kinds, strict=True):
            header[:] = len(kind.pieces), packer.put(kind.pieces), table, order


def _filled_up(work: GroupWork, rows: int, spare: int) -> GroupWork:
    """Returns the work with `rows` tokens. Nothing is computed for the added ones."""
    more, division = rows - len(work.slots), work.division
    (only,) = division.rounds
    nothing = np.zeros(more, np.int64)
    joins = np.concatenate((only.joins, np.zeros((rows - len(only.joins), JOIN_FIELDS.value), np.int64)))
    first_part = np.concatenate((division.first_part, nothing))
    filled = replace(division, first_part=first_part, rounds=(replace(only, joins=joins),))
    return replace(
        work,
        slots=np.concatenate((work.slots, np.full(more, spare))),
        first=np.concatenate((work.first, nothing)),
        last=np.concatenate((work.last, nothing)),
        division=filled,
    )
