"""Attention of new tokens over the pages of their sequences.

A piece of work is a few tokens of one sequence, some of its KV heads, some of its keys. Keys pass in blocks of 16, all
heads of a block before the next one, so that a page is read in the order in which it lies in memory, and each key is
read once for all queries that share it. Some blocks go together where all of their keys are seen and no score is
far above the others: the same sums in the same order, with less to load and store in between.

Softmax is the online form (Milakov and Gimelshein, 2018) in base 2. The number that weights are relative to changes
only when a score is more than 2^8 times above it, which is rare (FlashAttention 4 does likewise); it, and so every bit
of a result, depends on the query's own sequence alone. Results of CHUNK blocks at a time, at fixed places of the
sequence, are put together in their order (Flash-Decoding, 2023), whether one thread has computed them all or several.
"""

from dataclasses import dataclass

from model.kernels import math
from model.kernels.code import Code
from model.kernels.kv import BLOCK, Heads, gather_row
from model.kernels.rows import Writer
from model.kernels.values import FLOATS, INT32, INT64, INTS, LANES, Value

CHUNK = 32  # blocks
SUMS = 24  # accumulators that are in registers at once
LEAST = -1e30  # below any score, and still far above what a hidden key gets
HIDDEN = -3e38
SLACK = 8.0

PIECE = ("table", "token", "tokens", "head", "heads", "block", "blocks", "partial")
"""Of a piece, int64 each: where its page ids stand (int32), its first token in the step, how many, its first KV head,
how many, its first block of keys, how many, and where its part of the result goes: -1 if it has all keys.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """tokens: of a piece, at most. capped: whether scores are."""

    heads: Heads
    tokens: int
    capped: bool

    @property
    def name(self) -> str:
        h = self.heads
        return f"{h.heads}_{h.kv_heads}_{h.dim}_{h.stored}_{self.tokens}{'_capped' if self.capped else ''}"

    @property
    def shared(self) -> int:
        return self.heads.shared

    @property
    def group(self) -> int:
        """Blocks that go together. For one token keys may come from memory, which likes them in their order."""
        return 2 if self.tokens == 1 else 4

    @property
    def rows(self) -> int:
        """Queries of a piece that read the same KV head."""
        return self.tokens * self.shared

    @property
    def together(self) -> int:
        """Rows whose sums are in registers at once."""
        most = max(1, SUMS // (self.heads.dim // LANES))
        return next(size for size in range(min(most, self.rows), 0, -1) if self.rows % size == 0)


@dataclass(frozen=True, slots=True)
class _State:
    """Of all rows of a piece, KV head by KV head: what weights are relative to and their sum, 16 lanes each, and the
    weighted sum of values.
    """

    top: Value
    total: Value
    mixed: Value

    @staticmethod
    def of(code: Code, rows: int, dim: int) -> "_State":
        return _State(code.room(rows * LANES * 4), code.room(rows * LANES * 4), code.room(rows * dim * 4))

    def row(self, number: Value, dim: int) -> "_State":
        """From this row on."""
        lanes = number * (LANES * 4)
        return _State(self.top + lanes, self.total + lanes, self.mixed + number * (dim * 4))


def write_attention(shape: Shape) -> Writer:
    """Arguments: pieces (see PIECE), how many, the first key that each token sees and the one after the last (int32),
    each as the cell that holds it; a counter that is 0, queries (of the element), out (likewise), its stride, KV pool
    of the layer, partial results (float32), tokens in a page, the scale of scores, what they are held within.
    """
    s, h = shape, shape.heads
    rows = h.heads if s.tokens == 1 else s.rows  # a piece of several tokens has one KV head

    def write(code: Code) -> None:
        pieces, count, first, last, counter, queries, out, stride, pool, partial, page_size = code.arguments(11)
        pieces, count, first, last = map(code.held, (pieces, count, first, last))
        keys = _Keys(pool, page_size, code.splat(code.real(11)), code.splat(code.real(12)), code.room(2 * h.part_bytes))
        state, whole = _State.of(code, rows, h.dim), _State.of(code, rows, h.dim)
        scores = code.room(s.group * s.rows * LANES * 4)
        weights = code.room(s.group * s.rows * LANES * h.element.size)
        tail = code.room(h.part_bytes)
        number = code.variable(code.claimed(counter))
        with code.repeat(lambda: number.value < count):
            piece = _Piece(code, s, pieces + number.value * (8 * len(PIECE)), queries, first, last)
            _reset(code, s, piece, whole)
            block = code.variable(piece.block)
            with code.repeat(lambda: block.value < piece.end):
                stop = code.smaller((block.value // CHUNK + 1) * CHUNK, piece.end)
                _reset(code, s, piece, state)
                if not h.rows:
                    with code.repeat(lambda stop=stop: block.value + s.group <= stop):
                        _group(code, s, piece, keys, block.value, state, scores, weights, tail)
                        block.set(block.value + s.group)
                with code.loop(block.value, stop) as b:
                    _block(code, s, piece, keys, b, state, scores, weights, tail)
                with code.loop(0, piece.heads * s.rows) as row:
                    _fold(code, s, state.row(row, h.dim), whole.row(row, h.dim))
                block.set(stop)
            with code.when(piece.partial < 0):
                _finish(code, s, piece, whole, out, stride)
            with code.when(piece.partial >= 0):
                _keep(code, s, piece, whole, partial)
            number.set(code.claimed(counter))

    return write


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where they are, and how scores with them are scaled and held within a cap, in all lanes. tile: room for a block
    of one head.
    """

    pool: Value
    page_size: Value
    scale: Value
    cap: Value
    tile: Value


