"""Attention of new tokens over the pages of their sequences.

A piece of work is a few tokens of one sequence, some of its KV heads and some of its keys. Or it is a token each of
several sequences whose keys lie on the same pages, and a chunk of these.

Keys pass in blocks of 16, all heads of a block before the next one. So a page is read in the order in which it lies in
memory. Each key is read once for all queries that share it. Some blocks go together where all of their keys are seen
and no score is far above the others. That gives the same sums in the same order, with fewer loads and stores.

Softmax is the online form (Milakov and Gimelshein, 2018) in base 2. The number that weights are relative to changes
only when a score is more than 2^8 times above it. That is rare (FlashAttention 4 does likewise).

Invariant: every bit of a result depends on the query's own sequence alone. Results of CHUNK blocks, at fixed places of
the sequence, are joined in their order (Flash-Decoding, 2023), whether one thread computed them all or several.
"""

from dataclasses import dataclass

from model.cpu.kernels import math
from model.cpu.kernels.attention_tiles import AttentionTiles
from model.cpu.kernels.code import Code
from model.cpu.kernels.kv import BLOCK, gather_row
from model.cpu.kernels.latent import put_values
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
from model.cpu.kernels.values import FLOAT32, FLOATS, INT32, INT64, LANES, Value

CHUNK = 32  # blocks

PIECE = (
    "table",  # address of the sequence's page ids, int32
    "token",  # place in the step; if the piece may have several tokens, address of their lists (LISTED)
    "tokens",  # the number of tokens
    "head",  # first KV head
    "heads",  # the number of KV heads
    "block",  # first block of keys
    "blocks",  # the number of blocks
    "partial",  # index of the partial result, -1 if the piece has all keys; with several tokens 0, see LISTED
)
"""Columns of a piece, int64 each."""

LISTED = 2
"""Columns of a piece's list of tokens, int64 each: place in the step, index of the partial result."""


def write_attention(shape: Shape) -> Writer:
    """Writes the kernel that computes pieces.

    Kernel arguments:
        pieces: Cell. Pieces, see PIECE.
        count: Cell. The number of pieces.
        first: Cell. First key that each token sees, int32.
        last: Cell. Key after the last, int32.
        counter: Counter that is 0 at first; threads claim pieces by it.
        queries: Queries, of the element.
        out: Result, of the element.
        stride: Bytes of a row of `out`.
        pool: KV pool of the layer.
        partial: Cell. Partial results, float32.
        page_size: Tokens in a page.
        between: Rows, as the tokens of this layer take, from a page to the next in the pool.
        sinks: See `write_join`.
        slopes: [query heads] float32. Slopes of biases by distance, in base 2. Not read without biases.
        scale: Factor of scores, a float.
        cap: Soft cap of scores, a float.
    """
    s, h = shape, shape.heads
    rows = s.rows if s.listed else h.heads

    def write(code: Code) -> None:
        (
            pieces, count, first, last, counter, queries, out, stride, pool, partial, page_size, between, sinks,
            slopes,
        ) = code.arguments(14)  # fmt: skip
        pieces, count, first, last = map(code.held, (pieces, count, first, last))
        keys = _KeySource(
            pool, page_size, between, slopes, code.splat(code.real(14)), code.splat(code.real(15)),
            code.room(_tile_bytes(s)),
        )  # fmt: skip
        state, whole = State.of(code, rows, h.value_dim), State.of(code, rows, h.value_dim)
        scores = code.room(s.group * s.rows * LANES * 4)
        weights = code.room(s.group * s.rows * LANES * h.element.size)
        tail = code.room(h.value_bytes)
        tiles = AttentionTiles.of(code, h, s.rows, packs=s.listed) if s.tiled else None
        number = code.variable(code.claimed(counter))
        with code.repeat(lambda: number.value < count):
            piece = _Piece(code, s, pieces + number.value * (8 * len(PIECE)), queries, first, last, tiles)
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
                    fold(code, s, state.row(row, h.value_dim), whole.row(row, h.value_dim))
                block.set(stop)
            with code.when(piece.partial < 0):
                _finish(code, s, piece, whole, out, stride, sinks)
            with code.when(piece.partial >= 0):
                _keep(code, s, piece, whole, code.held(partial))
            number.set(code.claimed(counter))
        if tiles is not None:
            tiles.release()

    return write


