"""Kernels of a gated delta rule (Yang et al., Gated Delta Networks, 2024): gates, recurrence, gated norm.

See `model.cpu.kernels.states` for the states and for what bits depend on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from model.attention.recurrence import L2_EPS
from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.states import VECTOR, Matrix, Segments, StatePages, each_token
from model.cpu.kernels.values import FLOAT32, FLOATS, LANES, Value


def write_gates() -> Writer:
    """Writes the kernel of write gates and decays.

    Kernel arguments:
        count: Cell. The number of rows.
        x: [rows, heads] float32. Write gates before their activation.
        x_stride: Bytes of a row of x.
        forget: [rows, decays] float32. Decays before their activation.
        forget_stride: Bytes of a row of forget.
        rate: Rate of each decay, float32, whole vectors.
        bias: Bias of each decay, likewise.
        y: [rows, padded + decays] float32: write gates, then the parts of a state that are kept.
        y_stride: Bytes of a row of y.
        padded: Heads in whole vectors.
        decays: Decays in whole vectors: one for each head, or for each element of its key.
    """

    def write(code: Code) -> None:
        count, x, x_stride, forget, forget_stride, rate, bias, y, y_stride, padded, decays = code.arguments(11)
        with shared_rows(code, count) as row:
            place = y + row * y_stride
            with code.loop(0, padded, LANES) as i:
                FLOAT.store(code, math.sigmoid(code, FLOAT.load(code, x + row * x_stride + i * 4)), place + i * 4)
            with code.loop(0, decays, LANES) as i:
                raw = FLOAT.load(code, forget + row * forget_stride + i * 4) + FLOAT.load(code, bias + i * 4)
                kept = math.exp(code, -1.0 * FLOAT.load(code, rate + i * 4) * math.softplus(code, raw))
                FLOAT.store(code, kept, place + padded * 4 + i * 4)

    return write


def write_recurrence(key_dim: int, vectors: int, by_element: bool = False) -> Writer:
    """Writes the kernel of the delta rule. Threads share the heads, and the columns of their matrices.

    Args:
        key_dim: Elements of a key, a multiple of 16.
        vectors: Vectors of a value that are computed at once.
        by_element: Whether each element of a key has a decay. If not, a head has one.

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
        pages, blocks = StatePages(pool, page_bytes, which, offsets), value_dim // (vectors * LANES)
        matrix = Matrix(code, key_dim, vectors)
        query, key, faded = (code.room(key_dim * 4) for _ in range(3))
        first, last = code.share(heads * blocks)
        with code.loop(first, last) as item:
            head, column = item // blocks, item % blocks * (vectors * VECTOR)
            begin_keys = head // shared * (key_dim * 4)
            mine = head * value_dim * 4 + column

            def advance(row: Value, head: Value = head, begin_keys: Value = begin_keys, mine: Value = mine) -> None:
                source, gate = x + row * x_stride, gates + row * gates_stride
                _normalised(code, source + begin_keys, query, key_dim, scale)
                _normalised(code, source + keys * 4 + begin_keys, key, key_dim, None)
                write_gate = code.splat(code.load(gate + head * 4, FLOAT32))
                kept = Kept.of(code, gate + padded * 4, head, key_dim if by_element else None)
                kept.multiply(key, faded, key_dim)
                token = Token(query, key, faded, source + keys * 8 + mine, write_gate, kept)
                for i, value in enumerate(_updated(code, matrix, token)):
                    code.store(value, y + row * y_stride + mine, i * VECTOR)

            each_token(code, segments, pages, matrix, head, column, value_dim * 4, advance)

    return write


@dataclass(frozen=True, slots=True)
class Kept:
    """The part of a head's matrix that a token keeps.

    Attributes:
        of_head: The same for all rows, None where each row has its own.
        rows: Address of those of the rows, float32.
    """

    code: Code
    of_head: Value | None
    rows: Value

    @staticmethod
    def of(code: Code, parts: Value, head: Value, rows: int | None) -> "Kept":
        """Reads it from those of all heads. rows: of a head's matrix; None where a head has one for all of them."""
        place = parts + head * (4 if rows is None else rows * 4)
        return Kept(code, code.splat(code.load(place, FLOAT32)) if rows is None else None, place)

    def row(self, number: Value) -> Value:
        """Returns that of a row, as a vector of equal numbers."""
        if self.of_head is not None:
            return self.of_head
        return self.code.splat(self.code.load(self.rows + number * 4, FLOAT32))

    def multiply(self, key: Value, place: Value, size: int) -> None:
        """Stores the product of a key's elements with what their rows keep."""
        for i in range(size // LANES):
            factor = self.code.load(self.rows, FLOATS, i * VECTOR) if self.of_head is None else self.of_head
            self.code.store(self.code.load(key, FLOATS, i * VECTOR) * factor, place, i * VECTOR)


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a head: the query, the key and the value that its matrix is read and updated with.

    Attributes:
        query: Address of the normalised query.
        key: Address of the normalised key.
        faded: Address of the key times what its rows keep.
        values: Address of the columns of its value.
        write: Write gate.
        kept: The part of the matrix that it keeps.
    """

    query: Value
    key: Value
    faded: Value
    values: Value
    write: Value
    kept: Kept


def _updated(code: Code, matrix: Matrix, token: Token) -> list[Value]:
    """Updates the matrix with a token. Returns the token's result, a vector for each of `vectors`."""
    zero = code.floats(0.0)
    found, made = ([code.variable(zero) for _ in range(matrix.vectors)] for _ in range(2))
    with code.loop(0, matrix.rows) as row:
        factor = code.splat(code.load(token.faded + row * 4, FLOAT32))
        for i, total in enumerate(found):
            total.set(code.fma(code.load(matrix.row(row), FLOATS, i * VECTOR), factor, total.value))
    missed = [
        (code.load(token.values, FLOATS, i * VECTOR) - total.value) * token.write for i, total in enumerate(found)
    ]
    with code.loop(0, matrix.rows) as row:
        factor, asked = (code.splat(code.load(part + row * 4, FLOAT32)) for part in (token.key, token.query))
        kept = token.kept.row(row)
        for i, total in enumerate(made):
            old = code.load(matrix.row(row), FLOATS, i * VECTOR) * kept
            new = code.fma(missed[i], factor, old)
            code.store(new, matrix.row(row), i * VECTOR)
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


def write_gated_norm(out: Element, gate_of: Callable[[Code, Value], Value]) -> Writer:
    """Writes the kernel that normalises each head's result and multiplies it by its gates.

    Args:
        out: Element of the result.
        gate_of: Activation of gates.

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
                value = value * gate_of(code, FLOAT.load(code, gate + i * 4))
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
