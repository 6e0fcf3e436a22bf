"""Exchanges of processes that share memory, inside a program: meeting, sum, gathering.

Every rank counts the exchanges that it has begun, in a cell that all can read. Once all cells have reached the number
of an exchange, everything that ranks wrote before it can be read. A rank that begins the next exchange has read all of
the one before.
"""

from collections.abc import Callable

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.rows import shared_rows
from model.cpu.kernels.values import FLOAT32, LANES, Value

LINE = 64  # bytes from a rank's cell to the next one's: no two share a cache line
SPINS = 100  # turns between two yields, as between kernels, see `model.cpu.kernels.program`

Writer = Callable[[Code], None]


def write_meeting(ranks: int) -> Writer:
    """Writes the kernel that waits for all ranks.

    Kernel arguments:
        cells: Counts of exchanges of all ranks, LINE bytes apart.
        rank: This rank.
        before: Cell. Exchanges before the program.
        number: Index of this exchange in the program.
        left: Cell. Not 0 once waits must end.
    """

    def write(code: Code) -> None:
        meet(code, ranks)

    return write


def write_sum(ranks: int, add: bool) -> Writer:
    """Writes the kernel that meets, then sums all ranks' parts. With `add`, the sum is added to y.

    Kernel arguments, after those of a meeting:
        rows: Cell. The number of rows.
        parts: First rank's part, float32.
        part_bytes: Bytes from a rank's part to the next rank's.
        row_bytes: Bytes of a row of a part.
        y: Result, float32.
        y_stride: Bytes of a row of y.
        width: Columns, a multiple of 16.
    """

    def write(code: Code) -> None:
        meet(code, ranks)
        rows, parts, part_bytes, row_bytes, y, y_stride, width = code.arguments(12)[5:]
        with shared_rows(code, rows) as row:
            source, to = parts + row * row_bytes, y + row * y_stride
            with code.loop(0, width, LANES) as i:
                total = FLOAT.load(code, source + i * 4)
                for rank in range(1, ranks):
                    total = total + FLOAT.load(code, source + part_bytes * rank + i * 4)
                place = to + i * 4
                FLOAT.store(code, total + FLOAT.load(code, place) if add else total, place)

    return write


def write_gathering(ranks: int, here: bool) -> Writer:
    """Writes the kernel that meets, then puts all ranks' parts side by side; `here` only on the rank that wants them.

    Kernel arguments, after those of a meeting:
        rows: Cell. The number of rows.
        parts: First rank's part, float32.
        part_bytes: Bytes from a rank's part to the next rank's.
        row_bytes: Bytes of a row of a part.
        y: Result, float32.
        y_stride: Bytes of a row of y.
        widths: Width of each rank's part, one argument a rank.
    """

    def write(code: Code) -> None:
        meet(code, ranks)
        if not here:
            return
        rows, parts, part_bytes, row_bytes, y, y_stride, *widths = code.arguments(11 + ranks)[5:]
        with shared_rows(code, rows) as row:
            to = y + row * y_stride
            for rank, width in enumerate(widths):
                _copy(code, parts + part_bytes * rank + row * row_bytes, to, width)
                to = to + width * 4

    return write


def _copy(code: Code, source: Value, to: Value, width: Value) -> None:
    whole = width // LANES * LANES
    with code.loop(0, whole, LANES) as i:
        FLOAT.store(code, FLOAT.load(code, source + i * 4), to + i * 4)
    with code.loop(whole, width) as i:
        code.store(code.load(source + i * 4, FLOAT32), to + i * 4)


def meet(code: Code, ranks: int) -> None:
    """Counts this rank's exchange, and waits for all ranks."""
    cells, rank, before, number, left = code.arguments(5)
    due = code.held(before) + number + 1
    with code.when(code.thread.equals(0)):
        code.add_atomic(cells + rank * LINE, 1)
    spins = code.variable(code.integer(0))
    for other in range(ranks):
        cell = cells + other * LINE
        with code.repeat(lambda cell=cell: (code.seen(cell) < due) & code.seen(left).equals(0)):  # type: ignore[misc]
            code.pause()
            spins.set(spins.value + 1)
            with code.when((spins.value % SPINS).equals(0)):
                code.external("sched_yield")