@dataclass(frozen=True, slots=True)
class _KeySource:
    """Places of keys, and the scaling of scores with them.

    Attributes:
        pool: KV pool of the layer.
        page_size: Tokens in a page.
        between: Rows from a page to the next.
        slopes: Slopes of biases by distance.
        scale: Factor of scores, in all lanes.
        cap: Soft cap of scores, in all lanes.
        tile: Room for a block of one head, where pages hold rows; for values, where these are part of the key.
    """

    pool: Value
    page_size: Value
    between: Value
    slopes: Value
    scale: Value
    cap: Value
    tile: Value


class _Piece:
    """Fields of a piece, and the places of its queries.

    Attributes:
        tiles: Code of its products; None without matrix registers.
    """

    def __init__(
        self, code: Code, s: Shape, place: Value, queries: Value, first: Value, last: Value,
        tiles: AttentionTiles | None,
    ) -> None:  # fmt: skip
        fields = [code.load(place, INT64, 8 * i) for i in range(len(PIECE))]
        self.table, self.token, self.tokens, self.head, self.heads, self.block, blocks, self.partial = fields
        self.end = self.block + blocks
        self.first, self.last = first, last
        self._code, self._queries, self._shape, self.tiles = code, queries, s, tiles
        if tiles is not None and tiles.packed is not None:
            for row in range(s.rows):
                tiles.put_query(row, self.query(row, code.integer(0)))

    def token_of(self, number: Value | int) -> Value:
        """Returns a token's place in the step; past the end, the last token's."""
        return self._code.load(self._listed(number), INT64) if self._shape.listed else self.token

    def partial_of(self, number: Value | int) -> Value:
        """Returns the index of a token's partial result."""
        return self._code.load(self._listed(number), INT64, 8) if self._shape.listed else self.partial

    def _listed(self, number: Value | int) -> Value:
        number = number if isinstance(number, Value) else self._code.integer(number)
        return self.token + self._code.smaller(number, self.tokens - 1) * (8 * LISTED)

    def query(self, row: int, head: Value) -> Value:
        """Returns the address of a row's query; `head` is counted from the piece's first KV head."""
        s = self._shape
        at = self.token_of(row // s.shared) * s.heads.heads + (self.head + head) * s.shared + row % s.shared
        return self._queries + at * (s.heads.dim * s.heads.element.size)

    def all_queries(self, head: Value) -> Value:
        """Returns the address of the queries of all rows, which lie side by side."""
        packed = None if self.tiles is None else self.tiles.packed
        return self.query(0, head) if packed is None else packed

    def first_of(self, token: Value | int) -> Value:
        """Returns the first key that a token sees, in 32 bits."""
        return self._code.load(self.first + self.token_of(token) * 4, INT32)

    def last_of(self, token: Value | int) -> Value:
        """Returns the key after the last that a token sees, in 32 bits."""
        return self._code.load(self.last + self.token_of(token) * 4, INT32)

    def distances(self, token: Value | int, block: Value) -> Value:
        """Returns how far a block's 16 keys are behind a token, 0 or less, float32."""
        first = self._code.narrowed(block * BLOCK, INT32) + 1 - self.last_of(token)
        return self._code.to_float(self._code.lane_numbers() + self._code.splat(first))

    def sees(self, token: Value, keys: Value) -> Value:
        """Returns which of 16 keys, positions of 32 bits, a token sees."""
        return (keys >= self._code.splat(self.first_of(token))) & (keys < self._code.splat(self.last_of(token)))


def _tile_bytes(s: Shape) -> int:
    """Returns the bytes of `_KeySource.tile`."""
    h = s.heads
    if h.rows:
        return h.part_bytes + (h.value_bytes if h.latent else h.part_bytes)
    return s.group * h.value_bytes if h.latent else LANES * 4


def _reset(code: Code, s: Shape, piece: _Piece, state: State) -> None:
    with code.loop(0, piece.heads * s.rows) as row:
        here = state.row(row, s.heads.value_dim)
        code.store(code.floats(LEAST), here.top)
        code.store(code.floats(0.0), here.total)
        for i in range(0, s.heads.value_dim, LANES):
            code.store(code.floats(0.0), here.mixed, i * 4)


def _block(
    code: Code,
    s: Shape,
    piece: _Piece,
    keys: _KeySource,
    block: Value,
    state: State,
    scores: Value,
    weights: Value,
    tail: Value,
) -> None:
    """Computes one block of keys for all heads of the piece."""
    h = s.heads
    if h.rows:
        here = after = keys.tile  # tile of one head
    else:
        here, after = (_place(code, s, piece, keys, b) for b in (block, code.smaller(block + 1, piece.end - 1)))
    if h.latent and h.rows:
        _gather(code, s, piece, keys, block, code.integer(0))
    elif h.latent:
        put_values(code, h, here, keys.tile)
    with code.loop(0, piece.heads) as head:
        part = (piece.head + head) * (0 if h.rows else h.head_bytes)
        if h.rows and not h.latent:
            _gather(code, s, piece, keys, block, head)
        mine = state.row(head * s.rows, h.value_dim)
        values = keys.tile if h.latent and not h.rows else here + part + h.part_bytes
        _scores(code, s, piece, head, keys, block, [here + part], [after + part], scores)
        _weigh(code, s, piece, block, mine, here + part, values, after + part, scores, weights, tail)


def _group(
    code: Code,
    s: Shape,
    piece: _Piece,
    keys: _KeySource,
    block: Value,
    state: State,
    scores: Value,
    weights: Value,
    tail: Value,
) -> None:
    """Computes a group of blocks for all heads of the piece, with the results of `_block` on one after the other."""
    h = s.heads
    here = [_place(code, s, piece, keys, block + i) for i in range(s.group)]
    after = [_place(code, s, piece, keys, code.smaller(block + s.group + i, piece.end - 1)) for i in range(s.group)]
    first, last = (code.widened(bound, INT64) for bound in (piece.first_of(s.tokens - 1), piece.last_of(0)))
    whole = (first <= block * BLOCK) & (last >= (block + s.group) * BLOCK)
    tiles = [keys.tile + i * h.value_bytes for i in range(s.group)]
    if h.latent:
        for place, tile in zip(here, tiles, strict=True):
            put_values(code, h, place, tile)
    with code.loop(0, piece.heads) as head:
        part = (piece.head + head) * h.head_bytes
        mine = state.row(head * s.rows, h.value_dim)
        _scores(code, s, piece, head, keys, block, [x + part for x in here], [x + part for x in after], scores)
        calm = code.variable(code.integer(0))
        with code.when(whole):
            calm.set(code.select(far_above(code, s, mine, scores), code.integer(0), code.integer(1)))
        values, next_values = ([place + part + h.part_bytes for place in places] for places in (here, after))
        values = tiles if h.latent else values
        with code.when(calm.value.equals(1)):
            softmax_all(code, s, mine, scores, weights, [place + part + h.value_scales for place in here])
            _mix(code, s, piece, mine, values, next_values, weights)
        with code.when(calm.value.equals(0)):
            for i in range(s.group):
                score, own, then = scores + i * (s.rows * LANES * 4), here[i] + part, after[i] + part
                _weigh(code, s, piece, block + i, mine, own, values[i], then, score, weights, tail)


def _mix(
    code: Code, s: Shape, piece: "_Piece", state: State, values: list[Value], after: list[Value], weights: Value
) -> None:
    """Adds blocks of values by their weights."""
    if piece.tiles is None:
        mix(code, s, state, values, after, weights)
        return
    piece.tiles.mix(state.mixed, values, [] if s.listed or s.heads.latent else after, weights)


def _place(code: Code, s: Shape, piece: "_Piece", keys: _KeySource, block: Value) -> Value:
    """Returns the address of a block of all heads."""
    return keys.pool + (_row(code, piece, keys, block * BLOCK) >> 4) * s.heads.block_bytes


def _weigh(
    code: Code,
    s: Shape,
    piece: _Piece,
    block: Value,
    state: State,
    here: Value,
    values: Value,
    after: Value,
    scores: Value,
    weights: Value,
    tail: Value,
) -> None:
    """Turns scores with a block of one head into weights, and adds its values by them."""
    h = s.heads
    end = code.widened(piece.last_of(s.tokens - 1), INT64)  # keys past this may not have been written
    finite = code.variable(values)
    softmax(code, s, piece.sees, block, state, scores, weights, here + h.value_scales)
    # 8-bit numbers are always finite, and their scales count only where a query sees the key.
    if not h.eight_bit:
        with code.when((block + 1) * BLOCK > end):
            zero_after(code, h, values, tail, end - block * BLOCK)
            finite.set(tail)
    _mix(code, s, piece, state, [finite.value], [after + h.part_bytes], weights)


def _row(code: Code, piece: "_Piece", keys: _KeySource, position: Value) -> Value:
    """Returns the row of a position in the pool."""
    page = code.widened(code.load(piece.table + position // keys.page_size * 4, INT32), INT64)
    return page * keys.between + position % keys.page_size


def _gather(code: Code, s: Shape, piece: "_Piece", keys: _KeySource, block: Value, head: Value) -> None:
    """Assembles a block of one head in the tile, with zeros for tokens that no query of the piece sees."""
    h = s.heads
    with code.loop(0, _tile_bytes(s), LANES * 4) as offset:
        code.store(code.floats(0.0), keys.tile + offset)
    first = code.widened(piece.first_of(0), INT64)
    last = code.widened(piece.last_of(s.tokens - 1), INT64)
    start = block * BLOCK
    with code.loop(code.larger(start, first), code.smaller(start + BLOCK, last)) as position:
        row = keys.pool + _row(code, piece, keys, position) * h.row_bytes
        row = row + (piece.head + head) * (0 if h.latent else h.row_bytes // h.kv_heads)
        gather_row(code, h, row, keys.tile, position - start)


def _scores(
    code: Code,
    s: Shape,
    piece: _Piece,
    head: Value,
    keys: _KeySource,
    block: Value,
    here: list[Value],
    after: list[Value],
    scores: Value,
) -> None:
    """Computes the scores of all rows with the keys of neighbouring blocks, in base 2."""
    if piece.tiles is None:
        for i, (place, following) in enumerate(zip(here, after, strict=True)):
            _scores_of_block(code, s, piece, head, keys, block + i, place, following, scores + i * (s.rows * LANES * 4))
        return
    piece.tiles.put_scores(piece.all_queries(head), here, [] if s.listed else after, scores)
    for i in range(len(here)):
        with code.loop(0, s.rows) as row:
            place = scores + (row + i * s.rows) * (LANES * 4)
            score = _scaled(code, s, piece, head, keys, block + i, here[i], row, code.load(place, FLOATS))
            code.store(score, place)


def _scores_of_block(
    code: Code,
    s: Shape,
    piece: _Piece,
    head: Value,
    keys: _KeySource,
    block: Value,
    here: Value,
    after: Value,
    scores: Value,
) -> None:
    """Computes the scores of all rows with 16 keys, in base 2, without matrix registers."""
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
            score = _scaled(code, s, piece, head, keys, block, here, row, total.value)
            code.store(score, scores, row * LANES * 4)


def _scaled(
    code: Code,
    s: Shape,
    piece: _Piece,
    head: Value,
    keys: _KeySource,
    block: Value,
    here: Value,
    row: Value | int,
    products: Value,
) -> Value:
    """Returns the scores of a row with a block, in base 2, by its products with the keys."""
    score = products * keys.scale
    if s.heads.eight_bit:
        score = score * code.load(here, FLOATS, s.heads.number_bytes)
    if s.capped:
        score = math.tanh(code, score / keys.cap) * keys.cap
    score = score * math.LOG2E
    if s.sloped:
        column = (piece.head + head) * s.shared + row % s.shared
        slope = code.splat(code.load(keys.slopes + column * 4, FLOAT32))
        score = code.fma(slope, piece.distances(row // s.shared, block), score)
    return score


def _finish(code: Code, s: Shape, piece: _Piece, whole: State, out: Value, stride: Value, sinks: Value) -> None:
    h = s.heads
    with code.loop(0, piece.heads) as head, code.loop(0, piece.tokens * s.shared) as row:
        here = whole.row(head * s.rows + row, h.value_dim)
        column = (piece.head + head) * s.shared + row % s.shared
        place = out + piece.token_of(row // s.shared) * stride + column * (h.value_dim * h.element.size)
        divide(code, s, here, place, sinks + column * 4)


def _keep(code: Code, s: Shape, piece: _Piece, whole: State, partial: Value) -> None:
    h = s.heads
    with code.loop(0, piece.heads) as head, code.loop(0, piece.tokens * s.shared) as row:
        here = whole.row(head * s.rows + row, h.value_dim)
        number = piece.partial_of(row // s.shared) * h.heads + (piece.head + head) * s.shared + row % s.shared
        place = partial + number * part_bytes(s)
        code.store(code.load(here.top, FLOATS), place)
        code.store(code.load(here.total, FLOATS), place, LANES * 4)
        for i in range(0, h.value_dim, LANES):
            code.store(code.load(here.mixed, FLOATS, i * 4), place, (2 * LANES + i) * 4)
