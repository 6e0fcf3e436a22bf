"""Softmax and mixing of attention: weights relative to the largest score, sums of values, joining of partial results.

See `model.cpu.kernels.attention`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.kv import BLOCK, Heads
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.values import FLOAT32, FLOATS, INT32, INT64, INTS, LANES, Value

SUMS = 24  # accumulators that are in registers at once
WHOLE = 8  # vectors of a value that are summed at once; longer ones slice by slice
FEW_ROWS = 6  # rows of a slice
LEAST = -1e30  # below any score, and still far above the score of a hidden key
HIDDEN = -3e38
SLACK = 8.0  # powers of two that a score may be above the number that weights are relative to


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of an attention kernel.

    Attributes:
        heads: Heads and their layout.
        tokens: Most tokens of a piece.
        listed: Whether pieces list their tokens, and have one KV head. If not, they have one token.
        capped: Whether scores have a soft cap.
        sinks: Whether each query head has a sink: a further key whose value is 0.
        sloped: Whether scores have a bias by distance (ALiBi).
        tiled: Whether products are those of matrix registers, see `model.cpu.kernels.attention_tiles`.
    """

    heads: Heads
    tokens: int
    listed: bool
    capped: bool
    sinks: bool = False
    sloped: bool = False
    tiled: bool = False

    @property
    def name(self) -> str:
        h = self.heads
        marks = [word for word in ("listed", "capped", "sinks", "sloped", "tiled") if getattr(self, word)]
        kind = "_".join([str(self.tokens), *marks])
        return f"{h.heads}_{h.kv_heads}_{h.dim}_{h.stored}_{kind}"

    @property
    def shared(self) -> int:
        return self.heads.shared

    @property
    def group(self) -> int:
        """Blocks that are computed together.

        A piece of one token may read keys from memory, which is quickest in their order.
        """
        return 4 if self.listed else 2

    @property
    def rows(self) -> int:
        """Queries of a piece that read the same KV head."""
        return self.tokens * self.shared

    @property
    def together(self) -> int:
        """Rows whose sums are in registers at once."""
        vectors = self.heads.value_dim // LANES
        return largest_divisor(self.rows, SUMS // vectors if vectors <= WHOLE else FEW_ROWS)

    @property
    def slice(self) -> int:
        """Vectors of a value whose sums are in registers at once."""
        return largest_divisor(self.heads.value_dim // LANES, SUMS // self.together)


def largest_divisor(number: int, most: int) -> int:
    """Returns the largest divisor of a number up to `most`."""
    return next(size for size in range(min(most, number), 0, -1) if number % size == 0)


@dataclass(frozen=True, slots=True)
class State:
    """Softmax state of all rows of a piece, KV head by KV head.

    Attributes:
        top: Number that weights are relative to, 16 lanes a row.
        total: Sum of weights, 16 lanes a row.
        mixed: Weighted sum of values, [rows, dim].
    """

    top: Value
    total: Value
    mixed: Value

    @staticmethod
    def of(code: Code, rows: int, dim: int) -> "State":
        return State(code.room(rows * LANES * 4), code.room(rows * LANES * 4), code.room(rows * dim * 4))

    def row(self, number: Value, dim: int) -> "State":
        """Returns the state from this row on."""
        lanes = number * (LANES * 4)
        return State(self.top + lanes, self.total + lanes, self.mixed + number * (dim * 4))


Sees = Callable[[Value, Value], Value]
"""Takes a token's number in the piece and 16 positions of keys, int32. Returns which of them the token sees."""


def softmax(
    code: Code,
    s: Shape,
    sees: Sees,
    block: Value,
    state: State,
    scores: Value,
    weights: Value,
    scales: Value,
) -> None:
    """Turns scores of a block into weights.

    The sums so far are rescaled where a score is far above the number that weights are relative to. `scales` are those
    of 8-bit values, which are multiplied into the weights.
    """
    h = s.heads
    keys = code.lane_numbers() + code.splat(code.narrowed(block * BLOCK, INT32))
    with code.loop(0, s.rows) as row:
        here = state.row(row, h.value_dim)
        score = code.load(scores + row * (LANES * 4), FLOATS)
        seen = sees(row // s.shared, keys)
        score = code.select(seen, score, code.floats(HIDDEN))
        top = code.variable(code.load(here.top, FLOATS))
        with code.when(code.any(score > top.value + SLACK)):
            new = code.maximum(code.splat(code.largest(score)), top.value)
            faded = math.exp2(code, top.value - new)
            code.store(code.load(here.total, FLOATS) * faded, here.total)
            for i in range(0, h.value_dim, LANES):
                code.store(code.load(here.mixed, FLOATS, i * 4) * faded, here.mixed, i * 4)
            code.store(new, here.top)
            top.set(new)
        weight = math.exp2(code, score - top.value)
        code.store(code.load(here.total, FLOATS) + weight, here.total)
        if h.eight_bit:
            weight = code.select(seen, weight * code.load(scales, FLOATS), code.floats(0.0))
        h.element.store(code, weight, weights + row * (LANES * h.element.size))


def far_above(code: Code, s: Shape, state: State, scores: Value) -> Value:
    """Returns whether a score in a group of blocks changes the number that weights are relative to."""
    above = code.variable(code.floats(0.0))
    with code.loop(0, s.rows) as row:
        top = code.load(state.row(row, s.heads.value_dim).top, FLOATS)
        blocks = [code.load(scores + row * (LANES * 4), FLOATS, i * s.rows * LANES * 4) for i in range(s.group)]
        largest = blocks[0]
        for one in blocks[1:]:
            largest = code.maximum(largest, one)
        above.set(code.select(largest > top + SLACK, code.floats(1.0), above.value))
    return code.any(above.value > 0.5)


def softmax_all(code: Code, s: Shape, state: State, scores: Value, weights: Value, scales: list[Value]) -> None:
    """Does `softmax` for a group of blocks.

    Legal only where all keys are seen and no score is far above (`far_above`): then nothing is masked or rescaled.
    """
    h = s.heads
    with code.loop(0, s.rows) as row:
        here = state.row(row, h.value_dim)
        top, total = code.load(here.top, FLOATS), code.load(here.total, FLOATS)
        for i in range(s.group):
            score = code.load(scores + row * (LANES * 4), FLOATS, i * s.rows * LANES * 4)
            weight = math.exp2(code, score - top)
            total = total + weight
            if h.eight_bit:
                weight = weight * code.load(scales[i], FLOATS)
            h.element.store(code, weight, weights + (row + i * s.rows) * (LANES * h.element.size))
        code.store(total, here.total)


def zero_after(code: Code, h: Heads, values: Value, tail: Value, count: Value) -> None:
    """Copies a block's values, with zeros after `count` tokens: unwritten slots may hold anything, even NaN."""
    packed = h.element.packed
    zero = code.like(code.load(values, INTS), 0)
    for row in range(LANES // packed):
        left = count - row * packed
        for i in range(0, h.value_dim, LANES):
            at = (row * h.value_dim + i) * 4
            content = code.load(values, INTS, at)
            if packed == 2:
                content = code.select(code.splat(left > 1), content, content & 0xFFFF)
            code.store(code.select(code.splat(left > 0), content, zero), tail, at)


def mix(code: Code, s: Shape, state: State, values: list[Value], after: list[Value], weights: Value) -> None:
    """Adds values by their weights, block by block."""
    h, together = s.heads, s.together
    count, row_bytes = h.value_dim // LANES, h.value_dim // LANES * h.word_bytes
    with code.loop(0, s.rows, together) as start, code.loop(0, count, s.slice) as first:
        mixed = state.mixed + start * (h.value_dim * 4) + first * (LANES * 4)
        given = weights + start * (LANES * h.element.size)
        places = [[(r * h.value_dim + i * LANES) * 4 for i in range(s.slice)] for r in range(together)]
        sums = [[code.variable(code.load(mixed, FLOATS, place)) for place in row] for row in places]
        begin = first * (LANES * (1 if h.eight_bit else 4))
        for i, (block, next_block) in enumerate(zip(values, after, strict=True)):
            with code.loop(0, LANES // h.element.packed) as token:
                row = block + begin + token * row_bytes
                parts = [h.value_words(code, row, j * LANES) for j in range(s.slice)]
                if not (s.listed or h.latent):
                    for line in range(0, s.slice * h.word_bytes, LANES * 4):
                        code.prefetch(next_block + begin + token * row_bytes, line)
                for r in range(together):
                    weight = h.element.everywhere(code, given + token * 4, (i * s.rows + r) * LANES * h.element.size)
                    for total, part in zip(sums[r], parts, strict=True):
                        total.set(h.element.dot(code, total.value, part, weight))
        for totals, row_places in zip(sums, places, strict=True):
            for total, place in zip(totals, row_places, strict=True):
                code.store(total.value, mixed, place)


def fold(code: Code, s: Shape, new: State, whole: State) -> None:
    """Joins a chunk's state of one row into `whole`. From here on the sum of weights is one number in all lanes."""
    total = code.splat(code.summed(code.load(new.total, FLOATS)))
    join(code, s, code.load(new.top, FLOATS), total, new.mixed, whole)


def join(code: Code, s: Shape, top: Value, total: Value, mixed: Value, whole: State) -> None:
    before = code.load(whole.top, FLOATS)
    highest = code.maximum(before, top)
    old, new = math.exp2(code, before - highest), math.exp2(code, top - highest)
    code.store(highest, whole.top)
    code.store(code.fma(code.load(whole.total, FLOATS), old, total * new), whole.total)
    for i in range(0, s.heads.value_dim, LANES):
        added = code.load(mixed, FLOATS, i * 4) * new
        code.store(code.fma(code.load(whole.mixed, FLOATS, i * 4), old, added), whole.mixed, i * 4)


def divide(code: Code, s: Shape, whole: State, place: Value, sink: Value) -> None:
    """Writes a row's result. `sink` is the address of the head's sink, a score in base 2."""
    total = code.load(whole.total, FLOATS)
    if s.sinks:
        top, score = code.load(whole.top, FLOATS), code.splat(code.load(sink, FLOAT32))
        highest = code.maximum(top, score)
        faded = math.exp2(code, top - highest)
        factor = faded / code.fma(total, faded, math.exp2(code, score - highest))
    else:
        factor = 1.0 / total
    for i in range(0, s.heads.value_dim, LANES):
        s.heads.element.store(code, code.load(whole.mixed, FLOATS, i * 4) * factor, place, i * s.heads.element.size)


def part_bytes(s: Shape) -> int:
    """Returns the bytes of a row's partial result: 16 lanes of its top, 16 of its total, its mixed values."""
    return (2 * LANES + s.heads.value_dim) * 4


def write_join(shape: Shape) -> Writer:
    """Writes the kernel that joins the partial results of tokens whose keys were divided into chunks.

    Kernel arguments:
        divided: Cell. Tokens, int64 [n, 3]: place in the step, first partial result, number of them.
        count: Cell. The number of tokens.
        out: Result, of the element.
        stride: Bytes of a row of `out`.
        partial: Cell. Partial results.
        sinks: Score of each head's sink in base 2, float32. Not read without sinks.
        counters: The two counters of the layer's pieces, which are 0 again for the next layer.
    """
    s, h = shape, shape.heads

    def write(code: Code) -> None:
        divided, count, out, stride, partial, sinks, counters = code.arguments(7)
        with code.when(code.thread < 1):
            for which in range(2):
                code.store(code.integer(0), counters, 8 * which)
        whole = State.of(code, 1, h.value_dim)
        first, last = code.share(code.held(count) * h.heads)
        with code.loop(first, last) as item:
            place, head = code.held(divided) + item // h.heads * 24, item % h.heads
            token, part, parts = (code.load(place, INT64, 8 * i) for i in range(3))
            code.store(code.floats(LEAST), whole.top)
            code.store(code.floats(0.0), whole.total)
            for i in range(0, h.value_dim, LANES):
                code.store(code.floats(0.0), whole.mixed, i * 4)
            with code.loop(part, part + parts) as number:
                here = code.held(partial) + (number * h.heads + head) * part_bytes(s)
                top, total = code.load(here, FLOATS), code.load(here, FLOATS, LANES * 4)
                join(code, s, top, total, here + 2 * LANES * 4, whole)
            divide(code, s, whole, out + token * stride + head * (h.value_dim * h.element.size), sinks + head * 4)

    return write
