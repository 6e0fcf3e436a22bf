"""`Collective` of processes on one machine: memory that all of them map, and kernels that wait in it.

The memory is a file without a name. One rank makes it and sends it to the others through a socket, so nothing of it
stays once all have ended. It grows with the largest step. All ranks see the same steps and grow it at the same point.

A page in front holds each rank's count of exchanges and its sign of life. Then come rooms with one part for each rank:
two that sums use in turn, and one for the logits.

Invariant: no room is written again before another exchange has begun. A rank that begins an exchange has read all of
the exchange before.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.exchange import LINE, Writer, write_gathering, write_meeting, write_sum
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.program import Argument, Call, Machine, Program
from model.cpu.rounds import HostCall
from model.errors import RankLost
from model.parallel.shard import Shard
from model.parallel.sums import Adder

HEAD, ROOMS, LAST = 4096, 3, 2  # LAST: the room of the logits
MOST_RANKS = HEAD // LINE


def shared_memory() -> int:
    """Opens a new file without a name, for `SharedMemory`, and returns its descriptor."""
    return os.memfd_create("quire-ranks", os.MFD_CLOEXEC)


class SharedMemory:
    """`Collective` in shared memory. See above for its layout and invariant."""

    name, runs_ahead = "shared memory", False

    def __init__(self, machine: Machine, shard: Shard, file: int) -> None:
        """Maps the memory.

        Args:
            machine: Compiles and runs kernels.
            shard: This rank's shard.
            file: Descriptor of the file, which is closed by `close`.
        """
        if shard.size > MOST_RANKS:
            raise ValueError(f"--tensor-parallel is {shard.size}, must be at most {MOST_RANKS} on one machine")
        self._machine, self.shard, self._file = machine, shard, file
        os.ftruncate(file, max(HEAD, os.fstat(file).st_size))
        # Kept until the end: addresses in it are in programs.
        head = torch.frombuffer(mmap.mmap(file, HEAD), dtype=torch.int64).numpy().reshape(-1, LINE // 8)
        self._arrived, self._lives = head[:, 0], head[:, 1]
        self._numbers = np.zeros(2, np.int64)  # exchanges before the running program; 1 once waits must end
        self._why = ""
        self._sums = 0  # sums so far, whose parity is the room of the next one
        self.part_bytes = 0  # bytes from a rank's part to the next rank's
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._meeting = machine.program([self.call("meeting", write_meeting(shard.size), 0)])

    # Life

    def started(self) -> None:
        """Nothing changes: waits have no timeout, see `lives`."""

    def fail(self, why: str) -> None:
        self._why = self._why or why
        self._numbers[1] = 1

    def lives(self) -> list[int]:
        self._lives[self.shard.rank] += 1
        return [int(number) for number in self._lives[: self.shard.size]]

    def close(self) -> None:
        self.fail("this rank has ended")
        os.close(self._file)

    # Programs

    def reserve(self, part_bytes: int) -> None:
        """Makes room for parts of `part_bytes` bytes. Earlier buffers are no longer valid."""
        if part_bytes <= self.part_bytes:
            return
        self.meet()  # so that all ranks have read the old rooms
        self.part_bytes = max(HEAD, 1 << (part_bytes - 1).bit_length())
        size = HEAD + ROOMS * self.shard.size * self.part_bytes
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)  # a rank that comes later asks for the same size
        self._memory = torch.frombuffer(mmap.mmap(self._file, size), dtype=torch.uint8)

    def part(self, room: int, rank: int, rows: int, width: int) -> Buffer:
        """Returns a rank's part in a room, [rows, width] float32."""
        padded = _padded(width)
        start = HEAD + (room * self.shard.size + rank) * self.part_bytes
        place = self._memory[start : start + rows * padded * 4]
        return Buffer(place.view(torch.float32).view(rows, padded), FLOAT)

    def rounds(self, *shapes: tuple[int, int]) -> "SharedRounds":
        """Returns the rounds of a new program, whose parts have these rows and columns at most."""
        self.reserve(max(rows * _padded(width) for rows, width in shapes) * 4)
        return SharedRounds(self, self.shard)

    def run(self, program: Program, rounds: "SharedRounds") -> None:
        """Runs a program with these rounds. Raises RankLost."""
        # Programs begin in the first room. One without sums begins in the room of the logits, which may be read still.
        if self._sums % 2 or not rounds.sums:
            self._sums = 0
            self.meet()
        self._run(program, rounds.count)
        self._sums = rounds.sums

    def meet(self) -> None:
        """Waits for all ranks."""
        self._run(self._meeting, 1)

    def _run(self, program: Program, exchanges: int) -> None:
        program.run()
        self._numbers[0] += exchanges
        if self._numbers[1]:
            raise RankLost(self._why)

    def call(self, name: str, write: Writer, number: int, *arguments: Argument) -> Call:
        """Makes a call of a kernel that begins with a meeting; `number` is its index among the program's exchanges."""
        at = self._numbers.ctypes.data
        own = self._arrived.ctypes.data, self.shard.rank, at, number, at + 8
        return Call(f"{name}_{self.shard.size}", write, (*own, *arguments))

    # Layer by layer

    def sum(self, x: Tensor, add: Adder | None = None) -> Tensor:  # noqa: ARG002 - parts lie apart, and are added here
        parts = self._exchanged(x, self._sums % 2)
        self._sums += 1
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        parts = self._exchanged(x, self._sums % 2)
        self._sums += 1
        return torch.stack(parts).to(x.dtype)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.meet()  # several may follow each other: rank 0 may read the room of the logits still
        parts = self._exchanged(x, LAST, max(widths))
        if self.shard.rank:
            return x
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1).to(x.dtype)

    def _exchanged(self, x: Tensor, room: int, widest: int = 0) -> list[Tensor]:
        """Returns all ranks' x, float32; `widest` is the widest of them."""
        rows, width = x.shape
        widest = max(widest, width)
        self.reserve(rows * _padded(widest) * 4)
        parts = [self.part(room, rank, rows, widest).tensor for rank in range(self.shard.size)]
        parts[self.shard.rank][:, :width] = x
        self.meet()
        return [part[:, :widest] for part in parts]


