"""Paged attention of a step in one kernel, prefill and decode alike, and the kernel that joins what it divides.

A piece of work is some neighbouring queries of one sequence and the keys that they see, or those within one chunk, or
queries of several sequences and a chunk of keys that all of them share (cascade attention: FlashInfer, Ye et al.,
2025); a program takes pieces and a KV head. The query heads that share the KV head lie in the rows of one tile beside
each other (the "Q blocks" of Anatomy of a Triton Attention Kernel, arXiv 2511.11581, 2025), so that every key is read
once for all of them and a decode still fills the smallest matrix product. Which keys a query sees, the plan says in two
numbers for each token; so causality, windows and tokens that see each other both ways are one comparison here.

Tiles of keys begin at multiples of TILE, chunks at multiples of the plan's chunk, and each chunk's result is a part of
its own: sums are taken in the order of positions and grouped by them. A tile of which a query sees nothing changes no
bit of its sums. See `model.gpu.tuning` for what follows.

How many pieces there are, and where they lie, is read from the plan, so that a launch recorded in a CUDA graph computes
any plan that is put in the place of the one that it was recorded with.

Keys and values are read through pointers with 16-byte asynchronous copies, not by tensor descriptors: a tile may span
pages of any size. Softmax is the online form of Milakov and Gimelshein, 2018, with powers of 2; parts as in
Flash-Decoding, Dao et al., 2023.
"""

import triton
import triton.language as tl

from model.gpu.formats import PLAIN, decoded

HEAD = 4
"""What begins a kind of pieces in a plan, int32: how many there are, where they lie in it, where the page tables lie,
where the lists of tokens lie.
"""
FIELDS = tl.constexpr(8)
"""Of a piece, int32: where its sequence's line of the page table begins, where its tokens begin in the lists, tokens,
first key, key after the last, number of its chunk (-1: the piece has all that its queries see, there are no parts),
nothing, nothing.
"""
JOIN_FIELDS = tl.constexpr(4)
"""Of what is joined, int32: token, its first part, how many it has (0: nothing is to be done), nothing."""
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
    """Grid: (pieces, or any number where LOOPED, KV heads x SHARES).

    out: [tokens, heads, DIM]. queries: the same with these strides. keys, values: [KV heads, slots, DIM] in FORMAT;
    their scales: float32 [KV heads, slots], not looked at where FORMAT is PLAIN. plan: int32, with pieces [FIELDS],
    page tables and lists of tokens in it; head: where the HEAD of these pieces is. first, last: int32 [tokens], the
    keys that a token sees: the first, and the one after the last. part_from: int32 [tokens], the part of chunk 0, were
    there one. parts: float32 [parts, heads, DIM], sums: float32 [parts, heads, 2] of the largest score, in powers of 2,
    and the total; not touched where DIVIDED is false. scale: of the scores; times log2 e, or, where they are CAPPED,
    over the cap. cap: times log2 e.

    GROUP: query heads to a KV head, ROOM: of these in a tile, a power of two, SHARES: programs that have all of them.
    TOKENS: of a piece at most; TOKENS x ROOM is 16 at least. WIDE: a power of two not below DIM. COMPUTE: what scores
    are products of; MIX: and mixed values.
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
    """Number `number` of the pieces, see `attend_pieces`."""
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
        # What no query sees may be another's, or nobody's: NaN times a weight of 0 is NaN, so it is not read.
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
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)  # so that nothing seen yet is 0, not NaN
        weights = tl.exp2(scores - finite[:, None])
        faded = tl.exp2(top - finite)
        total = total * faded + tl.sum(weights, 1)
        value = decoded(tl.load(values + spot, mask=known_elements, other=0), FORMAT, MIX)
        if FORMAT != PLAIN:
            weights *= tl.load(value_scales + slot, mask=known, other=0.0)[None, :]
        mixed = tl.dot(weights.to(MIX), value, mixed * faded[:, None], input_precision="ieee")
        top = new_top

    chunk = tl.load(piece + 5)
    token = tl.load(tokens + place, mask=there, other=0)  # again, so that no register holds it for all that time
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
    """Grid: (joins, heads). joins: int32 [joins, JOIN_FIELDS]. Others as in `attend_pieces`. Where a part has seen
    nothing, its largest score is -inf and its total 0.
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
