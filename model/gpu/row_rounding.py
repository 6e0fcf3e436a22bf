"""Rounds rows to float8 by a kernel, for products that scale their sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.gpu.formats import FP8_BITS, quantised, quantised_by


@triton.jit(do_not_specialize=["rows"])
def round_rows(
    x, out, scales, rows, scale, WIDTH: tl.constexpr, PADDED_WIDTH: tl.constexpr, STATIC: tl.constexpr
):  # fmt: skip
    """Rounds rows to e4m3 by the rule of `model.weight_formats.activations.RowRounding`. Grid: (padded rows,).

    Args:
        x: [rows, WIDTH], any float dtype.
        out: [padded rows, WIDTH] uint8. Bits of e4m3; zeros past the last row.
        scales: [padded rows] float32. NaN for a row that has a NaN.
        rows: Rows of x.
        scale: Scale of all rows. Not read without STATIC.
        WIDTH: Elements of a row.
        PADDED_WIDTH: A power of two not below WIDTH.
        STATIC: Whether all rows have one scale.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_WIDTH)[None, :]
    there = place < WIDTH
    line = tl.load(x + row * WIDTH + place, mask=there & (row < rows), other=0.0).to(tl.float32)
    if STATIC:
        values, own = quantised_by(line, tl.full((1,), scale, tl.float32), FP8_BITS)
    else:
        values, own = quantised(line, FP8_BITS)
    tl.store(out + row * WIDTH + place, values, mask=there)
    tl.store(scales + row + tl.arange(0, 1), own)


def to_float8(x: Tensor, padded: int, scale: float | None) -> tuple[Tensor, Tensor]:
    """Rounds rows to float8.

    Args:
        x: [rows, in].
        padded: Rows of the result, not below those of x. The others are zeros.
        scale: Scale of all rows. None for one of each row, by its largest absolute value.

    Returns:
        The rows, [padded, in] float8_e4m3fn, and their scales, [padded, 1] float32.
    """
    width = x.shape[1]
    out = torch.empty((padded, width), dtype=torch.uint8, device=x.device)
    scales = torch.empty((padded, 1), dtype=torch.float32, device=x.device)
    wide = triton.next_power_of_2(width)
    round_rows[(padded,)](
        x.contiguous(), out, scales, len(x), 1.0 if scale is None else scale, WIDTH=width, PADDED_WIDTH=wide,
        STATIC=scale is not None, num_warps=min(max(wide // 512, 1), 16),
    )  # fmt: skip
    return out.view(torch.float8_e4m3fn), scales
