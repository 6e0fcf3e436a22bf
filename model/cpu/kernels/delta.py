"""Kernels of a gated delta rule (Yang et al., Gated Delta Networks, 2024): convolution, gates, recurrence, gated norm.

A step's tokens come in segments, see `model.attention.backend.StateSegments`. States lie in pages of the KV pool. A
segment's state is updated in place, in the page that keeps it; without one in a room of the thread.

Invariant: tokens are computed one after the other, with sums in a fixed order. So the bits of a token depend on the
tokens before it alone, wherever segments begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.values import FLOAT32, FLOATS, INT32, INT64, LANES, Value, Variable
from model.delta_net import L2_EPS

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


def write_convolution(taps: int) -> Writer:
    """Writes the kernel of a causal convolution of each channel, with SiLU. Threads share the channels.

    Kernel arguments:
        *CELLS: Cells of the segments.
        x: Input, float32.
        x_stride: Bytes of a row of x.
        weights: [taps, channels] float32, the oldest row first.
        y: Result, float32.
        y_stride: Bytes of a row of y.
        channels: The number of channels.
        pool: Address of page 0.
        page_bytes: Bytes of a page.
        which: Which page of a state has the window.
        offset: Bytes from the beginning of that page.
    """

    def write(code: Code) -> None:
        *cells, x, x_stride, weights, y, y_stride, channels, pool, page_bytes, which, offset = code.arguments(16)
        segments, between = Segments.of(code, cells), channels * 4
        first, last = code.share(channels // LANES)
        with code.loop(first, last) as block:
            column = block * VECTOR
            factors = [code.load(weights + tap * between + column, FLOATS) for tap in range(taps)]
            window = [code.variable(code.floats(0.0)) for _ in range(taps - 1)]
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
                    here = code.load(x + row * x_stride + column, FLOATS)
                    total = window[0].value * factors[0]
                    following = [*(value.value for value in window[1:]), here]
                    for one, factor in zip(following, factors[1:], strict=True):
                        total = code.fma(one, factor, total)
                    code.store(math.silu(code, total), y + row * y_stride + column)
                    for value, one in zip(window, following, strict=True):
                        value.set(one)
                page = segments.page(segments.targets, which, number)
                with code.when(page >= 0):
                    place = pool + page * page_bytes + offset + column
                    for tap, value in enumerate(window):
                        code.store(value.value, place + tap * between)

    return write


def write_gates() -> Writer:
    """Writes the kernel of write gates and decays.

    Kernel arguments:
        count: Cell. The number of rows.
        x: [rows, 2 heads] float32: write gates, then decays, before their activations.
        x_stride: Bytes of a row of x.
        rate: Rate of the decay of each head, float32, whole vectors.
        bias: Bias of the decay, likewise.
        y: [rows, 2 padded] float32: write gates, then the part of a state that is kept.
        y_stride: Bytes of a row of y.
        heads: The number of heads.
        padded: The same, in whole vectors.
    """

    def write(code: Code) -> None:
        count, x, x_stride, rate, bias, y, y_stride, heads, padded = code.arguments(9)
        with shared_rows(code, count) as row, code.loop(0, padded, LANES) as i:
            source, place = x + row * x_stride + i * 4, y + row * y_stride + i * 4
            FLOAT.store(code, math.sigmoid(code, FLOAT.load(code, source)), place)
            raw = FLOAT.load(code, source + heads * 4) + FLOAT.load(code, bias + i * 4)
            softplus = code.maximum(raw, 0.0) + math.log(code, math.exp(code, -1.0 * code.absolute(raw)) + 1.0)
            softplus = code.select(raw >= raw, softplus, raw)  # a maximum leaves NaN out
            FLOAT.store(code, math.exp(code, -1.0 * FLOAT.load(code, rate + i * 4) * softplus), place + padded * 4)

    return write


def together(value_dim: int) -> int:
    """Returns the vectors of a value that are computed at once."""
    vectors = value_dim // LANES
    return max(size for size in range(1, MOST_TOGETHER + 1) if vectors % size == 0)


def write_recurrence(key_dim: int, vectors: int) -> Writer:
    """Writes the kernel of the delta rule. Threads share the heads, and the columns of their matrices.

    Args:
        key_dim: Elements of a key, a multiple of 16.
        vectors: Vectors of a value that are computed at once.

    Kernel arguments:
        *CELLS: Cells of the segments.
        x: Queries, keys and values of all heads, float32.
        x_stride: Bytes of a row of x.
        gates: See `write_gates`.
        gates_stride: Bytes of a row of gates.
        padded: Heads in whole vectors.
        y: Result, [rows, heads x value_dim] float32.
        y_stride: Bytes of a row of y.
        keys: Elements of the keys of all heads.
        heads: The number of value heads.
        shared: Value heads of a key head.
        value_dim: Elements of a value.
        pool: Address of page 0.
        page_bytes: Bytes of a page.
        which: [heads] int64. Which page of a state has the head's matrix.
        offsets: [heads] int64. Bytes from the beginning of that page.
        scale: Factor of queries, a float.
    """

    def write(code: Code) -> None:
        *cells, x, x_stride, gates, gates_stride, padded, y, y_stride, keys, heads, shared = code.arguments(16)
        value_dim, pool, page_bytes, which, offsets = code.arguments(21)[16:]
        segments, scale = Segments.of(code, cells), code.splat(code.real(21))
        blocks = value_dim // (vectors * LANES)
        matrix = Matrix(code, key_dim, vectors)
        query, key = code.room(key_dim * 4), code.room(key_dim * 4)
        first, last = code.share(heads * blocks)
        with code.loop(first, last) as item:
            head, column = item // blocks, item % blocks * (vectors * VECTOR)
            where = code.load(offsets + head * 8, INT64) + column
            page_of = code.load(which + head * 8, INT64)

            def place(pages: Value, number: Value, page_of: Value = page_of, where: Value = where) -> Value:
                """Returns the address of a segment's matrix, 0 without one."""
                page = segments.page(pages, page_of, number)
                return code.select(page >= 0, pool + page * page_bytes + where, code.integer(0))

            begin_keys = head // shared * (key_dim * 4)
            mine = head * value_dim * 4 + column
            with code.loop(0, segments.count) as number:
                with code.when(segments.begins(number)):
                    matrix.begin(place(segments.sources, number), value_dim * 4)
                matrix.move(place(segments.targets, number), value_dim * 4)
                begin, end = segments.rows(number)
                with code.loop(begin, end) as row:
                    source, gate = x + row * x_stride, gates + row * gates_stride + head * 4
                    _normalised(code, source + begin_keys, query, key_dim, scale)
                    _normalised(code, source + keys * 4 + begin_keys, key, key_dim, None)
                    write_gate, kept = (code.splat(code.load(place, FLOAT32)) for place in (gate, gate + padded * 4))
                    values = source + keys * 8 + mine
                    made = matrix.advance(query, key, values, write_gate, kept)
                    for i, value in enumerate(made):
                        code.store(value, y + row * y_stride + mine, i * VECTOR)

    return write


