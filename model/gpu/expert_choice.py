"""Kernels that choose the experts of tokens, put tokens in order of their experts, and add what experts give.

None of them waits for the host, so that a step with mixtures can be a CUDA graph: how many tokens an expert has is read
by the kernels alone.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def choose_experts(
    chosen, weights, logits, bias, scales, experts, factor, least, EXPERTS: tl.constexpr, USED: tl.constexpr,
    PLACES: tl.constexpr, GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr, BEST: tl.constexpr, BIAS: tl.constexpr,
    SCALES: tl.constexpr, BY_SIGMOID: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """Computes `model.routing.Routing`. Grid: (tokens,). Equal scores go to the lower expert.

    Args:
        chosen: [tokens, USED] int32. Always below `experts`, whatever the logits are.
        weights: [tokens, USED] float32.
        logits: [tokens, experts], any float dtype.
        bias: [experts] float32. Not read without BIAS.
        scales: [experts] float32. Not read without SCALES.
        experts: The number of experts.
        factor: Factor of all weights.
        least: Weights are divided by no smaller sum.
        EXPERTS: A power of two not below `experts`.
        USED: Experts of a token.
        PLACES: A power of two not below USED.
        GROUPS: Groups of experts, 1 without groups.
        GROUPS_USED: Groups of a token.
        BEST: 1 or 2. A group's score is the sum of as many of its highest scores.
        BIAS: Whether there is a bias.
        SCALES: Whether there are scales.
        BY_SIGMOID: Whether scores are sigmoids.
        NORMALISED: Whether weights are divided by their sum.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    there = expert < experts
    line = tl.load(logits + token * experts + expert, mask=there, other=-float("inf")).to(tl.float32)
    if BY_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp2(-line * LOG2E))
    else:
        powers = tl.exp2((line - tl.max(line, 0)) * LOG2E)
        scores = powers / tl.sum(powers, 0)
    ranks = scores
    if BIAS:
        ranks += tl.load(bias + expert, mask=there, other=0.0)
    # No rank is NaN: a maximum of what is left is always some expert's.
    ranks = tl.where(there & (ranks == ranks), ranks, -float("inf"))
    if GROUPS > 1:
        ranks = _of_best_groups(ranks, expert // (experts // GROUPS), GROUPS, GROUPS_USED, BEST)
    place = tl.arange(0, PLACES)
    mine = tl.zeros((PLACES,), tl.float32)
    total = 0.0
    for i in tl.static_range(USED):
        best = tl.argmax(ranks, 0)
        tl.store(chosen + token * USED + i, best.to(tl.int32))
        own = expert == best
        weight = tl.sum(tl.where(own, scores, 0.0), 0)
        ranks = tl.where(own, -float("inf"), ranks)
        total += weight
        if SCALES:
            # After the sum, which the scales are not part of.
            mine = tl.where(place == i, weight * factor * tl.load(scales + best), mine)
        else:
            mine = tl.where(place == i, weight * factor, mine)
    if NORMALISED:
        mine /= tl.maximum(total, least)
    tl.store(weights + token * USED + place, mine, mask=place < USED)


@triton.jit
def _of_best_groups(ranks, group, GROUPS: tl.constexpr, GROUPS_USED: tl.constexpr, BEST: tl.constexpr):
    """Returns ranks [experts] with -inf for those of groups that the token does not use."""
    PADDED: tl.constexpr = triton.next_power_of_2(GROUPS)
    number = tl.arange(0, PADDED)
    totals = tl.full((PADDED,), -float("inf"), tl.float32)
    for i in tl.static_range(GROUPS):
        own = tl.where(group == i, ranks, -float("inf"))
        score = tl.max(own, 0)
        if BEST == 2:
            first = tl.argmax(own, 0)
            score += tl.max(tl.where(tl.arange(0, ranks.shape[0]) == first, -float("inf"), own), 0)
        totals = tl.where(number == i, score, totals)
    used = group < 0
    for _ in tl.static_range(GROUPS_USED):
        best = tl.argmax(totals, 0)
        used |= group == best
        totals = tl.where(number == best, -float("inf"), totals)
    return tl.where(used, ranks, -float("inf"))


@triton.jit(do_not_specialize=["places"])
def count_places(counts, chosen, places, BLOCK: tl.constexpr):
    """Counts the places of each expert. Grid: (experts,).

    Args:
        counts: [experts] int32.
        chosen: [places] int32. Expert of each place.
        places: Places: tokens x experts of a token.
        BLOCK: Places that are read at once.
    """
    expert = tl.program_id(0)
    count = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, places, BLOCK):
        place = start + tl.arange(0, BLOCK)
        count += (tl.load(chosen + place, mask=place < places, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["places", "most"])
def arrange_places(
    order, tiles, counts, chosen, places, most, ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Puts places in order of their experts, and divides those of each expert into tiles. Grid: (experts,).

    Places of one expert keep their order.

    Args:
        order: [places] int32. Place at each index of the order.
        tiles: [most, 3] int32. Expert, index of its first place in the order, and places. No places in those left over.
        counts: [experts] int32. Places of each expert.
        chosen: [places] int32. Expert of each place.
        places: Places.
        most: Tiles that there may be.
        ROWS: Places of a tile.
        EXPERTS: A power of two not below the number of experts.
        BLOCK: Places that are read at once.
    """
    expert = tl.program_id(0)
    experts = tl.num_programs(0)
    each = tl.arange(0, EXPERTS)
    all_counts = tl.load(counts + each, mask=each < experts, other=0)
    all_tiles = (all_counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(each < expert, all_counts, 0), 0)
    tile = tl.sum(tl.where(each < expert, all_tiles, 0), 0)
    count = tl.load(counts + expert)
    for first in range(0, count, ROWS):
        at = tiles + (tile + first // ROWS) * 3
        tl.store(at, expert)
        tl.store(at + 1, start + first)
        tl.store(at + 2, tl.minimum(count - first, ROWS))
    if expert == 0:
        for left in range(tl.sum(all_tiles, 0), most):
            tl.store(tiles + left * 3 + 2, 0)
    found = start
    for begin in range(0, places, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        own = tl.load(chosen + place, mask=place < places, other=-1) == expert
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order + found + rank - 1, place, mask=own)
        found += tl.sum(own.to(tl.int32), 0)


@triton.jit
def add_places(out, parts, width, USED: tl.constexpr, BLOCK: tl.constexpr):
    """Adds what a token's experts give, in float32. Grid: (tokens, width in BLOCKs).

    Args:
        out: [tokens, width].
        parts: [tokens * USED, width]. Weighed already.
        width: Elements of a token.
        USED: Experts of a token.
        BLOCK: Elements of a program.
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(USED):
        total += tl.load(parts + (token * USED + i) * width + at, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=there)
