"""Kernels of a selective state space (Dao and Gu, Mamba-2, 2024): time steps, scan, gates and norm.

See `model.cpu.kernels.states` for the states and for what bits depend on.
"""

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.rows import Writer, shared_rows
from model.cpu.kernels.states import VECTOR, Matrix, Segments, StatePages, each_token
from model.cpu.kernels.values import FLOAT32, FLOATS, LANES, Value
from model.state_space import GateOrder


def write_steps() -> Writer:
    """Writes the kernel of time steps and decays.

    Kernel arguments:
        count: Cell. The number of rows.
        x: [rows, heads] float32: what the steps are made of.
        x_stride: Bytes of a row of x.
        rate: Rate of the decay of each head, float32, whole vectors.
        bias: Bias of the steps, likewise.
        y: [rows, 2 padded] float32: the steps, then the part of a state that is kept.
        y_stride: Bytes of a row of y.
        padded: Heads in whole vectors.
        factor: Factor of x, a float.
        least: Bound of the steps, a float.
        most: Likewise.
    """

    def write(code: Code) -> None:
        count, x, x_stride, rate, bias, y, y_stride, padded = code.arguments(8)
        factor, least, most = (code.splat(code.real(number)) for number in (8, 9, 10))
        with shared_rows(code, count) as row, code.loop(0, padded, LANES) as i:
            place = y + row * y_stride + i * 4
            raw = FLOAT.load(code, x + row * x_stride + i * 4) * factor + FLOAT.load(code, bias + i * 4)
            steps = math.softplus(code, raw)
            bounded = code.minimum(code.maximum(steps, least), most)
            steps = code.select(steps >= steps, bounded, steps)  # bounds leave NaN out
            FLOAT.store(code, steps, place)
            FLOAT.store(code, math.exp(code, -1.0 * FLOAT.load(code, rate + i * 4) * steps), place + padded * 4)

    return write


def write_scan(state_dim: int, vectors: int) -> Writer:
    """Writes the kernel of the scan. Threads share the heads, and the columns of their matrices.

    Args:
        state_dim: Rows of a head's matrix.
        vectors: Vectors of an input that are computed at once.

    Kernel arguments:
        *CELLS: Cells of the segments.
        x: Inputs, what writes and what reads of all heads, float32.
        x_stride: Bytes of a row of x.
        steps: See `write_steps`.
        steps_stride: Bytes of a row of steps.
        padded: Heads in whole vectors.
        y: Result, [rows, heads x head_dim] float32.
        y_stride: Bytes of a row of y.
        keys: Elements of what writes for all heads.
        heads: The number of heads.
        shared: Heads of a group.
        head_dim: Elements of an input of one head.
        pool: Address of page 0.
        page_bytes: Bytes of a page.
        which: [heads] int64. Which page of a state has the head's matrix.
        offsets: [heads] int64. Bytes from the beginning of that page.
        skip: [heads] float32. Factor of the inputs that are added to the result.
    """

    def write(code: Code) -> None:
        *cells, x, x_stride, steps, steps_stride, padded, y, y_stride, keys, heads, shared = code.arguments(16)
        head_dim, pool, page_bytes, which, offsets, skip = code.arguments(22)[16:]
        segments, pages = Segments.of(code, cells), StatePages(pool, page_bytes, which, offsets)
        blocks, matrix = head_dim // (vectors * LANES), Matrix(code, state_dim, vectors)
        first, last = code.share(heads * blocks)
        with code.loop(first, last) as item:
            head, column = item // blocks, item % blocks * (vectors * VECTOR)
            mine, passed = head * head_dim * 4 + column, code.splat(code.load(skip + head * 4, FLOAT32))
            key = heads * head_dim * 4 + head // shared * (state_dim * 4)

            def advance(
                row: Value, head: Value = head, mine: Value = mine, passed: Value = passed, key: Value = key
            ) -> None:
                source, step = x + row * x_stride, steps + row * steps_stride + head * 4
                size, kept = (code.splat(code.load(place, FLOAT32)) for place in (step, step + padded * 4))
                values = [code.load(source + mine, FLOATS, i * VECTOR) for i in range(vectors)]
                made = _updated(code, matrix, source + key, source + key + keys * 4, [v * size for v in values], kept)
                for i, (value, one) in enumerate(zip(values, made, strict=True)):
                    code.store(code.fma(value, passed, one), y + row * y_stride + mine, i * VECTOR)

            each_token(code, segments, pages, matrix, head, column, head_dim * 4, advance)

    return write