class Matrix:
    """Some columns of a head's matrix, [key_dim, columns] float32, in the page that keeps it or in a room.

    Args:
        code: The kernel.
        key_dim: Rows.
        vectors: Columns in vectors.
    """

    def __init__(self, code: Code, key_dim: int, vectors: int) -> None:
        self._code, self._rows, self._vectors = code, key_dim, vectors
        self._room = code.room(key_dim * vectors * VECTOR)
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
        step = code.select(has_page, stride, code.integer(self._vectors * VECTOR))
        with code.when(base.equals(0)), code.loop(0, self._rows) as row:
            for i in range(self._vectors):
                code.store(code.floats(0.0), place + row * step, i * VECTOR)
        with code.when(base > 0), code.when((base ^ place) > 0), code.loop(0, self._rows) as row:
            for i in range(self._vectors):
                code.store(code.load(base + row * before, FLOATS, i * VECTOR), place + row * step, i * VECTOR)
        self._base.set(place)
        self._stride.set(step)

    def advance(self, query: Value, key: Value, values: Value, write_gate: Value, kept: Value) -> list[Value]:
        """Updates the matrix with a token. Returns the token's result, a vector for each of `vectors`."""
        code, base, stride, zero = self._code, self._base.value, self._stride.value, self._code.floats(0.0)
        found, made = ([code.variable(zero) for _ in range(self._vectors)] for _ in range(2))
        with code.loop(0, self._rows) as row:
            factor = code.splat(code.load(key + row * 4, FLOAT32))
            for i, total in enumerate(found):
                total.set(code.fma(code.load(base + row * stride, FLOATS, i * VECTOR), factor, total.value))
        missed = [
            (code.load(values, FLOATS, i * VECTOR) - kept * total.value) * write_gate for i, total in enumerate(found)
        ]
        with code.loop(0, self._rows) as row:
            factor, asked = (code.splat(code.load(part + row * 4, FLOAT32)) for part in (key, query))
            for i, total in enumerate(made):
                old = code.load(base + row * stride, FLOATS, i * VECTOR) * kept
                new = code.fma(missed[i], factor, old)
                code.store(new, base + row * stride, i * VECTOR)
                total.set(code.fma(new, asked, total.value))
        return [total.value for total in made]


