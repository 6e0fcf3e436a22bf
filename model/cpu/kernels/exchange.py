"""What processes that share memory do together inside a program: wait for all of them, add up what each has made, put
side by side what each has made.

Every rank counts what it has begun, in a cell that all can read. Once all cells have reached the number of an exchange,
what the ranks had written before it can be read; and whoever begins the next one has read all of the one before.
"""

from collections.abc import Callable

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.rows import shared_rows
from model.cpu.kernels.values import FLOAT32, LANES, Value

LINE = 64  # bytes from a rank's cell to the next one's: no two in a line of the cache
SPINS = 100  # as between kernels, see `model.cpu.kernels.program`

Writer = Callable[[Code], None]


def write_meeting(ranks: int) -> Writer:
    """Arguments: cells of all ranks, which rank this is, the cell of how many exchanges there were before the program,
    the number of this one in it, the cell that is not 0 once the others are not to be waited for.
    """

    def write(code: Code) -> None:
        _meet(code, ranks)

    return write


def write_sum(ranks: int, add: bool) -> Writer:
    """Arguments: as for a meeting, then rows, as the cell that holds it, where the first rank's part (float32) stands,
    bytes to the next one's, bytes of a row, y (float32), its stride, the width, a multiple of 16. add: y is added to.
    """

    def write(code: Code) -> None:
        _meet(code, ranks)
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
    """Arguments: as for a meeting, then rows, as the cell that holds it, where the first rank's part (float32) stands,
    bytes to the next one's, bytes of a row, y (float32), its stride, the width of each rank's part. here: this rank is
    the one that wants all.
    """

    def write(code: Code) -> None:
        _meet(code, ranks)
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


def _meet(code: Code, ranks: int) -> None:
    """Says that this rank is here, and waits for all."""
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
