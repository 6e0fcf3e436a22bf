"""Draws from the tokens that top_k and top_p leave, without sorting the vocabulary.

Weights of tokens are integers: e^scaled in float64, times 2^44, rounded down. So their sums do not depend on an order,
and a cutoff that is found by bisection is the one that a sort would find, to the bit.

First each block of a row counts its tokens by bins of weights. The counts bound what can be left: the first bins with
as many tokens as top_k; without top_k, all but the last bins, which together have less than (1 - top_p) of the sum.
Tokens of these bins are listed, hardly more than are left in the end. A program for each draw then bisects its list. A
row with more of them than a list has room for, as one of nearly equal logits, is read again each time.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from model.gpu.draw_columns import COLUMNS, KEY, LEAST, PLACE, ROW, TEMPERATURE, TOP_K, TOP_P, columns_of
from model.gpu.sampler import BLOCK, LAST, block_of, mixed_bits, readable
from model.sampling.sampler import Draws, Ints, on_device
from model.sampling.sampler import draw_from_top as sorted_draw

LISTED = 4096
"""Most tokens of a list."""
AT_ONCE = 2048
"""Tokens that a draw's program looks at together."""
BINS, OF_ONE = tl.constexpr(128), tl.constexpr(4.0)
"""Bins of weights, and those of one e: the last bin has all below e^-31.75 of the largest weight."""
ONE = tl.constexpr(2.0**44)
"""Weight of the largest logit. So many tokens together stay below 2^63."""
MOST_VOCABULARY = 2**19 - 1


@triton.jit
def weigh_blocks(logits, best, controls, totals, bins, stride, vocabulary, BLOCK: tl.constexpr):
    """Sums the weights of blocks, and counts their tokens by bins. Grid: (draws, blocks).

    Args:
        logits: [rows, vocabulary] float32, with this stride of rows.
        best: [rows] float32. Largest logit.
        controls: [draws, COLUMNS] int64, see `model.gpu.draw_columns`.
        totals: [draws, blocks] int64. Sum of weights.
        bins: [draws, blocks, BINS] int32. Tokens of each bin; those that min_p leaves out are in the last one.
        stride: Elements between two rows of `logits`.
        vocabulary: Logits of a row.
        BLOCK: Logits of a block.
    """
    of = controls + tl.program_id(0) * COLUMNS
    row = tl.load(of + ROW)
    x, _, there = block_of(logits, row, stride, vocabulary, BLOCK)
    scaled, weight = _weights(x, tl.load(best + row), of)
    kept = there & (scaled >= tl.load(of + LEAST).to(tl.float64, bitcast=True))
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(totals + at, tl.sum(tl.where(kept, weight, 0), 0))
    counts = tl.histogram(tl.where(kept, _bin(scaled), BINS - 1), BINS)
    tl.store(bins + at * BINS + tl.arange(0, BINS), counts)


@triton.jit
def bound_draws(
    controls, totals, bins, bounds, counts, sums, blocks, PADDED_BLOCKS: tl.constexpr
):  # fmt: skip
    """Finds the last bin that a draw can have tokens of. Grid: (draws,).

    Args:
        controls: See `weigh_blocks`.
        totals: See `weigh_blocks`.
        bins: See `weigh_blocks`.
        bounds: [draws] int32. The last bin.
        counts: [draws] int32. Tokens that are listed: none yet.
        sums: [draws] int64. Sum of all weights.
        blocks: Blocks of a row.
        PADDED_BLOCKS: A power of two not below `blocks`.
    """
    draw = tl.program_id(0)
    of = controls + draw * COLUMNS
    block, number = tl.arange(0, PADDED_BLOCKS), tl.arange(0, BINS)
    total = tl.sum(tl.load(totals + draw * blocks + block, mask=block < blocks, other=0), 0)
    at = bins + (draw * blocks + block)[:, None] * BINS + number[None, :]
    count = tl.sum(tl.load(at, mask=(block < blocks)[:, None], other=0), 0)
    top_k = tl.load(of + TOP_K)
    top_p = tl.load(of + TOP_P).to(tl.float64, bitcast=True)
    last = tl.full((), BINS - 1, tl.int32)
    if top_k > 0:
        # The bin of the k-th token: all bins before it have fewer. top_p needs the sum of all that top_k leaves.
        last = tl.minimum(last, tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32), 0))
    else:
        # No token of a bin is heavier than its upper edge. All bins behind the last one are cut off, for together they
        # have less than is cut off, with room for rounding.
        most = count.to(tl.float64) * tl.exp(-number.to(tl.float64) / OF_ONE) * ONE
        behind = tl.cumsum(most, 0, reverse=True) - most
        cut_off = 0.999 * (1.0 - top_p) * total.to(tl.float64)
        last = tl.minimum(last, tl.sum((behind >= cut_off).to(tl.int32), 0))
    tl.store(bounds + draw, last)
    tl.store(counts + draw, 0)
    tl.store(sums + draw, total)


