"""Programs: kernels with their arguments, run one after the other by all threads of the team in one call.

Between two kernels all threads wait for each other. A waiting thread spins, since the others are mostly about to come.
Now and then it yields its processor, so that a machine with fewer processors than threads makes progress.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
from torch import Tensor

from model.cpu.kernels.code import Code
from model.cpu.kernels.native import Compiler, Writer
from model.cpu.kernels.team import Team
from model.cpu.kernels.values import INT64

SPINS = 100  # a few microseconds; 2,000 took 15 ms for 300 kernels where two threads had one processor, 100 took 1


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that other kernels call."""

    name: str
    write: Writer


Argument = int | float | Tensor | np.ndarray | Kernel
"""A number, or an array or a kernel whose address a kernel gets. Floats become float32."""


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel and its arguments."""

    name: str
    write: Writer
    arguments: tuple[Argument, ...]


class Machine:
    """Compiles kernels and runs programs of them."""

    def __init__(self, compiler: Compiler, team: Team) -> None:
        self.compiler, self.team = compiler, team
        for name in ("omp_get_thread_num", "omp_get_num_threads"):
            llvm.add_symbol(name, team.symbol(name))
        self.runner = compiler.kernel("run", write_run)

    def program(self, calls: Sequence[Call]) -> "Program":
        return Program(self, calls)


class Program:
    """Kernels with their arguments, which can be run any number of times, by one Python thread at a time.

    Kernels read and write the arguments' memory in place. The program keeps the arguments alive.
    """

    def __init__(self, machine: Machine, calls: Sequence[Call]) -> None:
        self._machine, self._calls = machine, tuple(calls)
        most = max(len(call.arguments) for call in calls)
        self._table = np.zeros((len(calls), 1 + most), np.int64)
        for row, call in zip(self._table, calls, strict=True):
            row[0] = machine.compiler.kernel(call.name, call.write)
            row[1 : 1 + len(call.arguments)] = [_word(machine.compiler, argument) for argument in call.arguments]
        # calls, bytes from one to the next, address of the first, threads that have arrived
        self._state = np.array([len(calls), 8 * (1 + most), self._table.ctypes.data, 0], np.int64)

    def run(self, threads: int | None = None) -> None:
        threads = threads or self._machine.team.threads
        self._state[3] = 0
        self._machine.team.run(self._machine.runner, self._state.ctypes.data, threads)


def write_run(code: Code) -> None:
    """Writes the function that runs all calls of a program in one thread.

    Unlike a kernel it is not passed its thread's number and the number of threads: OpenMP may start fewer than asked
    for.
    """
    count, stride, table = code.arguments(3)
    arrived = code.argument_place(3)
    thread, threads = (
        code.widened(code.external(name), INT64) for name in ("omp_get_thread_num", "omp_get_num_threads")
    )
    with code.loop(0, count) as number:
        call = table + number * stride
        code.call(code.load(call, INT64), call + 8, thread, threads)
        code.add_atomic(arrived, 1)
        spins = code.variable(code.integer(0))
        with code.until(arrived, (number + 1) * threads):
            code.pause()
            spins.set(spins.value + 1)
            with code.when((spins.value % SPINS).equals(0)):
                code.external("sched_yield")


def _word(compiler: Compiler, argument: Argument) -> int:
    """Returns an argument as 64 bits."""
    if isinstance(argument, Kernel):
        return compiler.kernel(argument.name, argument.write)
    if isinstance(argument, Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return int(np.float32(argument).view(np.uint32))
    return argument.ctypes.data if isinstance(argument, np.ndarray) else argument
