"""Kernels of a gated delta rule (Yang et al., Gated Delta Networks, 2024): gates, recurrence, gated norm.

See `model.cpu.kernels.states` for the states and for what bits depend on.
"""

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.states import VECTOR, Matrix, Segments, StatePages, each_token
from model.cpu.kernels.values import FLOAT32, FLOATS, LANES, Value
from model.delta_net import L2_EPS


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
            steps = math.softplus(code, FLOAT.load(code, source + heads * 4) + FLOAT.load(code, bias + i * 4))
            FLOAT.store(code, math.exp(code, -1.0 * FLOAT.load(code, rate + i * 4) * steps), place + padded * 4)

    return write


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
        pages, blocks = StatePages(pool, page_bytes, which, offsets), value_dim // (vectors * LANES)
        matrix = Matrix(code, key_dim, vectors)
        query, key = code.room(key_dim * 4), code.room(key_dim * 4)
        first, last = code.share(heads * blocks)
        with code.loop(first, last) as item:
            head, column = item // blocks, item % blocks * (vectors * VECTOR)
            begin_keys = head // shared * (key_dim * 4)
            mine = head * value_dim * 4 + column

            def advance(row: Value, head: Value = head, begin_keys: Value = begin_keys, mine: Value = mine) -> None:
                source, gate = x + row * x_stride, gates + row * gates_stride + head * 4
                _normalised(code, source + begin_keys, query, key_dim, scale)
                _normalised(code, source + keys * 4 + begin_keys, key, key_dim, None)
                write_gate, kept = (code.splat(code.load(place, FLOAT32)) for place in (gate, gate + padded * 4))
                made = _updated(code, matrix, query, key, source + keys * 8 + mine, write_gate, kept)
                for i, value in enumerate(made):
                    code.store(value, y + row * y_stride + mine, i * VECTOR)

            each_token(code, segments, pages, matrix, head, column, value_dim * 4, advance)

    return write


def _updated(
    code: Code, matrix: Matrix, query: Value, key: Value, values: Value, write_gate: Value, kept: Value
) -> list[Value]:
    """Updates the matrix with a token. Returns the token's result, a vector for each of `vectors`."""
    zero = code.floats(0.0)
    found, made = ([code.variable(zero) for _ in range(matrix.vectors)] for _ in range(2))
    with code.loop(0, matrix.rows) as row:
        factor = code.splat(code.load(key + row * 4, FLOAT32))
        for i, total in enumerate(found):
            total.set(code.fma(code.load(matrix.row(row), FLOATS, i * VECTOR), factor, total.value))
    missed = [
        (code.load(values, FLOATS, i * VECTOR) - kept * total.value) * write_gate for i, total in enumerate(found)
    ]
    with code.loop(0, matrix.rows) as row:
        factor, asked = (code.splat(code.load(part + row * 4, FLOAT32)) for part in (key, query))
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
