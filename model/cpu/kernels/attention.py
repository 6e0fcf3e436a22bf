"""Attention of new tokens over the pages of their sequences.

A piece of work is a few tokens of one sequence, some of its KV heads, some of its keys; or a token each of sequences
whose keys lie on the same pages, and a chunk of these. Keys pass in blocks of 16, all
heads of a block before the next one, so that a page is read in the order in which it lies in memory, and each key is
read once for all queries that share it. Some blocks go together where all of their keys are seen and no score is
far above the others: the same sums in the same order, with less to load and store in between.

Softmax is the online form (Milakov and Gimelshein, 2018) in base 2. The number that weights are relative to changes
only when a score is more than 2^8 times above it, which is rare (FlashAttention 4 does likewise); it, and so every bit
of a result, depends on the query's own sequence alone. Results of CHUNK blocks at a time, at fixed places of the
sequence, are put together in their order (Flash-Decoding, 2023), whether one thread has computed them all or several.
"""

from dataclasses import dataclass

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.kv import BLOCK, gather_row
from model.cpu.kernels.mixing import (
    LEAST,
    SUMS,
    Shape,
    State,
    divide,
    far_above,
    fold,
    mix,
    part_bytes,
    softmax,
    softmax_all,
    zero_after,
)  # fmt: skip
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.values import FLOATS, INT32, INT64, LANES, Value

CHUNK = 32  # blocks

PIECE = ("table", "token", "tokens", "head", "heads", "block", "blocks", "partial")
"""Of a piece, int64 each: where its page ids stand (int32), its token in the step, or, where it may have several, where
LISTED of each stand; how many; its first KV head, how many, its first block of keys, how many, and where its part of
the result goes: -1 if it has all keys, and where it has several tokens, 0 if it has not.
"""
LISTED = 2
"""Of one of several tokens, int64 each: its place in the step, and where its part of the result goes."""


def write_attention(shape: Shape) -> Writer:
    """Arguments: pieces (see PIECE), how many, the first key that each token sees and the one after the last (int32),
    each as the cell that holds it; a counter that is 0, queries (of the element), out (likewise), its stride, KV pool
    of the layer, partial results (float32, as the cell that holds it), tokens in a page, the scale
    of scores, what they are held within.
    """
    s, h = shape, shape.heads
    rows = s.rows if s.listed else h.heads

    def write(code: Code) -> None:
        pieces, count, first, last, counter, queries, out, stride, pool, partial, page_size = code.arguments(11)
        pieces, count, first, last = map(code.held, (pieces, count, first, last))
        keys = _Keys(pool, page_size, code.splat(code.real(11)), code.splat(code.real(12)), code.room(2 * h.part_bytes))
        state, whole = State.of(code, rows, h.dim), State.of(code, rows, h.dim)
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
                first_block = alone = block.value
                if not h.rows:
                    alone = first_block + (stop - first_block) // s.group * s.group
                    with code.loop(first_block, alone, s.group) as b:
                        _group(code, s, piece, keys, b, state, scores, weights, tail)
                with code.loop(alone, stop) as b:
                    _block(code, s, piece, keys, b, state, scores, weights, tail)
                with code.loop(0, piece.heads * s.rows) as row:
                    fold(code, s, state.row(row, h.dim), whole.row(row, h.dim))
                block.set(stop)
            with code.when(piece.partial < 0):
                _finish(code, s, piece, whole, out, stride)
            with code.when(piece.partial >= 0):
                _keep(code, s, piece, whole, code.held(partial))
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
        return self._code.load(self._listed(number), INT64) if self._shape.listed else self.token

    def partial_of(self, number: Value | int) -> Value:
        """Where this token's part of the result goes."""
        return self._code.load(self._listed(number), INT64, 8) if self._shape.listed else self.partial

    def _listed(self, number: Value | int) -> Value:
        number = number if isinstance(number, Value) else self._code.integer(number)
        return self.token + self._code.smaller(number, self.tokens - 1) * (8 * LISTED)

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


def _reset(code: Code, s: Shape, piece: _Piece, state: State) -> None:
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
    state: State,
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
    state: State,
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
            calm.set(code.select(far_above(code, s, mine, scores), code.integer(0), code.integer(1)))
        with code.when(calm.value.equals(1)):
            values, next_values = ([place + part + h.part_bytes for place in places] for places in (here, after))
            softmax_all(code, s, mine, scores, weights, [value + h.number_bytes for value in values])
            mix(code, s, mine, values, next_values, weights)
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
    state: State,
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
    softmax(code, s, piece.sees, block, state, scores, weights, values.value + h.number_bytes)
    if not h.eight_bit:  # whose numbers are finite, and whose scales only count where a query sees them
        with code.when((block + 1) * BLOCK > end):
            zero_after(code, h, values.value, tail, end - block * BLOCK)
            values.set(tail)
    mix(code, s, state, [values.value], [after + h.part_bytes], weights)


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
            if not s.listed:
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


def _finish(code: Code, s: Shape, piece: _Piece, whole: State, out: Value, stride: Value) -> None:
    h = s.heads
    with code.loop(0, piece.heads) as head, code.loop(0, piece.tokens * s.shared) as row:
        here = whole.row(head * s.rows + row, h.dim)
        column = (piece.head + head) * s.shared + row % s.shared
        place = out + piece.token_of(row // s.shared) * stride + column * (h.dim * h.element.size)
        divide(code, s, here, place)


def _keep(code: Code, s: Shape, piece: _Piece, whole: State, partial: Value) -> None:
    h = s.heads
    with code.loop(0, piece.heads) as head, code.loop(0, piece.tokens * s.shared) as row:
        here = whole.row(head * s.rows + row, h.dim)
        number = piece.partial_of(row // s.shared) * h.heads + (piece.head + head) * s.shared + row % s.shared
        place = partial + number * part_bytes(s)
        code.store(code.load(here.top, FLOATS), place)
        code.store(code.load(here.total, FLOATS), place, LANES * 4)
        for i in range(0, h.dim, LANES):
            code.store(code.load(here.mixed, FLOATS, i * 4), place, (2 * LANES + i) * 4)
