"""Paged attention of a step in one kernel, prefill and decode alike, and the kernel that joins partial results.

A piece of work is some neighbouring queries of one sequence, and the keys that they see, or those within one chunk. Or
it is queries of several sequences, and a chunk of keys that all of them share (cascade attention: FlashInfer, Ye et
al., 2025). A program takes pieces and a KV head.

The query heads that share the KV head lie side by side in the rows of one tile. These are the "Q blocks" of Anatomy of
a Triton Attention Kernel, arXiv 2511.11581, 2025. So every key is read once for all of them, and a decode still fills
the smallest matrix product. The plan has two numbers for each token, the range of keys that it sees. So causality,
windows and bidirectional prefixes are one comparison here.

Invariant: tiles of keys begin at multiples of TILE_KEYS, chunks at multiples of the plan's chunk, and each chunk has a
partial result of its own. Sums are taken in the order of positions and grouped by chunks. A tile of which a query sees
nothing changes no bit of its sums. Tiles that all queries of a piece see whole have a loop without masks; a query that
sees all of a tile has the same bits in either loop. `model.gpu.tuning` states the consequences.

The number of pieces and their places are read from the plan. So a launch recorded in a CUDA graph computes any plan
that is put in the place of the recorded one.

With latent attention (DeepSeek-V2, 2024) a value is the beginning of its key. A tile of keys is read once then, in two
parts: what is a value too, and the rest, since the sides of a tile are powers of two.

Keys and values are read through pointers with 16-byte asynchronous copies, not by tensor descriptors: a tile may span
pages of any size. Softmax is the online form of Milakov and Gimelshein, 2018, with powers of 2. Partial results are as
in Flash-Decoding, Dao et al., 2023.
"""

import triton
import triton.language as tl

from model.gpu.formats import PLAIN, half_shift, shifted

HEADER = 4
# Columns of the header of a launch's pieces in a plan, int32:
# 0  the number of pieces
# 1  place of the pieces in the plan
# 2  place of the page tables
# 3  place of the lists of tokens
FIELDS = tl.constexpr(8)
# Columns of a piece, int32:
# 0  place of its sequence's line in the page tables
# 1  place of its tokens in the lists of tokens
# 2  the number of tokens
# 3  first key
# 4  key after the last
# 5  index of its chunk, -1 if the piece has all keys that its queries see, so that it has no partial result
# 6, 7  unused
JOIN_FIELDS = tl.constexpr(4)
# Columns of a join, int32:
# 0  token
# 1  its first partial result
# 2  the number of its partial results, 0 for a join that does nothing
# 3  unused
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["header"])
def attend_pieces(
    # The step's tokens, and the pool of a layer
    out,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    # Work
    plan,
    header,
    first_key,
    end_key,
    first_part,
    # Partial results
    partial_out,
    partial_sums,
    sinks,
    # Numbers
    score_scale,
    soft_cap,
    query_stride,
    query_head_stride,
    page_stride,
    scale_stride,
    # Shape of attention and of the pool
    HEADS_PER_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_FORMAT: tl.constexpr,
    # Sizes of a tile
    TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    # Variants
    CAPPED: tl.constexpr,
    DIVIDED: tl.constexpr,
    LOOPED: tl.constexpr,
    # Types that products are taken in
    SCORE_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
):
    """Computes pieces. Grid: (pieces, or any number with LOOPED, KV heads x HEAD_TILES).

    Args:
        out: [tokens, heads, HEAD_DIM], any float dtype.
        queries: [tokens, heads, HEAD_DIM + REST] with these strides, any float dtype.
        keys: Keys of page 0, [KV heads, PAGE_SIZE, HEAD_DIM + REST] in KV_FORMAT.
        values: Its values, [KV heads, PAGE_SIZE, HEAD_DIM] in KV_FORMAT. Not read with REST.
        key_scales: Scales of its keys, [KV heads, PAGE_SIZE] float32. Not read where KV_FORMAT is PLAIN.
        value_scales: Likewise.
        plan: int32. Holds pieces [FIELDS], page tables and lists of tokens.
        header: Place of the pieces' header, [HEADER], in the plan.
        first_key: [tokens] int32. First key that each token sees.
        end_key: [tokens] int32. Key after the last that each token sees.
        first_part: [tokens] int32. Partial result of the token's chunk 0, as if it had one.
        partial_out: [parts, heads, HEAD_DIM] float32. Partial results. Not touched without DIVIDED.
        partial_sums: [parts, heads, 2] float32. Largest score, in powers of 2, and total. Not touched without DIVIDED.
        sinks: [heads] float32. Score of each head's sink, times log2 e; -inf for none.
        score_scale: Factor of scores, times log2 e; where they are CAPPED, over the cap instead.
        soft_cap: Soft cap of scores, times log2 e.
        query_stride: Elements between two tokens of `queries`.
        query_head_stride: Elements between two heads of `queries`.
        page_stride: Elements from a page to the next one.
        scale_stride: Likewise, of scales.
        HEADS_PER_KV: Query heads of a KV head.
        HEAD_DIM: Elements of a value.
        PADDED_DIM: A power of two not below HEAD_DIM.
        REST: Elements of a key after those that are its value (latent attention); 0 where values are kept too.
        PADDED_REST: A power of two not below REST, nor 16.
        PAGE_SIZE: Tokens of a page.
        KV_FORMAT: Format of keys and values, see `model.gpu.formats`.
        TILE_TOKENS: Most tokens of a piece; TILE_TOKENS x TILE_HEADS is at least 16.
        TILE_HEADS: Query heads in a tile, a power of two.
        HEAD_TILES: Tiles that have all query heads of a KV head.
        TILE_KEYS: Keys at a time.
        CAPPED: Whether scores have a soft cap.
        DIVIDED: Whether pieces may have partial results.
        LOOPED: Whether programs share the pieces.
        SCORE_TYPE: Type of the factors of scores.
        VALUE_TYPE: Type of the factors of mixed values.
    """
    count = tl.load(plan + header)
    if LOOPED:
        for number in tl.range(tl.program_id(0), count, tl.num_programs(0)):
            _attend_piece(
                number, out, queries, keys, values, key_scales, value_scales, plan, header, first_key, end_key,
                first_part, partial_out, partial_sums, sinks, score_scale, soft_cap, query_stride,
                query_head_stride, page_stride, scale_stride, HEADS_PER_KV, HEAD_DIM, PADDED_DIM, REST, PADDED_REST,
                PAGE_SIZE, KV_FORMAT, TILE_TOKENS, TILE_HEADS, HEAD_TILES, TILE_KEYS, CAPPED, DIVIDED, SCORE_TYPE,
                VALUE_TYPE,
            )  # fmt: skip
    else:
        _attend_piece(
            tl.program_id(0), out, queries, keys, values, key_scales, value_scales, plan, header, first_key, end_key,
            first_part, partial_out, partial_sums, sinks, score_scale, soft_cap, query_stride, query_head_stride,
            page_stride, scale_stride, HEADS_PER_KV, HEAD_DIM, PADDED_DIM, REST, PADDED_REST, PAGE_SIZE, KV_FORMAT,
            TILE_TOKENS, TILE_HEADS, HEAD_TILES, TILE_KEYS, CAPPED, DIVIDED, SCORE_TYPE, VALUE_TYPE,
        )  # fmt: skip


