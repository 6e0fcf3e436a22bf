"""The plan of a step's attention as one array of int32, which goes to the device in one transfer.

A plan is laid out anew for each step, or, for decodes that CUDA graphs replay, always in the same places: what a graph
was recorded with must still be there. Only how many pieces there are and where they and the page tables lie changes,
and the kernels read that from the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.gpu.attention import HEAD, JOIN_FIELDS
from model.gpu.pieces import Division
from model.gpu.tuning import Sizes

ALIGNED = 4
"""Numbers that each array is padded to: Triton compiles a kernel anew for one that does not begin at 16 whole bytes."""

MOST_LAUNCHES = 2
"""Of a pass of decodes: for what each sees alone, and for what several share."""

Ints = NDArray[np.signedinteger[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One of `attend_pieces`. head: where in the plan. programs: one a piece; where looped, those that share them."""

    sizes: Sizes
    divided: bool
    looped: bool
    head: int
    programs: int


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What has room for its parts at one time: launches, then the joining of their parts. joins: [n, JOIN_FIELDS]."""

    launches: tuple[Launch, ...]
    joins: Tensor
    parts: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """Of one layer group. slots, first, last, part_from: int32 [tokens]."""

    slots: Tensor
    first: Tensor
    last: Tensor
    part_from: Tensor
    passes: tuple[Pass, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """packed: int32, all of it, on the device. rows: of the graphs that may compute it, see `Places`, 0 for none."""

    packed: Tensor
    groups: tuple[GroupPlan, ...]
    rows: int = 0

    @property
    def shares(self) -> bool:
        """Whether any keys are read once for several sequences."""
        return any(len(part.launches) > 1 for group in self.groups for part in group.passes)


@dataclass(frozen=True, slots=True, eq=False)
class GroupWork:
    """What a plan says of one layer group, on the host. slots, first, last: [tokens]. table: [lines, width]."""

    slots: Ints
    first: Ints
    last: Ints
    table: Ints
    division: Division


def laid_out(work: Sequence[GroupWork], device: torch.device) -> Plan:
    """A plan in a place of its own."""
    packer = Packer()
    groups = [_put(packer, one, 0) for one in work]
    _put_lists(packer, groups)
    packed = packer.host(device).to(device, non_blocking=True)
    return Plan(packed, tuple(group.on(packed, None) for group in groups))


class Places:
    """Where the arrays of plans lie that are all laid out alike. rows: of a plan, at most. numbers: that it has room
    for. programs: of each launch. spare: a slot that is nobody's, for rows that are there to fill a plan up.
    """

    def __init__(self, rows: int, numbers: int, programs: int, spare: int, device: torch.device) -> None:
        self.rows, self._programs, self._spare, self._device = rows, programs, spare, device
        self._packed = torch.zeros(numbers, dtype=torch.int32, device=device)

    def filled(self, rows: int, work: Sequence[GroupWork]) -> Plan | None:
        """A plan of `rows`, of which work's tokens are the first, in one round. None where there is no room for it."""
        packer = Packer()
        groups = [_put(packer, _filled_up(one, rows, self._spare), self.rows) for one in work]
        _put_lists(packer, groups)
        if packer.size > len(self._packed):
            return None
        self._packed[: packer.size].copy_(packer.host(self._device), non_blocking=True)
        return Plan(self._packed, tuple(group.on(self._packed, self._programs) for group in groups), rows)


class Packer:
    """Arrays of int32 that lie in one."""

    def __init__(self) -> None:
        self._arrays: list[tuple[int, Ints]] = []
        self.size = 0

    def put(self, array: Ints, room: int = 0) -> int:
        """Where it lies, with room for so many numbers. What it holds is taken over by `host`."""
        at = self.size
        self._arrays.append((at, array))
        self.size += -(-max(array.size, room) // ALIGNED) * ALIGNED
        return at

    def host(self, device: torch.device) -> Tensor:
        """All of them, where the device can copy them from while the host goes on."""
        packed = torch.zeros(self.size, dtype=torch.int32, pin_memory=device.type == "cuda")
        into = packed.numpy()
        for at, array in self._arrays:
            into[at : at + array.size] = array.reshape(-1)
        return packed


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    """Where what a group's layers read lies. heads: [launches, HEAD]. arrays: of slots, first, last and part_from.
    joins: of each round.
    """

    work: GroupWork
    heads: NDArray[np.int64]
    heads_at: int
    arrays: tuple[int, ...]
    joins: tuple[int, ...]

    def on(self, packed: Tensor, programs: int | None) -> GroupPlan:
        tokens, launch, passes = len(self.work.slots), 0, list[Pass]()
        for part, at in zip(self.work.division.rounds, self.joins, strict=True):
            launches = []
            for kind in part.kinds:
                head = self.heads_at + launch * HEAD
                launches.append(Launch(kind.sizes, kind.divided, kind.looped, head, programs or len(kind.pieces)))
                launch += 1
            joins = packed[at : at + part.joins.size].view(part.joins.shape)
            passes.append(Pass(tuple(launches), joins, part.parts))
        slots, first, last, part_from = (packed[at : at + tokens] for at in self.arrays)
        return GroupPlan(slots, first, last, part_from, tuple(passes))


def _put(packer: Packer, work: GroupWork, room: int) -> _Placed:
    """What layers read by where it lies. room: for tokens."""
    division = work.division
    heads = np.zeros((sum(len(part.kinds) for part in division.rounds), HEAD), np.int64)
    heads_at = packer.put(heads, MOST_LAUNCHES * HEAD if room else 0)
    arrays = tuple(packer.put(array, room) for array in (work.slots, work.first, work.last, division.part_from))
    joins = tuple(packer.put(part.joins, room * JOIN_FIELDS.value) for part in division.rounds)
    return _Placed(work, heads, heads_at, arrays, joins)


def _put_lists(packer: Packer, groups: Sequence[_Placed]) -> None:
    """What is found by way of the heads, which are filled in here."""
    for group in groups:
        division = group.work.division
        kinds = [kind for part in division.rounds for kind in part.kinds]
        table, order = packer.put(group.work.table), packer.put(division.order)
        for head, kind in zip(group.heads, kinds, strict=True):
            head[:] = len(kind.pieces), packer.put(kind.pieces), table, order


def _filled_up(work: GroupWork, rows: int, spare: int) -> GroupWork:
    """The same with so many tokens; of those that come to it, nothing is computed."""
    more, division = rows - len(work.slots), work.division
    (only,) = division.rounds
    nothing = np.zeros(more, np.int64)
    joins = np.concatenate((only.joins, np.zeros((rows - len(only.joins), JOIN_FIELDS.value), np.int64)))
    part_from = np.concatenate((division.part_from, nothing))
    filled = replace(division, part_from=part_from, rounds=(replace(only, joins=joins),))
    return replace(
        work,
        slots=np.concatenate((work.slots, np.full(more, spare))),
        first=np.concatenate((work.first, nothing)),
        last=np.concatenate((work.last, nothing)),
        division=filled,
    )