def _normalised(code: Code, source: Value, place: Value, size: int, scale: Value | None) -> None:
    """Divides a vector by its length, multiplies it by `scale`, and stores it."""
    squares = code.floats(0.0)
    parts = [code.load(source, FLOATS, i * VECTOR) for i in range(size // LANES)]
    for part in parts:
        squares = code.fma(part, part, squares)
    factor = code.splat(1.0 / code.root(code.summed(squares) + L2_EPS))
    factor = factor if scale is None else factor * scale
    for i, part in enumerate(parts):
        code.store(part * factor, place, i * VECTOR)


def write_gated_norm(out: Element) -> Writer:
    """Writes the kernel that normalises each head's result and multiplies it by the SiLU of its gates.

    Kernel arguments:
        count: Cell. The number of rows.
        x: [rows, heads x value_dim] float32.
        x_stride: Bytes of a row of x.
        gates: Likewise.
        gates_stride: Bytes of a row of gates.
        weights: [value_dim] float32.
        y: Result.
        y_stride: Bytes of a row of y.
        heads: The number of heads.
        value_dim: Elements of a head.
        eps: Epsilon, a float.
    """

    def write(code: Code) -> None:
        count, x, x_stride, gates, gates_stride, weights, y, y_stride, heads, value_dim = code.arguments(10)
        with shared_rows(code, count) as row, code.loop(0, heads) as head:
            source, gate = (
                place + row * stride + head * value_dim * 4 for place, stride in ((x, x_stride), (gates, gates_stride))
            )
            normed = Normed.of(code, Norm(), source, value_dim, code.real(10), weights, weights)
            with code.loop(0, value_dim, LANES) as i:
                value = normed(FLOAT.load(code, source + i * 4), i)
                value = value * math.silu(code, FLOAT.load(code, gate + i * 4))
                out.store(code, value, y + row * y_stride + (head * value_dim + i) * out.size)

    return write


def write_attention_gates(element: Element) -> Writer:
    """Writes the kernel that multiplies attention's result by the sigmoid of gates, in place.

    Kernel arguments:
        count: Cell. The number of rows.
        gates: [rows, width] float32.
        gates_stride: Bytes of a row of gates.
        y: [rows, width] of the element.
        y_stride: Bytes of a row of y.
        width: Columns.
    """

    def write(code: Code) -> None:
        count, gates, gates_stride, y, y_stride, width = code.arguments(6)
        with shared_rows(code, count) as row, code.loop(0, width, LANES) as i:
            gate = math.sigmoid(code, FLOAT.load(code, gates + row * gates_stride + i * 4))
            place = y + row * y_stride + i * element.size
            element.store(code, gate * element.load(code, place), place)

    return write
