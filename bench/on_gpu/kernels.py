"""Kernels that only measure: one reads, one does nothing."""

import triton
import triton.language as tl


@triton.jit
def read_blocks(source, out, BLOCK: tl.constexpr, EACH: tl.constexpr):
    """Grid: (programs,). source: int32 [programs x EACH x BLOCK]. out: int32 [programs], what each has read, added up,
    so that nothing is left out.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK * EACH + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in tl.static_range(EACH):
        total += tl.load(source + at + i * BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def nothing(out):
    """Grid: (1,). Writes one number."""
    tl.store(out, 1)
