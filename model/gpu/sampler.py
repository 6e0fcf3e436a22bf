"""Kernels over whole rows of logits: the largest, the sum that probabilities are divided by, a draw, results.

Rows are read in blocks, each by a program of its own. Results of blocks are joined from the first block on, so they do
not depend on what else is in the batch.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from model.sampling import random
from model.sampling.sampler import Draws, on_device

BLOCK = 4096
GOLDEN = tl.constexpr(random.GOLDEN)
SHIFT_1, FACTOR_1 = (tl.constexpr(number) for number in random.MIXERS[0])
SHIFT_2, FACTOR_2 = (tl.constexpr(number) for number in random.MIXERS[1])
LAST = tl.constexpr(2**31 - 1)
"""No token id is larger."""
ALL_ONES = tl.constexpr(2**64 - 1)


@triton.jit
def summarise_blocks(logits, tops, tokens, totals, stride, vocabulary, BLOCK: tl.constexpr):
    """Finds each block's largest logit and its sum. Grid: (rows, blocks).

    Args:
        logits: [rows, vocabulary] float32, with this stride of rows.
        tops: [rows, blocks] float32. Largest logit.
        tokens: [rows, blocks] int32. First token that has the largest logit.
        totals: [rows, blocks] float32. Sum of e^(logit - largest), NaN where a logit is.
        stride: Elements between two rows of `logits`.
        vocabulary: Logits of a row.
        BLOCK: Logits of a block, a power of two.
    """
    x, ids, there = block_of(logits, tl.program_id(0), stride, vocabulary, BLOCK)
    top = tl.max(x, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + at, top)
    tl.store(tokens + at, tl.min(tl.where(there & (x == top), ids, LAST), 0))
    # A sum keeps NaN, a maximum leaves it out.
    tl.store(totals + at, tl.sum(tl.exp(x - finite), 0))


@triton.jit
def join_summaries(tops, tokens, totals, best, token, normal, blocks, PADDED_BLOCKS: tl.constexpr):
    """Joins the blocks of a row. Grid: (rows,).

    Args:
        tops: See `summarise_blocks`.
        tokens: See `summarise_blocks`.
        totals: See `summarise_blocks`.
        best: [rows] float32. See `model.sampling.sampler.Summary`.
        token: [rows] int64. Likewise.
        normal: [rows] float32. Likewise.
        blocks: Blocks of a row.
        PADDED_BLOCKS: A power of two not below `blocks`.
    """
    row = tl.program_id(0)
    number = tl.arange(0, PADDED_BLOCKS)
    there = number < blocks
    each = tl.load(tops + row * blocks + number, mask=there, other=float("-inf"))
    total = tl.load(totals + row * blocks + number, mask=there, other=0.0)
    first = tl.load(tokens + row * blocks + number, mask=there, other=LAST)
    top = tl.max(each, 0)
    finite = tl.where(top == float("-inf"), 0.0, top)
    tl.store(best + row, top)
    least = tl.min(tl.where(each == top, first, LAST), 0)
    tl.store(token + row, tl.where(least == LAST, 0, least).to(tl.int64))  # of NaN alone, none is the largest
    tl.store(normal + row, top + tl.log(tl.sum(total * tl.exp(each - finite), 0)))


@triton.jit
def draw_blocks(
    logits, rows, best, keys, temperatures, least, tops, tokens, stride, vocabulary, BLOCK: tl.constexpr
):  # fmt: skip
    """Draws within each block. Grid: (draws, blocks).

    Args:
        logits: See `summarise_blocks`.
        rows: [draws] int64. Row of the logits.
        best: [draws] float32. Largest logit of the row.
        keys: [draws] int64. Keys of the noise, see `model.sampling.random.gumbel`.
        temperatures: [draws] float32, above 0.
        least: [draws] float32. Log of min_p.
        tops: [draws, blocks] float32. Largest of scaled logits with noise.
        tokens: [draws, blocks] int32. First token that has it.
        stride: See `summarise_blocks`.
        vocabulary: See `summarise_blocks`.
        BLOCK: See `summarise_blocks`.
    """
    draw = tl.program_id(0)
    x, ids, _ = block_of(logits, tl.load(rows + draw), stride, vocabulary, BLOCK)
    scaled = tl.math.div_rn(x - tl.load(best + draw), tl.zeros_like(x) + tl.load(temperatures + draw))
    key = tl.load(keys + draw).to(tl.uint64, bitcast=True)
    noisy = scaled + gumbel(mixed_bits(key ^ ids.to(tl.uint64)))
    noisy = tl.where(scaled >= tl.load(least + draw), noisy, float("-inf"))
    top = tl.max(noisy, 0)
    at = draw * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + at, top)
    tl.store(tokens + at, tl.min(tl.where(noisy == top, ids, LAST), 0))


@triton.jit
def join_draws(tops, tokens, token, blocks, PADDED_BLOCKS: tl.constexpr):
    """Joins the blocks of a draw. Grid: (draws,).

    Args:
        tops: See `draw_blocks`.
        tokens: See `draw_blocks`.
        token: [draws] int64. Drawn token.
        blocks: Blocks of a draw.
        PADDED_BLOCKS: A power of two not below `blocks`.
    """
    draw = tl.program_id(0)
    number = tl.arange(0, PADDED_BLOCKS)
    there = number < blocks
    each = tl.load(tops + draw * blocks + number, mask=there, other=float("-inf"))
    first = tl.load(tokens + draw * blocks + number, mask=there, other=LAST)
    least = tl.min(tl.where(each == tl.max(each, 0), first, LAST), 0)
    tl.store(token + draw, tl.where(least == LAST, 0, least).to(tl.int64))  # as in `join_summaries`


@triton.jit
def pack_results(logits, best, tokens, normal, packed, stride):
    """Packs the results of rows that ask for no alternatives. Grid: (rows,).

    Args:
        logits: [rows, vocabulary] float32, with this stride of rows.
        best: [rows] float32. Largest logit.
        tokens: [rows] int64. Drawn tokens.
        normal: [rows] float32. See `model.sampling.sampler.Summary`.
        packed: [4, rows] int32. Receives bits of `best`, tokens, bits of logprobs, and ranks of 0.
        stride: Elements between two rows of `logits`.
    """
    row, rows = tl.program_id(0), tl.num_programs(0)
    token = tl.load(tokens + row)
    chosen = tl.load(logits + row.to(tl.int64) * stride + token) - tl.load(normal + row)
    tl.store(packed + row, tl.load(best + row).to(tl.int32, bitcast=True))
    tl.store(packed + rows + row, token.to(tl.int32))
    tl.store(packed + 2 * rows + row, chosen.to(tl.int32, bitcast=True))
    tl.store(packed + 3 * rows + row, 0)


@triton.jit
def block_of(logits, row, stride, vocabulary, BLOCK: tl.constexpr):
    """Loads a block of a row. Returns logits, -inf past the end; their token ids; whether each is within the row."""
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = ids < vocabulary
    return tl.load(logits + row.to(tl.int64) * stride + ids, mask=there, other=float("-inf")), ids, there


@triton.jit
def mixed_bits(x):
    """SplitMix64, as `model.sampling.random` has it. x: uint64."""
    z = x + GOLDEN
    z = (z ^ (z >> SHIFT_1)) * FACTOR_1
    z = (z ^ (z >> SHIFT_2)) * FACTOR_2
    return z ^ (z >> 31)


@triton.jit
def gumbel(bits):
    """`model.sampling.random.gumbel` of mixed bits, within float32.

    A large result decides a draw. Its uniform number is near 1, so its distance from 1 is computed.
    """
    uniform = (bits.to(tl.float32) + 0.5) * 5.421010862427522e-20  # 2^-64
    # Not ~bits: the interpreter of Triton 3.6 and 3.7 has no inverse of an unsigned number.
    distance = ((bits ^ ALL_ONES).to(tl.float32) + 0.5) * 5.421010862427522e-20
    series = distance * (1 / 6) + 1 / 5
    series = series * distance + 1 / 4
    series = series * distance + 1 / 3
    series = series * distance + 1 / 2
    series = series * distance + 1.0
    return -tl.log(tl.where(distance < 0.015625, series * distance, -tl.log(uniform)))


def summarise(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Summarises logits, float32 [n, vocabulary].

    Returns:
        best, tokens (int64), normal: see `model.sampling.sampler.Summary`.
    """
    logits, n = readable(logits), len(logits)
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    tops, totals, tokens = _parts(logits, n, blocks)
    best, normal, token = logits.new_empty(n), logits.new_empty(n), tokens.new_empty(n, dtype=torch.int64)
    summarise_blocks[(n, blocks)](logits, tops, tokens, totals, logits.stride(0), logits.shape[1], BLOCK=BLOCK)
    join_summaries[(n,)](
        tops, tokens, totals, best, token, normal, blocks, PADDED_BLOCKS=triton.next_power_of_2(blocks)
    )
    return best, token, normal