class _Piece:
    """A piece's fields, and where its queries stand."""

    def __init__(self, code: Code, s: Shape, place: Value, queries: Value, first: Value, last: Value) -> None:
        fields = [code.load(place, INT64, 8 * i) for i in range(len(PIECE))]
        self.table, self.token, self.tokens, self.head, self.heads, self.block, blocks, self.partial = fields
        self.end = self.block + blocks
        self.first, self.last = first, last
        self._code, self._queries, self._shape = code, queries, s

    def token_of(self, number: Value | int) -> Value:
        """In the step; the last one again where there are not so many."""
        number = number if isinstance(number, Value) else self._code.integer(number)
        return self.token + self._code.smaller(number, self.tokens - 1)

    def query(self, row: int, head: Value) -> Value:
        """Where the query of this row is; head: of the pool, from the first of the piece."""
        s = self._shape
        at = self.token_of(row // s.shared) * s.heads.heads + (self.head + head) * s.shared + row % s.shared
        return self._queries + at * (s.heads.dim * s.heads.element.size)

    def first_of(self, token: Value | int) -> Value:
        """The first key that it sees, in 32 bits."""
        return self._code.load(self.first + self.token_of(token) * 4, INT32)

    def last_of(self, token: Value | int) -> Value:
        """The key after the last that it sees, in 32 bits."""
        return self._code.load(self.last + self.token_of(token) * 4, INT32)

    def sees(self, token: Value, keys: Value) -> Value:
        """Which of the keys, 16 positions of 32 bits."""
        return (keys >= self._code.splat(self.first_of(token))) & (keys < self._code.splat(self.last_of(token)))


def _reset(code: Code, s: Shape, piece: _Piece, state: _State) -> None:
    with code.loop(0, piece.heads * s.rows) as row:
        here = state.row(row, s.heads.dim)
        code.store(code.floats(LEAST), here.top)
        code.store(code.floats(0.0), here.total)
        for i in range(0, s.heads.dim, LANES):
            code.store(code.floats(0.0), here.mixed, i * 4)


def _block(
    code: Code,
    s: Shape,
    piece: _Piece,
    keys: _Keys,
    block: Value,
    state: _State,
    scores: Value,
    weights: Value,
    tail: Value,
) -> None:
    """All heads of the piece see one block of keys."""
    h = s.heads
    if h.rows:
        here = after = keys.tile  # of one head
    else:
        here, after = (_place(code, s, piece, keys, b) for b in (block, code.smaller(block + 1, piece.end - 1)))
    with code.loop(0, piece.heads) as head:
        part = (piece.head + head) * (0 if h.rows else 2 * h.part_bytes)
        if h.rows:
            _gather(code, s, piece, keys, block, head)
        mine = state.row(head * s.rows, h.dim)
        _scores(code, s, piece, head, keys, here + part, after + part, scores)
        _weigh(code, s, piece, block, mine, here + part, after + part, scores, weights, tail)


def _group(
    code: Code,
    s: Shape,
    piece: _Piece,
    keys: _Keys,
    block: Value,
    state: _State,
    scores: Value,
    weights: Value,
    tail: Value,
) -> None:
    """All heads of the piece see a group of blocks: what `_block` does for one after the other."""
    h = s.heads
    here = [_place(code, s, piece, keys, block + i) for i in range(s.group)]
    after = [_place(code, s, piece, keys, code.smaller(block + s.group + i, piece.end - 1)) for i in range(s.group)]
    first, last = (code.widened(bound, INT64) for bound in (piece.first_of(s.tokens - 1), piece.last_of(0)))
    whole = (first <= block * BLOCK) & (last >= (block + s.group) * BLOCK)
    with code.loop(0, piece.heads) as head:
        part = (piece.head + head) * (2 * h.part_bytes)
        mine = state.row(head * s.rows, h.dim)
        for i in range(s.group):
            _scores(code, s, piece, head, keys, here[i] + part, after[i] + part, scores + i * (s.rows * LANES * 4))
        calm = code.variable(code.integer(0))
        with code.when(whole):
            calm.set(code.select(_far_above(code, s, mine, scores), code.integer(0), code.integer(1)))
        with code.when(calm.value.equals(1)):
            values, next_values = ([place + part + h.part_bytes for place in places] for places in (here, after))
            _softmax_all(code, s, mine, scores, weights, [value + h.number_bytes for value in values])
            _mix(code, s, mine, values, next_values, weights)
        with code.when(calm.value.equals(0)):
            for i in range(s.group):
                score = scores + i * (s.rows * LANES * 4)
                _weigh(code, s, piece, block + i, mine, here[i] + part, after[i] + part, score, weights, tail)


def _place(code: Code, s: Shape, piece: "_Piece", keys: _Keys, block: Value) -> Value:
    """Where a block of all heads is."""
    return keys.pool + (_slot(code, piece, keys, block * BLOCK) >> 4) * s.heads.block_bytes


def _weigh(
    code: Code,
    s: Shape,
    piece: _Piece,
    block: Value,
    state: _State,
    here: Value,
    after: Value,
    scores: Value,
    weights: Value,
    tail: Value,
) -> None:
    """Adds the values of a block of one head by what the scores say."""
    h = s.heads
    end = code.widened(piece.last_of(s.tokens - 1), INT64)  # keys past this may not have been written
    values = code.variable(here + h.part_bytes)
    _softmax(code, s, piece, block, state, scores, weights, values.value + h.number_bytes)
    if not h.eight_bit:  # whose numbers are finite, and whose scales only count where a query sees them
        with code.when((block + 1) * BLOCK > end):
            _zero_after(code, h, values.value, tail, end - block * BLOCK)
            values.set(tail)
    _mix(code, s, state, [values.value], [after + h.part_bytes], weights)


def _slot(code: Code, piece: "_Piece", keys: _Keys, position: Value) -> Value:
    """Where the token at this position is."""
    page = code.widened(code.load(piece.table + position // keys.page_size * 4, INT32), INT64)
    return page * keys.page_size + position % keys.page_size


def _gather(code: Code, s: Shape, piece: "_Piece", keys: _Keys, block: Value, head: Value) -> None:
    """Puts a block of one head together in the tile; zeros stand for tokens that no query of the piece sees."""
    h = s.heads
    with code.loop(0, 2 * h.part_bytes, LANES * 4) as offset:
        code.store(code.floats(0.0), keys.tile + offset)
    first = code.widened(piece.first_of(0), INT64)
    last = code.widened(piece.last_of(s.tokens - 1), INT64)
    start = block * BLOCK
    with code.loop(code.larger(start, first), code.smaller(start + BLOCK, last)) as position:
        row = keys.pool + _slot(code, piece, keys, position) * h.row_bytes
        row = row + (piece.head + head) * (h.row_bytes // h.kv_heads)
        gather_row(code, h, row, keys.tile, position - start)


def _scores(
    code: Code, s: Shape, piece: _Piece, head: Value, keys: _Keys, here: Value, after: Value, scores: Value
) -> None:
    """Of all rows with 16 keys, in base 2."""
    h = s.heads
    queries = [piece.query(row, head) for row in range(s.rows)]
    zero = code.floats(0.0)
    for start in range(0, s.rows, SUMS):
        rows = range(start, min(start + SUMS, s.rows))
        sums = [code.variable(zero) for _ in rows]
        with code.loop(0, h.dim // h.element.packed) as i:
            key = h.key_words(code, here, i)
            if s.tokens == 1:
                code.prefetch(after + i * h.word_bytes)
            for total, row in zip(sums, rows, strict=True):
                query = h.element.everywhere(code, queries[row] + i * 4)
                total.set(h.element.dot(code, total.value, key, query))
        for total, row in zip(sums, rows, strict=True):
            score = total.value * keys.scale
            if h.eight_bit:
                score = score * code.load(here, FLOATS, h.number_bytes)
            if s.capped:
                score = math.tanh(code, score / keys.cap) * keys.cap
            code.store(score * math.LOG2E, scores, row * LANES * 4)


def _softmax(
    code: Code,
    s: Shape,
    piece: _Piece,
    block: Value,
    state: _State,
    scores: Value,
    weights: Value,
    scales: Value,
) -> None:
    """Scores become weights; what was summed up is scaled where a score is far above what it is relative to. scales: of
    values in 8 bits, which then go with the weights.
    """
    h = s.heads
    keys = code.lane_numbers() + code.splat(code.narrowed(block * BLOCK, INT32))
    with code.loop(0, s.rows) as row:
        here = state.row(row, h.dim)
        score = code.load(scores + row * (LANES * 4), FLOATS)
        seen = piece.sees(row // s.shared, keys)
        score = code.select(seen, score, code.floats(HIDDEN))
        top = code.variable(code.load(here.top, FLOATS))
        with code.when(code.any(score > top.value + SLACK)):
            new = code.maximum(code.splat(code.largest(score)), top.value)
            faded = math.exp2(code, top.value - new)
            code.store(code.load(here.total, FLOATS) * faded, here.total)
            for i in range(0, h.dim, LANES):
                code.store(code.load(here.mixed, FLOATS, i * 4) * faded, here.mixed, i * 4)
            code.store(new, here.top)
            top.set(new)
        weight = math.exp2(code, score - top.value)
        code.store(code.load(here.total, FLOATS) + weight, here.total)
        if h.eight_bit:
            weight = code.select(seen, weight * code.load(scales, FLOATS), code.floats(0.0))
        h.element.store(code, weight, weights + row * (LANES * h.element.size))


def _far_above(code: Code, s: Shape, state: _State, scores: Value) -> Value:
    """Whether a score of a group of blocks changes what weights are relative to."""
    above = code.variable(code.floats(0.0))
    with code.loop(0, s.rows) as row:
        top = code.load(state.row(row, s.heads.dim).top, FLOATS)
        blocks = [code.load(scores + row * (LANES * 4), FLOATS, i * s.rows * LANES * 4) for i in range(s.group)]
        largest = blocks[0]
        for one in blocks[1:]:
            largest = code.maximum(largest, one)
        above.set(code.select(largest > top + SLACK, code.floats(1.0), above.value))
    return code.any(above.value > 0.5)


def _softmax_all(code: Code, s: Shape, state: _State, scores: Value, weights: Value, scales: list[Value]) -> None:
    """`_softmax` of a group of blocks, all of which is seen, and none of which changes what weights are relative to."""
    h = s.heads
    with code.loop(0, s.rows) as row:
        here = state.row(row, h.dim)
        top, total = code.load(here.top, FLOATS), code.load(here.total, FLOATS)
        for i in range(s.group):
            score = code.load(scores + row * (LANES * 4), FLOATS, i * s.rows * LANES * 4)
            weight = math.exp2(code, score - top)
            total = total + weight
            if h.eight_bit:
                weight = weight * code.load(scales[i], FLOATS)
            h.element.store(code, weight, weights + (row + i * s.rows) * (LANES * h.element.size))
        code.store(total, here.total)


def _zero_after(code: Code, h: Heads, values: Value, tail: Value, count: Value) -> None:
    """A copy of a block's values, with zeros after so many tokens, where anything may stand, even NaN."""
    packed = h.element.packed
    zero = code.like(code.load(values, INTS), 0)
    for row in range(LANES // packed):
        left = count - row * packed
        for i in range(0, h.dim, LANES):
            at = (row * h.dim + i) * 4
            content = code.load(values, INTS, at)
            if packed == 2:
                content = code.select(code.splat(left > 1), content, content & 0xFFFF)
            code.store(code.select(code.splat(left > 0), content, zero), tail, at)


def _mix(code: Code, s: Shape, state: _State, values: list[Value], after: list[Value], weights: Value) -> None:
    """Adds values by their weights, block by block."""
    h, together = s.heads, s.together
    vectors = range(0, h.dim, LANES)
    with code.loop(0, s.rows, together) as start:
        mixed, given = state.mixed + start * (h.dim * 4), weights + start * (LANES * h.element.size)
        sums = [
            [code.variable(code.load(mixed, FLOATS, (r * h.dim + i) * 4)) for i in vectors] for r in range(together)
        ]
        row_bytes = h.dim // LANES * h.word_bytes
        for i, (block, next_block) in enumerate(zip(values, after, strict=True)):
            with code.loop(0, LANES // h.element.packed) as token:
                parts = [h.value_words(code, block + token * row_bytes, j) for j in vectors]
                if s.tokens == 1:
                    for line in range(0, row_bytes, LANES * 4):
                        code.prefetch(next_block + token * row_bytes, line)
                for r in range(together):
                    weight = h.element.everywhere(code, given + token * 4, (i * s.rows + r) * LANES * h.element.size)
                    for total, part in zip(sums[r], parts, strict=True):
                        total.set(h.element.dot(code, total.value, part, weight))
        for r in range(together):
            for total, i in zip(sums[r], vectors, strict=True):
                code.store(total.value, mixed, (r * h.dim + i) * 4)


def _fold(code: Code, s: Shape, new: _State, whole: _State) -> None:
    """What a chunk has added for one row. The sum of weights is one number from here on, in all lanes."""
    total = code.splat(code.summed(code.load(new.total, FLOATS)))
    _join(code, s, code.load(new.top, FLOATS), total, new.mixed, whole)


def _join(code: Code, s: Shape, top: Value, total: Value, mixed: Value, whole: _State) -> None:
    before = code.load(whole.top, FLOATS)
    highest = code.maximum(before, top)
    old, new = math.exp2(code, before - highest), math.exp2(code, top - highest)
    code.store(highest, whole.top)
    code.store(code.fma(code.load(whole.total, FLOATS), old, total * new), whole.total)
    for i in range(0, s.heads.dim, LANES):
        added = code.load(mixed, FLOATS, i * 4) * new
        code.store(code.fma(code.load(whole.mixed, FLOATS, i * 4), old, added), whole.mixed, i * 4)


def _finish(code: Code, s: Shape, piece: _Piece, whole: _State, out: Value, stride: Value) -> None:
    h = s.heads
    with code.loop(0, piece.heads) as head, code.loop(0, piece.tokens * s.shared) as row:
        here = whole.row(head * s.rows + row, h.dim)
        column = (piece.head + head) * s.shared + row % s.shared
        place = out + (piece.token + row // s.shared) * stride + column * (h.dim * h.element.size)
        _divide(code, s, here, place)


def _divide(code: Code, s: Shape, whole: _State, place: Value) -> None:
    factor = 1.0 / code.load(whole.total, FLOATS)
    for i in range(0, s.heads.dim, LANES):
        s.heads.element.store(code, code.load(whole.mixed, FLOATS, i * 4) * factor, place, i * s.heads.element.size)


def part_bytes(s: Shape) -> int:
    """Of one row in partial results: 16 lanes of its top and of its total, its mixed values."""
    return (2 * LANES + s.heads.dim) * 4


def _keep(code: Code, s: Shape, piece: _Piece, whole: _State, partial: Value) -> None:
    h = s.heads
    with code.loop(0, piece.heads) as head, code.loop(0, s.shared) as row:
        here = whole.row(head * s.rows + row, h.dim)
        number = piece.partial * h.heads + (piece.head + head) * s.shared + row
        place = partial + number * part_bytes(s)
        code.store(code.load(here.top, FLOATS), place)
        code.store(code.load(here.total, FLOATS), place, LANES * 4)
        for i in range(0, h.dim, LANES):
            code.store(code.load(here.mixed, FLOATS, i * 4), place, (2 * LANES + i) * 4)


def write_join(shape: Shape) -> Writer:
    """Puts together what pieces of one token have each of one chunk. Arguments: tokens whose keys were divided (int64
    [n, 3]: its place in the step, its first part, how many), how many, each as the cell that holds it; out (of the
    element), its stride, partial results.
    """
    s, h = shape, shape.heads

    def write(code: Code) -> None:
        divided, count, out, stride, partial = code.arguments(5)
        whole = _State.of(code, 1, h.dim)
        first, last = code.share(code.held(count) * h.heads)
        with code.loop(first, last) as item:
            place, head = code.held(divided) + item // h.heads * 24, item % h.heads
            token, part, parts = (code.load(place, INT64, 8 * i) for i in range(3))
            code.store(code.floats(LEAST), whole.top)
            code.store(code.floats(0.0), whole.total)
            for i in range(0, h.dim, LANES):
                code.store(code.floats(0.0), whole.mixed, i * 4)
            with code.loop(part, part + parts) as number:
                here = partial + (number * h.heads + head) * part_bytes(s)
                top, total = code.load(here, FLOATS), code.load(here, FLOATS, LANES * 4)
                _join(code, s, top, total, here + 2 * LANES * 4, whole)
            _divide(code, s, whole, out + token * stride + head * (h.dim * h.element.size))

    return write
