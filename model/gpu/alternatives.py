"""Ranks of drawn tokens and the likeliest alternatives to them, for rows that ask for logprobs.

Each block of a row lists its largest logits. A program for each row then merges the lists. Equal logits are in the
order of their ids, as `model.sampling.sampler.largest` has them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.gpu.sampler import BLOCK, block_of, readable
from model.sampling.sampler import Ints, on_device

LOWEST = tl.constexpr(-(2**63))
"""Key of no token."""


@triton.jit(do_not_specialize=["k"])
def list_largest(
    logits, rows, tokens, above, keys, stride, vocabulary, k, BLOCK: tl.constexpr
):  # fmt: skip
    """Lists the largest logits of blocks. Grid: (asking rows, blocks).

    Args:
        logits: [rows, vocabulary] float32, with this stride of rows.
        rows: [asking] int64. Rows that ask.
        tokens: [rows] int64. Drawn tokens.
        above: [asking, blocks] int32. Logits above that of the drawn token.
        keys: [asking, blocks, k] int64. Descending; LOWEST where the block has no more tokens.
        stride: Elements between two rows of `logits`.
        vocabulary: Logits of a row.
        k: Alternatives.
        BLOCK: Logits of a block.
    """
    row = tl.load(rows + tl.program_id(0))
    x, ids, there = block_of(logits, row, stride, vocabulary, BLOCK)
    picked = tl.load(logits + row * stride + tl.load(tokens + row))
    at = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    tl.store(above + at, tl.sum((x > picked).to(tl.int32), 0))
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)  # as integers in the order of the floats
    key = tl.where(there, (ordered << 32) - ids, LOWEST)
    own = keys + at.to(tl.int64) * k
    for i in range(k):
        top = tl.max(key, 0)
        tl.store(own + i, top)
        key = tl.where(key == top, LOWEST, key)


@triton.jit(do_not_specialize=["n", "k"])
def merge_largest(
    logits, normal, rows, above, keys, results, stride, n, blocks, k, PADDED_BLOCKS: tl.constexpr
):  # fmt: skip
    """Merges the lists of a row's blocks. Grid: (asking rows,).

    Args:
        logits: See `list_largest`.
        normal: [rows] float32. See `model.sampling.sampler.Summary`.
        rows: See `list_largest`.
        above: See `list_largest`.
        keys: See `list_largest`.
        results: [4 * n + 2 * n * k] int32. Receives ranks, ids and logprobs.
        stride: See `list_largest`.
        n: Rows of the logits.
        blocks: Blocks of a row.
        k: See `list_largest`.
        PADDED_BLOCKS: A power of two not below `blocks`.
    """
    asking = tl.program_id(0)
    row = tl.load(rows + asking)
    number = tl.arange(0, PADDED_BLOCKS)
    there = number < blocks
    count = tl.sum(tl.load(above + asking * blocks + number, mask=there, other=0), 0)
    tl.store(results + 3 * n + row, count + 1)
    least = tl.load(normal + row)
    lists = keys + (asking.to(tl.int64) * blocks + number) * k
    head = tl.zeros_like(number)
    for i in range(k):
        each = tl.load(lists + head, mask=there & (head < k), other=LOWEST)
        top = tl.max(each, 0)
        head += (each == top).to(tl.int32)
        token = (-top) & 0xFFFFFFFF
        logprob = tl.load(logits + row * stride + token) - least
        at = results + 4 * n + row * k + i
        tl.store(at, token.to(tl.int32))
        tl.store(at + n * k, logprob.to(tl.int32, bitcast=True))


def put_alternatives(results: Tensor, logits: Tensor, normal: Tensor, tokens: Tensor, asking: Ints, k: int) -> None:
    """Writes ranks, ids and logprobs of rows that ask, without waiting.

    Args:
        results: See `merge_largest`.
        logits: [n, vocabulary] float32. Raw logits.
        normal: [n] float32.
        tokens: [n] int64. Drawn tokens.
        asking: [m] int64. Rows that ask.
        k: Alternatives of each, at most the vocabulary.
    """
    logits, m, blocks = readable(logits), len(asking), triton.cdiv(logits.shape[1], BLOCK)
    rows = on_device(logits, asking)
    above = torch.empty((m, blocks), dtype=torch.int32, device=logits.device)
    keys = torch.empty((m, blocks, max(k, 1)), dtype=torch.int64, device=logits.device)
    stride = logits.stride(0)
    list_largest[(m, blocks)](logits, rows, tokens, above, keys, stride, logits.shape[1], k, BLOCK=BLOCK)
    merge_largest[(m,)](
        logits, normal, rows, above, keys, results, stride, len(logits), blocks, k,
        PADDED_BLOCKS=triton.next_power_of_2(blocks),
    )  # fmt: skip
