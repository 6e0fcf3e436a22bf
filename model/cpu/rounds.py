"""What the ranks do together inside a program of the CPU's kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.program import Call, Machine


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """What is called between two programs."""

    run: Callable[[], None]


class Rounds(Protocol):
    """What the ranks do together in a program of kernels, in the order in which it is written. Buffers are of float32,
    with as many rows as the largest step; rows: address of the cell with the number of those of a step.
    """

    def to_sum(self, rows: int, width: int) -> Buffer:
        """Where this rank's part of the next sum goes."""

    def summed(self, rows: int, y: Buffer, width: int, add: bool) -> Call | Exchange:
        """The sum of what all have, into y or, with `add`, to what stands there. width: a multiple of 16."""

    def to_gather(self, rows: int, width: int) -> Buffer:
        """Where this rank's part of what is gathered goes. width: of the widest part."""

    def gathered(self, rows: int, y: Buffer, widths: Sequence[int]) -> Call | Exchange:
        """Of parts of these widths, side by side into rank 0's y."""

    def program(self, machine: Machine, calls: Sequence[Call | Exchange]) -> "Runs":
        """Of calls among which are all that these rounds have made. It raises RankLost."""


class Runs(Protocol):
    """A program, or several with something between them."""

    def run(self) -> None: ...
