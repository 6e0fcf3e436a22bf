"""What kernels of recurrent layers share: a step's segments, convolutions, and states in the pages that keep them.

A step's tokens come in segments, see `model.attention.backend.StateSegments`. States lie in pages of the KV pool. A
segment's state is updated in place, in the page that keeps it; without one in a room of the thread.

Invariant: tokens are computed one after the other, with sums in a fixed order. So the bits of a token depend on the
tokens before it alone, wherever segments begin.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.values import FLOATS, INT32, INT64, LANES, Value, Variable

VECTOR = LANES * 4  # bytes
MOST_TOGETHER = 4  # vectors of a value that a thread computes at once: as many sums as the CPU needs to be busy
CELLS = ("segments", "offsets", "counts", "follows", "sources", "targets")


@dataclass(frozen=True, slots=True)
class Segments:
    """A step's segments, as kernels read them from the cells of `CELLS`.

    Attributes:
        count: The number of segments.
        offsets: First row of each, int64.
        counts: Rows of each, int64.
        follows: Whether each goes on from the one before it, int64.
        sources: [pages of a state, segments] int32.
        targets: Likewise.
    """

    code: Code
    count: Value
    offsets: Value
    counts: Value
    follows: Value
    sources: Value
    targets: Value

    @staticmethod
    def of(code: Code, cells: Sequence[Value]) -> "Segments":
        return Segments(code, *(code.held(cell) for cell in cells))

    def rows(self, number: Value) -> tuple[Value, Value]:
        """Returns the first row of a segment, and the one after its last."""
        first = self.code.load(self.offsets + number * 8, INT64)
        return first, first + self.code.load(self.counts + number * 8, INT64)

    def begins(self, number: Value) -> Value:
        """Whether a segment does not go on from the one before it."""
        return self.code.load(self.follows + number * 8, INT64).equals(0)

    def page(self, pages: Value, which: Value, number: Value) -> Value:
        """Returns one of a segment's pages, below 0 for none."""
        return self.code.widened(self.code.load(pages + (which * self.count + number) * 4, INT32), INT64)


@dataclass(frozen=True, slots=True)
class Convolution:
    """A causal convolution of each channel.

    Attributes:
        taps: Tokens that it sees.
        biased: Whether channels have biases.
        gates: Element of the result of a convolution between gates (LFM2): a row of the input has the gates of the
            input, those of the result, then the input. None for one without gates, whose result goes through SiLU and
            is float32.
    """

    taps: int
    biased: bool = False
    gates: Element | None = None

    @property
    def name(self) -> str:
        gates = "" if self.gates is None else f"_gates_{self.gates.name}"
        return f"convolution_{self.taps}{'_bias' if self.biased else ''}{gates}"