@triton.jit
def list_tokens(
    logits, best, controls, bounds, counts, listed, stride, vocabulary, BLOCK: tl.constexpr, LISTED: tl.constexpr
):  # fmt: skip
    """Lists the tokens within a draw's bound, in no order. Grid: (draws, blocks).

    Args:
        logits: See `weigh_blocks`.
        best: See `weigh_blocks`.
        controls: See `weigh_blocks`.
        bounds: See `bound_draws`.
        counts: [draws] int32. Receives the number of these tokens, which may be more than LISTED.
        listed: [draws, LISTED] int32. Receives their ids.
        stride: See `weigh_blocks`.
        vocabulary: See `weigh_blocks`.
        BLOCK: See `weigh_blocks`.
        LISTED: Most tokens of a list.
    """
    draw = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _, _, _, kept = _tokens(logits, best, controls + draw * COLUMNS, bounds + draw, ids, ids < vocabulary, stride)
    count = kept.to(tl.int32)
    own = tl.sum(count, 0)
    if own > 0:
        place = tl.atomic_add(counts + draw, own) + tl.cumsum(count, 0) - 1
        tl.store(listed + draw * LISTED + place, ids, mask=kept & (place < LISTED))


@triton.jit
def draw_listed(
    logits, best, controls, bounds, counts, sums, listed, tokens, stride, vocabulary, LISTED: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Cuts off and draws. Grid: (draws,).

    Args:
        logits: See `weigh_blocks`.
        best: See `weigh_blocks`.
        controls: See `weigh_blocks`.
        bounds: See `bound_draws`.
        counts: See `list_tokens`.
        sums: See `bound_draws`.
        listed: See `list_tokens`.
        tokens: int64. Receives drawn tokens, each at its PLACE; 0 where there is none.
        stride: See `weigh_blocks`.
        vocabulary: See `weigh_blocks`.
        LISTED: Most tokens of a list.
        AT_ONCE: Tokens that are looked at together.
    """
    draw = tl.program_id(0)
    of, bound = controls + draw * COLUMNS, bounds + draw
    count = tl.load(counts + draw)
    own = listed + draw * LISTED
    is_listed = count <= LISTED
    size = tl.where(is_listed, count, vocabulary)
    top_k = tl.load(of + TOP_K)
    top_p = tl.load(of + TOP_P).to(tl.float64, bitcast=True)
    total = tl.load(sums + draw)
    highest = _ordered(tl.load(best + tl.load(of + ROW)))
    cut = highest
    for start in range(0, size, AT_ONCE):
        ids, there = _ids(own, start, size, is_listed, AT_ONCE)
        value, _, _, kept = _tokens(logits, best, of, bound, ids, there, stride)
        cut = tl.minimum(cut, tl.min(tl.where(kept, value, highest), 0))
    if top_k > 0:
        # The lowest value that fewer than top_k tokens are above.
        low, high = cut - 1, highest
        while high - low > 1:
            middle = (low + high) >> 1
            above = tl.zeros((), tl.int32)
            for start in range(0, size, AT_ONCE):
                ids, there = _ids(own, start, size, is_listed, AT_ONCE)
                value, _, _, kept = _tokens(logits, best, of, bound, ids, there, stride)
                above += tl.sum((kept & (value > middle)).to(tl.int32), 0)
            high = tl.where(above < top_k, middle, high)
            low = tl.where(above < top_k, low, middle)
        cut = high
        total = tl.zeros((), tl.int64)
        for start in range(0, size, AT_ONCE):
            ids, there = _ids(own, start, size, is_listed, AT_ONCE)
            value, weight, _, kept = _tokens(logits, best, of, bound, ids, there, stride)
            total += tl.sum(tl.where(kept & (value >= cut), weight, 0), 0)
    last = tl.full((), LAST, tl.int64)  # of the tokens that have the lowest value, the last one that is left
    if top_p < 1.0:
        share = top_p * total.to(tl.float64)
        low, high = cut - 1, highest
        while high - low > 1:
            middle = (low + high) >> 1
            above = tl.zeros((), tl.int64)
            for start in range(0, size, AT_ONCE):
                ids, there = _ids(own, start, size, is_listed, AT_ONCE)
                value, weight, _, kept = _tokens(logits, best, of, bound, ids, there, stride)
                above += tl.sum(tl.where(kept & (value > middle), weight, 0), 0)
            within = above.to(tl.float64) < share
            high = tl.where(within, middle, high)
            low = tl.where(within, low, middle)
        cut = high
        above, equal, one = tl.zeros((), tl.int64), tl.zeros((), tl.int32), tl.zeros((), tl.int64)
        for start in range(0, size, AT_ONCE):
            ids, there = _ids(own, start, size, is_listed, AT_ONCE)
            value, weight, _, kept = _tokens(logits, best, of, bound, ids, there, stride)
            above += tl.sum(tl.where(kept & (value > cut), weight, 0), 0)
            equal += tl.sum((kept & (value == cut)).to(tl.int32), 0)
            one = tl.maximum(one, tl.max(tl.where(kept & (value == cut), weight, 0), 0))
        if equal > 1:
            # Lower ids come first among equals.
            low, high = tl.full((), -1, tl.int64), tl.zeros((), tl.int64) + vocabulary
            while high - low > 1:
                middle = (low + high) >> 1
                before = tl.zeros((), tl.int64)
                for start in range(0, size, AT_ONCE):
                    ids, there = _ids(own, start, size, is_listed, AT_ONCE)
                    value, _, _, kept = _tokens(logits, best, of, bound, ids, there, stride)
                    before += tl.sum((kept & (value == cut) & (ids < middle)).to(tl.int64), 0)
                within = (above + one * before).to(tl.float64) < share
                low = tl.where(within, middle, low)
                high = tl.where(within, high, middle)
            last = low
    key = tl.load(of + KEY).to(tl.uint64, bitcast=True)
    most, token = tl.full((), float("-inf"), tl.float64), tl.full((), LAST, tl.int32)
    for start in range(0, size, AT_ONCE):
        ids, there = _ids(own, start, size, is_listed, AT_ONCE)
        value, _, scaled, kept = _tokens(logits, best, of, bound, ids, there, stride)
        kept = kept & ((value > cut) | ((value == cut) & (ids <= last)))
        noisy = tl.where(kept, scaled + _gumbel(mixed_bits(key ^ ids.to(tl.uint64))), float("-inf"))
        top = tl.max(noisy, 0)
        first = tl.min(tl.where(kept & (noisy == top), ids, LAST), 0)
        token = tl.where(top > most, first, tl.where(top == most, tl.minimum(first, token), token))
        most = tl.maximum(top, most)
    tl.store(tokens + tl.load(of + PLACE), tl.where(token == LAST, 0, token).to(tl.int64))


@triton.jit
def _ids(own, start, size, is_listed, AT_ONCE: tl.constexpr):
    """Returns the ids of some tokens, of the list or of the vocabulary, and which of them there are."""
    place = start + tl.arange(0, AT_ONCE)
    there = place < size
    ids = tl.where(is_listed, tl.load(own + place, mask=there & is_listed, other=0), place)
    return ids, there


@triton.jit
def _tokens(logits, best, of, bound, ids, there, stride):
    """Returns tokens' logits as ordered integers, weights, scaled logits, and whether each is within the bound."""
    row = tl.load(of + ROW)
    x = tl.load(logits + row * stride + ids, mask=there, other=float("-inf"))
    scaled, weight = _weights(x, tl.load(best + row), of)
    value = _ordered(x)
    kept = there & (scaled >= tl.load(of + LEAST).to(tl.float64, bitcast=True))
    return value, weight, scaled, kept & (_bin(scaled) <= tl.load(bound))


@triton.jit
def _weights(x, best, of):
    """Returns scaled logits, float64, and weights, int64: 0 for what is no number."""
    temperature = tl.load(of + TEMPERATURE).to(tl.float64, bitcast=True)
    scaled = (x.to(tl.float64) - best.to(tl.float64)) / temperature
    return scaled, tl.where(scaled <= 0.0, tl.exp(scaled) * ONE, 0.0).to(tl.int64)


@triton.jit
def _bin(scaled):
    """Returns the bin of scaled logits."""
    return tl.minimum(-scaled * OF_ONE, BINS - 1.0).to(tl.int32)


@triton.jit
def _ordered(x):
    """Returns float32 numbers as int64 in the same order. 0 and -0 are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _gumbel(bits):
    """`model.sampling.random.gumbel` of mixed bits, uint64, in float64."""
    uniform = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
    return -tl.log(-tl.log(uniform))


def draw_from_top(
    logits: Tensor, draws: Draws, best: Tensor | None = None, into: tuple[Tensor, Ints] | None = None
) -> Tensor:
    """Draws token ids from what top_k and top_p leave.

    Args:
        logits: [rows, vocabulary] float32.
        draws: The draws.
        best: [rows] float32. Largest logits, where they are known.
        into: Tensor that receives the tokens, int64, and where it does, [draws]. None for one of their own.

    Returns:
        The tensor with the tokens.
    """
    logits, n, vocabulary = readable(logits), len(draws.rows), logits.shape[1]
    tokens, places = into or (torch.empty(n, dtype=torch.int64, device=logits.device), np.arange(n))
    if vocabulary > MOST_VOCABULARY:  # sums would not be exact
        return tokens.index_copy_(0, on_device(logits, places), sorted_draw(logits, draws))
    controls = on_device(logits, columns_of(draws, places, vocabulary))
    best, blocks = logits.amax(-1) if best is None else best, triton.cdiv(vocabulary, BLOCK)
    totals, sums = (controls.new_empty(shape) for shape in ((n, blocks), (n,)))
    bins, bounds, counts, listed = (
        torch.empty(shape, dtype=torch.int32, device=logits.device)
        for shape in ((n, blocks, BINS.value), (n,), (n,), (n, LISTED))
    )
    padded, stride = triton.next_power_of_2(blocks), logits.stride(0)
    weigh_blocks[(n, blocks)](logits, best, controls, totals, bins, stride, vocabulary, BLOCK=BLOCK, num_warps=8)
    bound_draws[(n,)](controls, totals, bins, bounds, counts, sums, blocks, PADDED_BLOCKS=padded, num_warps=8)
    list_tokens[(n, blocks)](
        logits, best, controls, bounds, counts, listed, stride, vocabulary, BLOCK=BLOCK, LISTED=LISTED, num_warps=8
    )
    draw_listed[(n,)](
        logits, best, controls, bounds, counts, sums, listed, tokens, stride, vocabulary, LISTED=LISTED,
        AT_ONCE=AT_ONCE, num_warps=8,
    )  # fmt: skip
    return tokens


def scratch_bytes(draws: int, vocabulary: int) -> int:
    """Returns the bytes that so many draws from the top take beside the logits."""
    blocks = triton.cdiv(vocabulary, BLOCK)
    return draws * (8 * (COLUMNS.value + blocks + 1) + 4 * (blocks * BINS.value + LISTED + 2))