def _updated(code: Code, matrix: Matrix, key: Value, query: Value, written: list[Value], kept: Value) -> list[Value]:
    """Updates the matrix with a token. Returns what is read from it, a vector for each of `vectors`."""
    made = [code.variable(code.floats(0.0)) for _ in range(matrix.vectors)]
    with code.loop(0, matrix.rows) as row:
        factor, asked = (code.splat(code.load(part + row * 4, FLOAT32)) for part in (key, query))
        for i, total in enumerate(made):
            new = code.fma(written[i], factor, code.load(matrix.row(row), FLOATS, i * VECTOR) * kept)
            code.store(new, matrix.row(row), i * VECTOR)
            total.set(code.fma(new, asked, total.value))
    return [total.value for total in made]


def write_mixer_squares(order: GateOrder) -> Writer:
    """Writes the kernel that sums the squares of a rank's part of a group. It puts gates that come first on x.

    Kernel arguments:
        count: Cell. The number of rows.
        x: [rows, width] float32.
        x_stride: Bytes of a row of x.
        gates: Likewise.
        gates_stride: Bytes of a row of gates.
        width: Elements of the rank's part.
        y: Result, [rows, 16] float32: the sum at the group's place, and zeros.
        y_stride: Bytes of a row of y.
        place: Index of the group.
        factor: Factor of gates, a float.
        share: Factor of the sum, a float.
    """

    def write(code: Code) -> None:
        count, x, x_stride, gates, gates_stride, width, y, y_stride, place = code.arguments(9)
        factor, share = code.splat(code.real(9)), code.real(10)
        with shared_rows(code, count) as row:
            to = y + row * y_stride
            FLOAT.store(code, code.floats(0.0), to)
            squares = _squares(code, order, x + row * x_stride, gates + row * gates_stride, width, factor)
            code.store(squares * share, to + place * 4)

    return write


def _squares(code: Code, order: GateOrder, source: Value, gate: Value, width: Value, factor: Value) -> Value:
    """Returns the sum of squares of a row. Gates that come before the norm are put on it first."""
    squares = code.variable(code.floats(0.0))
    with code.loop(0, width, LANES) as i:
        value = FLOAT.load(code, source + i * 4)
        if order is not GateOrder.NORMED_GATED:
            value = value * math.silu(code, FLOAT.load(code, gate + i * 4) * factor)
            FLOAT.store(code, value, source + i * 4)
        squares.set(code.fma(value, value, squares.value))
    return code.summed(squares.value)


def write_mixer_norm(order: GateOrder, out: Element, shared: bool = False) -> Writer:
    """Writes the kernel of `model.state_space.GatedNorm`. It changes x.

    With `shared`, ranks share the group: `write_mixer_squares` is before this kernel, and a sum over the ranks between
    them.

    Kernel arguments:
        count: Cell. The number of rows.
        x: [rows, groups x width] float32.
        x_stride: Bytes of a row of x.
        gates: Likewise.
        gates_stride: Bytes of a row of gates.
        weights: [groups x width] float32.
        y: Result.
        y_stride: Bytes of a row of y.
        groups: Groups of heads, each of which is normalised.
        width: Elements of a group.
        eps: Epsilon, a float.
        factor: Factor of gates, a float.
        means: Mean square of the group in each row, float32; not read unless `shared`.
        means_stride: Bytes from one to the next.
    """

    def write(code: Code) -> None:
        count, x, x_stride, gates, gates_stride, weights, y, y_stride, groups, width = code.arguments(10)
        means, means_stride = code.arguments(14)[12:]
        eps, factor, share = code.real(10), code.splat(code.real(11)), 1.0 / code.to_float(width)
        with shared_rows(code, count) as row, code.loop(0, groups) as group:
            begin = group * width
            source, gate = (
                place + row * stride + begin * 4 for place, stride in ((x, x_stride), (gates, gates_stride))
            )

            if shared:
                mean = code.load(means + row * means_stride, FLOAT32)
            else:
                mean = _squares(code, order, source, gate, width, factor) * share
            scale = code.splat(1.0 / code.root(mean + eps))
            with code.loop(0, width, LANES) as i:
                value = FLOAT.load(code, source + i * 4)
                if order is not GateOrder.GATED:
                    value = value * scale * FLOAT.load(code, weights + (begin + i) * 4)
                if order is GateOrder.NORMED_GATED:
                    value = value * math.silu(code, FLOAT.load(code, gate + i * 4) * factor)
                out.store(code, value, y + row * y_stride + (begin + i) * out.size)

    return write
