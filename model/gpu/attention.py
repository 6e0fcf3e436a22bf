"""Paged attention of a step in one kernel, prefill and decode alike, and the kernel that joins partial results.

A piece of work is some neighbouring queries of one sequence, and the keys that they see, or those within one chunk. Or
it is queries of several sequences, and a chunk of keys that all of them share (cascade attention: FlashInfer, Ye et
al., 2025). A program takes pieces and a KV head.

The query heads that share the KV head lie side by side in the rows of one tile. These are the "Q blocks" of Anatomy of
a Triton Attention Kernel, arXiv 2511.11581, 2025. So every key is read once for all of them, and a decode still fills
the smallest matrix product. The plan has two numbers for each token, the range of keys that it sees. So causality,
windows and bidirectional prefixes are one comparison here.

Invariant: tiles of keys begin at multiples of TILE, chunks at multiples of the plan's chunk, and each chunk has a
partial result of its own. Sums are taken in the order of positions and grouped by chunks. A tile of which a query sees
nothing changes no bit of its sums. `model.gpu.tuning` states the consequences.

The number of pieces and their places are read from the plan. So a launch recorded in a CUDA graph computes any plan
that is put in the place of the recorded one.

Keys and values are read through pointers with 16-byte asynchronous copies, not by tensor descriptors: a tile may span
pages of any size. Softmax is the online form of Milakov and Gimelshein, 2018, with powers of 2. Partial results are as
in Flash-Decoding, Dao et al., 2023.
"""

import triton
import triton.language as tl

from model.gpu.formats import PLAIN, decoded

HEAD = 4
# Columns of the head of a launch's pieces in a plan, int32:
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


@triton.jit(do_not_specialize=["slots", "head"])
def attend_pieces(
    out,
    queries,
    keys,
    values,
    key_scales,
    value_scales,
    plan,
    head,
    first,
    last,
    part_from,
    parts,
    sums,
    scale,
    cap,
    query_stride,
    query_head_stride,
    slots,
    GROUP: tl.constexpr,
    ROOM: tl.constexpr,
    SHARES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    FORMAT: tl.constexpr,
    CAPPED: tl.constexpr,
    DIVIDED: tl.constexpr,
    LOOPED: tl.constexpr,
    COMPUTE: tl.constexpr,
    MIX: tl.constexpr,
):
    """Computes pieces. Grid: (pieces, or any number with LOOPED, KV heads x SHARES).

    Args:
        out: [tokens, heads, DIM].
        queries: [tokens, heads, DIM] with these strides.
        keys: [KV heads, slots, DIM] in FORMAT.
        values: Likewise.
        key_scales: [KV heads, slots] float32. Not read where FORMAT is PLAIN.
        value_scales: Likewise.
        plan: int32. Holds pieces [FIELDS], page tables and lists of tokens.
        head: Place of the pieces' HEAD in the plan.
        first: [tokens] int32. First key that each token sees.
        last: [tokens] int32. Key after the last.
        part_from: [tokens] int32. Partial result of the token's chunk 0, as if it had one.
        parts: [parts, heads, DIM] float32. Partial results. Not touched without DIVIDED.
        sums: [parts, heads, 2] float32. Largest score, in powers of 2, and total. Not touched without DIVIDED.
        scale: Factor of scores, times log2 e; where they are CAPPED, over the cap instead.
        cap: Soft cap of scores, times log2 e.
        query_stride: Stride of tokens.
        query_head_stride: Stride of heads.
        slots: Slots of the pool.
        GROUP: Query heads of a KV head.
        ROOM: Query heads in a tile, a power of two.
        SHARES: Programs that have all query heads of a KV head.
        TOKENS: Most tokens of a piece; TOKENS x ROOM is at least 16.
        DIM: Elements of a head.
        WIDE: A power of two not below DIM.
        TILE: Keys at a time.
        PAGE: Tokens of a page.
        FORMAT: Format of keys and values, see `model.gpu.formats`.
        CAPPED: Whether scores have a soft cap.
        DIVIDED: Whether pieces may have partial results.
        LOOPED: Whether programs share the pieces.
        COMPUTE: Type of the factors of scores.
        MIX: Type of the factors of mixed values.
    """
    count = tl.load(plan + head)
    if LOOPED:
        for number in tl.range(tl.program_id(0), count, tl.num_programs(0)):
            _attend_piece(
                out, queries, keys, values, key_scales, value_scales, plan, head, number, first, last, part_from, parts,
                sums, scale, cap, query_stride, query_head_stride, slots, GROUP, ROOM, SHARES, TOKENS, DIM, WIDE, TILE,
                PAGE, FORMAT, CAPPED, DIVIDED, COMPUTE, MIX,
            )  # fmt: skip
    else:
        _attend_piece(
            out, queries, keys, values, key_scales, value_scales, plan, head, tl.program_id(0), first, last, part_from,
            parts, sums, scale, cap, query_stride, query_head_stride, slots, GROUP, ROOM, SHARES, TOKENS, DIM, WIDE,
            TILE, PAGE, FORMAT, CAPPED, DIVIDED, COMPUTE, MIX,
        )  # fmt: skip


