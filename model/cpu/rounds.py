"""Rounds: the collectives of ranks within a program of the CPU's kernels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.program import Call, Machine


@dataclass(frozen=True, slots=True, eq=False)
class HostCall:
    """A function of the host that is called between two programs."""

    run: Callable[[], None]


class Rounds(Protocol):
    """Collectives of ranks in a program of kernels, in the order in which the program is written.

    Buffers are float32, with as many rows as the largest step. `rows` is the address of the cell with a step's number
    of rows.
    """

    def to_sum(self, rows: int, width: int) -> Buffer:
        """Returns the buffer for this rank's part of the next sum."""

    def summed(self, rows: int, y: Buffer, width: int, add: bool) -> Call | HostCall:
        """Returns the call that sums all ranks' parts into y.

        Args:
            rows: Address of the cell with the number of rows.
            y: Buffer of the sum.
            width: Columns, a multiple of 16.
            add: Whether the sum is added to y.
        """

    def to_gather(self, rows: int, width: int) -> Buffer:
        """Returns the buffer for this rank's part of the next gathering; `width` is the widest part's."""

    def gathered(self, rows: int, y: Buffer, widths: Sequence[int]) -> Call | HostCall:
        """Returns the call that puts parts of these widths side by side into rank 0's y."""

    def program(self, machine: Machine, calls: Sequence[Call | HostCall]) -> "Runs":
        """Makes a program of calls, among them all that these rounds have made. Running it raises RankLost."""


class Runs(Protocol):
    """A program, or several with host calls between them."""

    def run(self) -> None: ...