def write_convolution(kind: Convolution) -> Writer:
    """Writes the kernel of a convolution. Threads share the channels.

    Kernel arguments:
        *CELLS: Cells of the segments.
        x: Input, float32.
        x_stride: Bytes of a row of x.
        weights: [taps, channels] float32, the oldest row first.
        bias: [channels] float32, not read without biases.
        y: Result.
        y_stride: Bytes of a row of y.
        channels: The number of channels.
        pool: Address of page 0.
        page_bytes: Bytes of a page.
        which: Which page of a state has the window.
        offset: Bytes from the beginning of that page.
    """

    def write(code: Code) -> None:
        *cells, x, x_stride, weights, bias, y, y_stride, channels, pool, page_bytes, which, offset = code.arguments(17)
        segments, between, out = Segments.of(code, cells), channels * 4, kind.gates or FLOAT
        first, last = code.share(channels // LANES)
        with code.loop(first, last) as block:
            column = block * VECTOR
            factors = [code.load(weights + tap * between + column, FLOATS) for tap in range(kind.taps)]
            beginning = code.load(bias + column, FLOATS) if kind.biased else None
            window = [code.variable(code.floats(0.0)) for _ in range(kind.taps - 1)]
            with code.loop(0, segments.count) as number:
                with code.when(segments.begins(number)):
                    page = segments.page(segments.sources, which, number)
                    with code.when(page < 0):
                        for value in window:
                            value.set(code.floats(0.0))
                    with code.when(page >= 0):
                        place = pool + page * page_bytes + offset + column
                        for tap, value in enumerate(window):
                            value.set(code.load(place + tap * between, FLOATS))
                begin, end = segments.rows(number)
                with code.loop(begin, end) as row:
                    source = x + row * x_stride + column
                    here = code.load(source, FLOATS)
                    if kind.gates is not None:
                        here = here * code.load(source + 2 * between, FLOATS)
                    total = window[0].value * factors[0]
                    following = [*(value.value for value in window[1:]), here]
                    for one, factor in zip(following, factors[1:], strict=True):
                        total = code.fma(one, factor, total)
                    total = total if beginning is None else total + beginning
                    total = (
                        math.silu(code, total) if kind.gates is None else total * code.load(source + between, FLOATS)
                    )
                    out.store(code, total, y + row * y_stride + block * (LANES * out.size))
                    for value, one in zip(window, following, strict=True):
                        value.set(one)
                page = segments.page(segments.targets, which, number)
                with code.when(page >= 0):
                    place = pool + page * page_bytes + offset + column
                    for tap, value in enumerate(window):
                        code.store(value.value, place + tap * between)

    return write


def together(value_dim: int) -> int:
    """Returns the vectors of a value that are computed at once."""
    vectors = value_dim // LANES
    return max(size for size in range(1, MOST_TOGETHER + 1) if vectors % size == 0)


@dataclass(frozen=True, slots=True)
class StatePages:
    """Places of the heads' matrices in the pages of a state.

    Attributes:
        pool: Address of page 0.
        page_bytes: Bytes of a page.
        which: [heads] int64. Which page of a state has the head's matrix.
        offsets: [heads] int64. Bytes from the beginning of that page.
    """

    pool: Value
    page_bytes: Value
    which: Value
    offsets: Value


def each_token(
    code: Code,
    segments: Segments,
    pages: StatePages,
    matrix: "Matrix",
    head: Value,
    column: Value,
    stride: Value,
    advance: Callable[[Value], None],
) -> None:
    """Writes the loop over a step's tokens for some columns of a head's matrix.

    Args:
        code: The kernel.
        segments: The step's segments.
        pages: Where matrices lie.
        matrix: The columns.
        head: The head's number.
        column: Bytes from the first column of the head's matrix to these.
        stride: Bytes of a row of the head's matrix.
        advance: Writes the update of the matrix with the token of a row.
    """
    where, page_of = code.load(pages.offsets + head * 8, INT64) + column, code.load(pages.which + head * 8, INT64)

    def place(of: Value, number: Value) -> Value:
        """Returns the address of a segment's matrix, 0 without one."""
        page = segments.page(of, page_of, number)
        return code.select(page >= 0, pages.pool + page * pages.page_bytes + where, code.integer(0))

    with code.loop(0, segments.count) as number:
        with code.when(segments.begins(number)):
            matrix.begin(place(segments.sources, number), stride)
        matrix.move(place(segments.targets, number), stride)
        begin, end = segments.rows(number)
        with code.loop(begin, end) as row:
            advance(row)


class Matrix:
    """Some columns of a head's matrix, [rows, columns] float32, in the page that keeps it or in a room.

    Args:
        code: The kernel.
        rows: Rows.
        vectors: Columns in vectors.
    """

    def __init__(self, code: Code, rows: int, vectors: int) -> None:
        self._code, self.rows, self.vectors = code, rows, vectors
        self._room = code.room(rows * vectors * VECTOR)
        self._base: Variable = code.variable(code.integer(0))
        self._stride: Variable = code.variable(code.integer(0))

    def begin(self, source: Value, stride: Value) -> None:
        """Begins with the matrix at an address, or with zeros where it is 0."""
        self._base.set(source)
        self._stride.set(stride)

    def move(self, target: Value, stride: Value) -> None:
        """Moves the matrix to an address, or to the room where it is 0. Nothing is copied where it is there."""
        code, base, before = self._code, self._base.value, self._stride.value
        has_page = target > 0
        place = code.select(has_page, target, self._room)
        step = code.select(has_page, stride, code.integer(self.vectors * VECTOR))
        with code.when(base.equals(0)), code.loop(0, self.rows) as row:
            for i in range(self.vectors):
                code.store(code.floats(0.0), place + row * step, i * VECTOR)
        with code.when(base > 0), code.when((base ^ place) > 0), code.loop(0, self.rows) as row:
            for i in range(self.vectors):
                code.store(code.load(base + row * before, FLOATS, i * VECTOR), place + row * step, i * VECTOR)
        self._base.set(place)
        self._stride.set(step)

    def row(self, number: Value) -> Value:
        """Returns the address of a row."""
        return self._base.value + number * self._stride.value