class SharedRounds:
    """`Rounds` that are all kernels of the program.

    Attributes:
        count: The number of rounds so far.
        sums: The number of sums among them.
    """

    def __init__(self, memory: SharedMemory, shard: Shard) -> None:
        self._memory, self._shard = memory, shard
        self.count = self.sums = 0

    def to_sum(self, rows: int, width: int) -> Buffer:
        return self._memory.part(self.sums % 2, self._shard.rank, rows, width)

    def to_gather(self, rows: int, width: int) -> Buffer:
        return self._memory.part(LAST, self._shard.rank, rows, width)

    def summed(self, rows: int, y: Buffer, width: int, add: bool) -> Call:
        first = self._memory.part(self.sums % 2, 0, len(y.tensor), width)
        self.sums += 1
        return self._next(
            f"sum{'_add' if add else ''}", write_sum(self._shard.size, add),
            rows, first.tensor, self._memory.part_bytes, first.stride, y.tensor, y.stride, width,
        )  # fmt: skip

    def gathered(self, rows: int, y: Buffer, widths: Sequence[int]) -> Call:
        first, here = self._memory.part(LAST, 0, len(y.tensor), max(widths)), self._shard.rank == 0
        return self._next(
            f"gathering{'_here' if here else ''}", write_gathering(self._shard.size, here),
            rows, first.tensor, self._memory.part_bytes, first.stride, y.tensor, y.stride, *widths,
        )  # fmt: skip

    def program(self, machine: Machine, calls: Sequence[Call | HostCall]) -> "SharedProgram":
        return SharedProgram(self._memory, machine.program([call for call in calls if isinstance(call, Call)]), self)

    def _next(self, name: str, write: Writer, *arguments: Argument) -> Call:
        call = self._memory.call(name, write, self.count, *arguments)
        self.count += 1
        return call


@dataclass(frozen=True, slots=True, eq=False)
class SharedProgram:
    """A program with all its rounds."""

    memory: SharedMemory
    inner: Program
    rounds: SharedRounds

    def run(self) -> None:
        """Runs the program. Raises RankLost."""
        self.memory.run(self.inner, self.rounds)


def _padded(width: int) -> int:
    return -(-width // PANEL) * PANEL