def draw(logits: Tensor, draws: Draws) -> Tensor:
    """Draws token ids, int64 [draws], in float32; top_k and top_p are not applied."""
    logits, n = readable(logits), len(draws.rows)
    blocks = triton.cdiv(logits.shape[1], BLOCK)
    tops, _, tokens = _parts(logits, n, blocks)
    token = tokens.new_empty(n, dtype=torch.int64)
    with np.errstate(divide="ignore"):
        least = np.log(draws.min_p).astype(np.float32)
    temperature = np.maximum(draws.temperature.astype(np.float32), np.finfo(np.float32).tiny)  # above 0 still
    rows, keys, warmth, lowest = (
        on_device(logits, np.ascontiguousarray(column)) for column in (draws.rows, draws.keys, temperature, least)
    )
    best = logits.amax(-1)[rows]
    draw_blocks[(n, blocks)](
        logits, rows, best, keys, warmth, lowest, tops, tokens, logits.stride(0), logits.shape[1], BLOCK=BLOCK
    )
    join_draws[(n,)](tops, tokens, token, blocks, PADDED_BLOCKS=triton.next_power_of_2(blocks))
    return token


def _parts(logits: Tensor, rows: int, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the results of blocks: largest logits, sums, token ids. Each array begins where memory is aligned."""
    kinds = (torch.float32, torch.float32, torch.int32)
    tops, totals, tokens = (torch.empty((rows, blocks), dtype=kind, device=logits.device) for kind in kinds)
    return tops, totals, tokens


def readable(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