@triton.jit
def _attend_piece(
    out, queries, keys, values, key_scales, value_scales, plan, head, number, first, last, part_from, parts, sums,
    scale, cap, query_stride, query_head_stride, slots, GROUP: tl.constexpr, ROOM: tl.constexpr, SHARES: tl.constexpr,
    TOKENS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    FORMAT: tl.constexpr, CAPPED: tl.constexpr, DIVIDED: tl.constexpr, COMPUTE: tl.constexpr, MIX: tl.constexpr,
):  # fmt: skip
    """Computes the piece of index `number`, see `attend_pieces`."""
    piece = plan + tl.load(plan + head + 1) + number * FIELDS
    table = plan + tl.load(plan + head + 2) + tl.load(piece)
    tokens = plan + tl.load(plan + head + 3) + tl.load(piece + 1)
    begin = tl.load(piece + 3)
    end = tl.load(piece + 4)
    kv_head = tl.program_id(1) // SHARES
    lane = tl.arange(0, TOKENS * ROOM)
    place = lane // ROOM
    member = tl.program_id(1) % SHARES * ROOM + lane % ROOM
    heads = tl.num_programs(1) // SHARES * GROUP
    head_of = kv_head * GROUP + member
    head_slots = kv_head.to(tl.int64) * slots
    dims = tl.arange(0, WIDE)
    inside = dims < DIM
    there = (place < tl.load(piece + 2)) & (member < GROUP)
    token = tl.load(tokens + place, mask=there, other=0)
    see_from = tl.load(first + token, mask=there, other=0)
    see_to = tl.load(last + token, mask=there, other=0)
    query_at = token.to(tl.int64) * query_stride + head_of * query_head_stride
    query = tl.load(queries + query_at[:, None] + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
    query = query.to(COMPUTE)

    top = tl.full((TOKENS * ROOM,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * ROOM,), tl.float32)
    mixed = tl.zeros((TOKENS * ROOM, WIDE), tl.float32)
    for base in tl.range(begin // TILE * TILE, end, TILE):
        where = base + tl.arange(0, TILE)
        # Keys that no query sees may be another sequence's, or free. NaN times a weight of 0 is NaN: they are not read.
        known = (where >= begin) & (where < end)
        page = tl.load(table + where // PAGE, mask=known, other=0)
        slot = head_slots + page.to(tl.int64) * PAGE + where % PAGE
        spot = slot[:, None] * DIM + dims[None, :]
        known_elements = known[:, None] & inside[None, :]
        key = decoded(tl.load(keys + spot, mask=known_elements, other=0), FORMAT, COMPUTE)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if FORMAT != PLAIN:
            scores *= tl.load(key_scales + slot, mask=known, other=0.0)[None, :]
        if CAPPED:
            scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores * (2.0 * LOG2E)))  # cap x tanh
        seen = (where[None, :] >= see_from[:, None]) & (where[None, :] < see_to[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # where no key was seen yet: a weight of 0, not NaN
        weights = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(top - finite)
        total = total * faded + tl.sum(weights, 1)
        value = decoded(tl.load(values + spot, mask=known_elements, other=0), FORMAT, MIX)
        if FORMAT != PLAIN:
            weights *= tl.load(value_scales + slot, mask=known, other=0.0)[None, :]
        mixed = tl.dot(weights.to(MIX), value, mixed * faded[:, None], input_precision="ieee")
        top = new_top

    chunk = tl.load(piece + 5)
    token = tl.load(tokens + place, mask=there, other=0)  # loaded again, so that no register holds it during the loop
    if DIVIDED:
        apart = there & (place + chunk >= place)
        part = tl.load(part_from + token, mask=apart, other=0) + chunk
        at = part.to(tl.int64) * heads + head_of
        tl.store(parts + at[:, None] * DIM + dims[None, :], mixed, mask=apart[:, None] & inside[None, :])
        tl.store(sums + at * 2, top, mask=apart)
        tl.store(sums + at * 2 + 1, total, mask=apart)
        there = there & (place + chunk < place)
    result = mixed / tl.where(total == 0, 1.0, total)[:, None]
    at = token.to(tl.int64) * heads + head_of
    kept = there[:, None] & inside[None, :]
    tl.store(out + at[:, None] * DIM + dims[None, :], result.to(out.dtype.element_ty), mask=kept)


@triton.jit
def join_parts(out, parts, sums, joins, DIM: tl.constexpr, WIDE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Joins partial results. Grid: (joins, heads).

    A part that has seen no key has a largest score of -inf and a total of 0.

    Args:
        out: See `attend_pieces`.
        parts: See `attend_pieces`.
        sums: See `attend_pieces`.
        joins: [joins, JOIN_FIELDS] int32.
        DIM: Elements of a head.
        WIDE: A power of two not below DIM.
        AT_ONCE: Partial results that are joined at once.
    """
    join = joins + tl.program_id(0) * JOIN_FIELDS
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    token = tl.load(join)
    start = tl.load(join + 1)
    count = tl.load(join + 2)
    if count == 0:
        return
    dims = tl.arange(0, WIDE)
    inside = dims < DIM
    top = float("-inf")
    total = 0.0
    mixed = tl.zeros((WIDE,), tl.float32)
    for base in tl.range(0, count, AT_ONCE):
        number = base + tl.arange(0, AT_ONCE)
        there = number < count
        at = (start + number).to(tl.int64) * heads + head
        tops = tl.load(sums + at * 2, mask=there, other=float("-inf"))
        totals = tl.load(sums + at * 2 + 1, mask=there, other=0.0)
        part = tl.load(parts + at[:, None] * DIM + dims[None, :], mask=there[:, None] & inside[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        faded = tl.exp2(top - finite)
        weights = tl.exp2(tops - finite)
        total = total * faded + tl.sum(totals * weights, 0)
        mixed = mixed * faded + tl.sum(part * weights[:, None], 0)
        top = new_top
    result = mixed / tl.where(total == 0, 1.0, total)
    at = token.to(tl.int64) * heads + head
    tl.store(out + at * DIM + dims, result.to(out.dtype.element_ty), mask=inside)
