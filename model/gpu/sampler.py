"""Kernels over whole rows of logits: the largest, the sum that probabilities are divided by, a draw, results.

Rows are read in blocks, each by a program of its own. Results of blocks are joined from the first block on, so they do
not depend on what else is in the batch.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from model.gpu.draw_columns import COLUMNS, KEY, LEAST, PLACE, ROW, TEMPERATURE, columns_of
from model.sampling import random
from model.sampling.sampler import Draws, Ints, on_device

BLOCK = 4096
GOLDEN = tl.constexpr(random.GOLDEN)
SHIFT_1, FACTOR_1 = (tl.constexpr(number) for number in random.MIXERS[0])
SHIFT_2, FACTOR_2 = (tl.constexpr(number) for number in random.MIXERS[1])
LAST = tl.constexpr(2**31 - 1)
"""No token id is larger."""
TINY = tl.constexpr(float(np.finfo(np.float32).tiny))
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
def draw_blocks(logits, best, controls, tops, tokens, stride, vocabulary, BLOCK: tl.constexpr):
    """Draws within each block. Grid: (draws, blocks).

    Args:
        logits: See `summarise_blocks`.
        best: [rows] float32. Largest logit of each row.
        controls: [draws, COLUMNS] int64, see `model.gpu.draw_columns`. top_k and top_p are not read.
        tops: [draws, blocks] float32. Largest of scaled logits with noise.
        tokens: [draws, blocks] int32. First token that has it.
        stride: See `summarise_blocks`.
        vocabulary: See `summarise_blocks`.
        BLOCK: See `summarise_blocks`.
    """
    draw = tl.program_id(0)
    of = controls + draw * COLUMNS
    row = tl.load(of + ROW)
    x, ids, _ = block_of(logits, row, stride, vocabulary, BLOCK)
    # In float32 it is above 0 still.
    temperature = tl.maximum(tl.load(of + TEMPERATURE).to(tl.float64, bitcast=True), TINY).to(tl.float32)
    least = tl.load(of + LEAST).to(tl.float64, bitcast=True).to(tl.float32)
    scaled = tl.math.div_rn(x - tl.load(best + row), tl.zeros_like(x) + temperature)
    key = tl.load(of + KEY).to(tl.uint64, bitcast=True)
    noisy = scaled + gumbel(mixed_bits(key ^ ids.to(tl.uint64)))
    noisy = tl.where(scaled >= least, noisy, float("-inf"))
    top = tl.max(noisy, 0)
    at = draw * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops + at, top)
    tl.store(tokens + at, tl.min(tl.where(noisy == top, ids, LAST), 0))


@triton.jit
def join_draws(controls, tops, tokens, drawn, blocks, PADDED_BLOCKS: tl.constexpr):
    """Joins the blocks of a draw. Grid: (draws,).

    Args:
        controls: See `draw_blocks`.
        tops: See `draw_blocks`.
        tokens: See `draw_blocks`.
        drawn: int64. Receives drawn tokens, each at its PLACE.
        blocks: Blocks of a draw.
        PADDED_BLOCKS: A power of two not below `blocks`.
    """
    draw = tl.program_id(0)
    number = tl.arange(0, PADDED_BLOCKS)
    there = number < blocks
    each = tl.load(tops + draw * blocks + number, mask=there, other=float("-inf"))
    first = tl.load(tokens + draw * blocks + number, mask=there, other=LAST)
    least = tl.min(tl.where(each == tl.max(each, 0), first, LAST), 0)
    token = tl.where(least == LAST, 0, least).to(tl.int64)  # as in `join_summaries`
    tl.store(drawn + tl.load(controls + draw * COLUMNS + PLACE), token)


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
    tops, totals = (torch.empty((n, blocks), dtype=torch.float32, device=logits.device) for _ in range(2))
    tokens = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    best, normal, token = logits.new_empty(n), logits.new_empty(n), tokens.new_empty(n, dtype=torch.int64)
    summarise_blocks[(n, blocks)](logits, tops, tokens, totals, logits.stride(0), logits.shape[1], BLOCK=BLOCK)
    join_summaries[(n,)](
        tops, tokens, totals, best, token, normal, blocks, PADDED_BLOCKS=triton.next_power_of_2(blocks)
    )
    return best, token, normal


def draw(logits: Tensor, draws: Draws, best: Tensor | None = None, into: tuple[Tensor, Ints] | None = None) -> Tensor:
    """Draws token ids in float32; top_k and top_p are not applied. As `model.gpu.cutoff.draw_from_top`."""
    logits, n, vocabulary = readable(logits), len(draws.rows), logits.shape[1]
    tokens, places = into or (torch.empty(n, dtype=torch.int64, device=logits.device), np.arange(n))
    controls = on_device(logits, columns_of(draws, places, vocabulary))
    best, blocks = logits.amax(-1) if best is None else best, triton.cdiv(vocabulary, BLOCK)
    tops = torch.empty((n, blocks), dtype=torch.float32, device=logits.device)
    found = torch.empty((n, blocks), dtype=torch.int32, device=logits.device)
    draw_blocks[(n, blocks)](logits, best, controls, tops, found, logits.stride(0), vocabulary, BLOCK=BLOCK)
    join_draws[(n,)](controls, tops, found, tokens, blocks, PADDED_BLOCKS=triton.next_power_of_2(blocks))
    return tokens


def readable(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()
