"""Rounds of ranks that share no memory: the program is cut, and a `Collective` is called between its parts."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.program import Call, Machine
from model.cpu.rounds import HostCall, Runs
from model.parallel.collective import Collective


@dataclass(frozen=True, slots=True, eq=False)
class ProgramSequence:
    """Programs and host calls, run one after the other."""

    parts: Sequence[Runs]

    def run(self) -> None:
        for part in self.parts:
            part.run()


class CutRounds:
    """`Rounds` over any collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective, self._first = collective, collective.shard.rank == 0
        self._parts: dict[int, Buffer] = {}  # by width
        self._last = Buffer.of(0, 0, FLOAT)

    def to_sum(self, rows: int, width: int) -> Buffer:
        if width not in self._parts:
            self._parts[width] = Buffer.of(rows, width, FLOAT)
        return self._parts[width]

    def summed(self, rows: int, y: Buffer, width: int, add: bool) -> HostCall:
        part = self.to_sum(len(y.tensor), width)

        def run() -> None:
            count = _held(rows)
            total, place = self._collective.sum(part.tensor[:count, :width]), y.tensor[:count, :width]
            place.copy_(total + place if add else total)

        return HostCall(run)

    def to_gather(self, rows: int, width: int) -> Buffer:
        self._last = Buffer.of(rows, width, FLOAT)
        return self._last

    def gathered(self, rows: int, y: Buffer, widths: Sequence[int]) -> HostCall:
        part = self._last

        def run() -> None:
            count = _held(rows)
            everything = self._collective.gather(part.tensor[:count, : max(widths)], widths)
            if self._first:
                y.tensor[:count, : sum(widths)] = everything

        return HostCall(run)

    def program(self, machine: Machine, calls: Sequence[Call | HostCall]) -> ProgramSequence:
        parts: list[Runs] = []
        together: list[Call] = []
        for call in calls:
            if isinstance(call, Call):
                together.append(call)
                continue
            if together:
                parts.append(machine.program(together))
            parts.append(call)
            together = []
        return ProgramSequence([*parts, machine.program(together)] if together else parts)


def _held(cell: int) -> int:
    return ctypes.c_int64.from_address(cell).value