@triton.jit
def _attend_piece(
    number, out, queries, keys, values, key_scales, value_scales, plan, header, first_key, end_key, first_part,
    partial_out, partial_sums, sinks, score_scale, soft_cap, query_stride, query_head_stride, page_stride, scale_stride,
    HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, REST: tl.constexpr,
    PADDED_REST: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_HEADS: tl.constexpr, HEAD_TILES: tl.constexpr, TILE_KEYS: tl.constexpr, CAPPED: tl.constexpr,
    DIVIDED: tl.constexpr, SCORE_TYPE: tl.constexpr, VALUE_TYPE: tl.constexpr,
):  # fmt: skip
    """Computes the piece of index `number`, see `attend_pieces`."""
    piece = plan + tl.load(plan + header + 1) + number * FIELDS
    table = plan + tl.load(plan + header + 2) + tl.load(piece)
    tokens = plan + tl.load(plan + header + 3) + tl.load(piece + 1)
    begin = tl.load(piece + 3)
    end = tl.load(piece + 4)
    kv_head = tl.program_id(1) // HEAD_TILES
    lane = tl.arange(0, TILE_TOKENS * TILE_HEADS)
    place = lane // TILE_HEADS
    member = tl.program_id(1) % HEAD_TILES * TILE_HEADS + lane % TILE_HEADS
    heads = tl.num_programs(1) // HEAD_TILES * HEADS_PER_KV
    head_of = kv_head * HEADS_PER_KV + member
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < HEAD_DIM
    there = (place < tl.load(piece + 2)) & (member < HEADS_PER_KV)
    token = tl.load(tokens + place, mask=there, other=0)
    see_from = tl.load(first_key + token, mask=there, other=0)
    see_to = tl.load(end_key + token, mask=there, other=0)
    query_at = token.to(tl.int64) * query_stride + head_of * query_head_stride
    query = tl.load(queries + query_at[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    query = query.to(SCORE_TYPE)
    query_rest = query
    if REST:
        rest = tl.arange(0, PADDED_REST)
        in_rest = rest < REST
        rest_at = queries + query_at[:, None] + HEAD_DIM + rest[None, :]
        query_rest = tl.load(rest_at, mask=there[:, None] & in_rest[None, :], other=0.0).to(SCORE_TYPE)
    if KV_FORMAT != PLAIN:
        query = (query * half_shift(KV_FORMAT, SCORE_TYPE)).to(SCORE_TYPE)
        query_rest = (query_rest * half_shift(KV_FORMAT, SCORE_TYPE)).to(SCORE_TYPE)

    top = tl.full((TILE_TOKENS * TILE_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_TOKENS * TILE_HEADS,), tl.float32)
    mixed = tl.zeros((TILE_TOKENS * TILE_HEADS, PADDED_DIM), tl.float32)
    # Wide heads in 8 bits leave no registers for several loops.
    LOOPS: tl.constexpr = 3 if TILE_TOKENS * TILE_HEADS > 16 and (KV_FORMAT == PLAIN or PADDED_DIM <= 128) else 1
    first_tile = begin // TILE_KEYS * TILE_KEYS
    bounds = (first_tile, end, end, end)
    if LOOPS == 3:
        # Tiles that all queries see whole have a loop of their own, without masks.
        seen_from = tl.maximum(begin, tl.max(tl.where(there, see_from, 0), 0))
        seen_to = tl.minimum(end, tl.min(tl.where(there, see_to, end), 0))
        whole_from = tl.minimum(end, tl.cdiv(seen_from, TILE_KEYS) * TILE_KEYS)
        whole_to = tl.maximum(whole_from, seen_to // TILE_KEYS * TILE_KEYS)
        bounds = (first_tile, whole_from, whole_to, end)
    for loop in tl.static_range(LOOPS):
        for base in tl.range(bounds[loop], bounds[loop + 1], TILE_KEYS):
            top, total, mixed = _add_tile(
                top, total, mixed, base, begin, end, table, kv_head, query, query_rest, see_from, see_to, keys, values,
                key_scales, value_scales, score_scale, soft_cap, page_stride, scale_stride, HEAD_DIM, PADDED_DIM, REST,
                PADDED_REST, PAGE_SIZE, KV_FORMAT, TILE_KEYS, CAPPED, SCORE_TYPE, VALUE_TYPE, loop == 1,
            )  # fmt: skip
    if KV_FORMAT != PLAIN:
        mixed *= half_shift(KV_FORMAT, VALUE_TYPE)
    chunk = tl.load(piece + 5)
    token = tl.load(tokens + place, mask=there, other=0)  # loaded again, so that no register holds it during the loop
    if DIVIDED:
        apart = there & (place + chunk >= place)
        part = tl.load(first_part + token, mask=apart, other=0) + chunk
        at = part.to(tl.int64) * heads + head_of
        tl.store(partial_out + at[:, None] * HEAD_DIM + dims[None, :], mixed, mask=apart[:, None] & inside[None, :])
        tl.store(partial_sums + at * 2, top, mask=apart)
        tl.store(partial_sums + at * 2 + 1, total, mask=apart)
        there = there & (place + chunk < place)
    sink = tl.load(sinks + head_of, mask=there, other=float("-inf"))
    highest = tl.maximum(top, sink)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    faded = tl.exp2(top - finite)
    total = total * faded + tl.exp2(sink - finite)
    result = mixed * faded[:, None] / tl.where(total == 0, 1.0, total)[:, None]
    at = token.to(tl.int64) * heads + head_of
    kept = there[:, None] & inside[None, :]
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=kept)


@triton.jit
def _add_tile(
    top, total, mixed, base, begin, end, table, kv_head, query, query_rest, see_from, see_to, keys, values, key_scales,
    value_scales, score_scale, soft_cap, page_stride, scale_stride, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST: tl.constexpr, PADDED_REST: tl.constexpr, PAGE_SIZE: tl.constexpr, KV_FORMAT: tl.constexpr,
    TILE_KEYS: tl.constexpr, CAPPED: tl.constexpr, SCORE_TYPE: tl.constexpr, VALUE_TYPE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Adds the tile of keys that begins at `base` to a piece's sums; WHOLE: all its queries see all of it.

    Both ways compute the same bits where all of a tile is seen.

    Returns:
        Largest score of each row so far, in powers of 2; total of its weights; its weighted values.
    """
    dims = tl.arange(0, PADDED_DIM)
    where = base + tl.arange(0, TILE_KEYS)
    # Keys that no query sees may be another sequence's, or free. NaN times a weight of 0 is NaN: they are not read.
    known = (where >= begin) & (where < end)
    page = _load(table + where // PAGE_SIZE, known, WHOLE).to(tl.int64)
    row = kv_head * PAGE_SIZE + where % PAGE_SIZE  # of a page
    key_at = page * page_stride + row * (HEAD_DIM + REST)
    known_elements = known[:, None] & (dims < HEAD_DIM)[None, :]
    stored = _load(keys + key_at[:, None] + dims[None, :], known_elements, WHOLE and HEAD_DIM == PADDED_DIM)
    scores = tl.dot(query, tl.trans(shifted(stored, KV_FORMAT, SCORE_TYPE, False)), input_precision="ieee")
    if REST:
        rest = tl.arange(0, PADDED_REST)
        spot = key_at[:, None] + HEAD_DIM + rest[None, :]
        key_rest = _load(keys + spot, known[:, None] & (rest < REST)[None, :], WHOLE and REST == PADDED_REST)
        key_rest = shifted(key_rest, KV_FORMAT, SCORE_TYPE, False)
        scores = tl.dot(query_rest, tl.trans(key_rest), scores, input_precision="ieee")
    RAW: tl.constexpr = KV_FORMAT == PLAIN and not CAPPED  # scores are scaled when their largest is known
    if KV_FORMAT != PLAIN:
        key_scale = _load(key_scales + page * scale_stride + row, known, WHOLE)
        scores *= (key_scale * (score_scale * half_shift(KV_FORMAT, SCORE_TYPE)))[None, :]
    elif CAPPED:
        scores *= score_scale
    if CAPPED:
        scores = soft_cap - 2.0 * soft_cap / (1.0 + tl.exp2(scores * (2.0 * LOG2E)))  # soft_cap x tanh
    if not WHOLE:
        seen = (where[None, :] >= see_from[:, None]) & (where[None, :] < see_to[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    largest = tl.max(scores, 1)
    if RAW:
        largest *= score_scale
    new_top = tl.maximum(top, largest)
    finite = new_top
    if not WHOLE:
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key was seen yet: a weight of 0, not NaN
    if RAW:
        weights = tl.exp2(tl.fma(scores, score_scale, -finite[:, None]))
    else:
        weights = tl.exp2(scores - finite[:, None])
    faded = tl.exp2(top - finite)
    total = total * faded + tl.sum(weights, 1)
    if not REST:
        value_at = page * page_stride + row * HEAD_DIM
        spot = values + value_at[:, None] + dims[None, :]
        stored = _load(spot, known_elements, WHOLE and HEAD_DIM == PADDED_DIM)
    value = shifted(stored, KV_FORMAT, VALUE_TYPE, True)
    if KV_FORMAT != PLAIN:
        value_scale = _load(value_scales + page * scale_stride + row, known, WHOLE)
        weights *= (value_scale * half_shift(KV_FORMAT, VALUE_TYPE))[None, :]
    mixed = tl.dot(weights.to(VALUE_TYPE), value, mixed * faded[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def _load(places, known, ALL: tl.constexpr):
    """Loads what is known, and 0 for the rest; ALL: everything is."""
    if ALL:
        return tl.load(places)
    return tl.load(places, mask=known, other=0)


@triton.jit
def join_parts(
    out, partial_out, partial_sums, sinks, joins,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PARTS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Joins partial results. Grid: (joins, heads).

    A part that has seen no key has a largest score of -inf and a total of 0.

    Args:
        out: See `attend_pieces`.
        partial_out: See `attend_pieces`.
        partial_sums: See `attend_pieces`.
        sinks: See `attend_pieces`.
        joins: [joins, JOIN_FIELDS] int32.
        HEAD_DIM: Elements of a value.
        PADDED_DIM: A power of two not below HEAD_DIM.
        PARTS_AT_ONCE: Partial results that are joined at once.
    """
    join = joins + tl.program_id(0) * JOIN_FIELDS
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    token = tl.load(join)
    start = tl.load(join + 1)
    count = tl.load(join + 2)
    if count == 0:
        return
    dims = tl.arange(0, PADDED_DIM)
    inside = dims < HEAD_DIM
    top = tl.load(sinks + head)
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    mixed = tl.zeros((PADDED_DIM,), tl.float32)
    for base in tl.range(0, count, PARTS_AT_ONCE):
        number = base + tl.arange(0, PARTS_AT_ONCE)
        there = number < count
        at = (start + number).to(tl.int64) * heads + head
        tops = tl.load(partial_sums + at * 2, mask=there, other=float("-inf"))
        totals = tl.load(partial_sums + at * 2 + 1, mask=there, other=0.0)
        part = tl.load(
            partial_out + at[:, None] * HEAD_DIM + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        faded = tl.exp2(top - finite)
        weights = tl.exp2(tops - finite)
        total = total * faded + tl.sum(totals * weights, 0)
        mixed = mixed * faded + tl.sum(part * weights[:, None], 0)
        top = new_top
    result = mixed / tl.where(total == 0, 1.0, total)
    at = token.to(tl.int64) * heads + head
    tl.store(out + at * HEAD_DIM + dims, result.to(out.dtype.element_ty), mask=inside)
