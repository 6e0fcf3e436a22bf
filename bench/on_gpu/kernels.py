"""Kernels that only measure: one reads, one has no work."""

import triton
import triton.language as tl


@triton.jit
def read_blocks(source, out, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Sums numbers in each program. The sum makes sure that no read is optimised away.

    Grid: (programs,).

    Args:
        source: [programs x EACH x BLOCK] int32.
        out: [programs] int32, the sum of each program's numbers.
        BLOCK: Numbers of one read.
        EACH: Reads of a program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK * EACH + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(EACH):
        total += tl.load(source + at + i * BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def nothing(out):
    """Writes one number. Grid: (1,)."""
    tl.store(out, 1)
