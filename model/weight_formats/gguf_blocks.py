"""Unpacks the blocks of GGUF's quantized types to groups, see `model.weight_formats.groups`.

The layouts are those of ggml's ggml-common.h, in the order of the bytes of a block. A block of K types has 256 weights
in groups of 16 or 32; scales of groups are integers of few bits, multiples of the block's, which float32 holds without
rounding. Integers are held in the bits that they have.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model.weight_formats.groups import GroupBlocks, GroupWeights
from model.weight_formats.levels import E2M1, INT3, INT4, INT5, INT6, INT8, UINT2, UINT4, UINT5, Levels

IQ4_NL = Levels(
    "iq4_nl", (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
)

ZERO = 128  # stored integer of INT8 that stands for 0
SMALL, WIDE = 16, 32  # weights of a group


def unpack(blocks: Tensor, kind: str) -> GroupWeights:
    """Unpacks blocks.

    Args:
        blocks: [out, blocks, bytes] uint8, on any device.
        kind: Name of the type, one of `UNPACKED`.
    """
    return UNPACKED[kind](blocks)


def _groups(
    levels: Levels, values: Tensor, scales: Tensor, offsets: Tensor | None = None, size: int = WIDE
) -> GroupWeights:
    """Joins the blocks of each output: a group each."""
    return GroupWeights(
        levels, values.flatten(1), scales.flatten(1), None if offsets is None else offsets.flatten(1), size
    )


def _k_groups(
    levels: Levels,
    values: Tensor,
    scale: Tensor,
    scales: Tensor,
    least: Tensor | None = None,
    minima: Tensor | None = None,
    size: int = WIDE,
) -> GroupWeights:
    """Joins the blocks of each output, whose groups have integers as scales and minima.

    Args:
        levels: Numbers of the stored integers.
        values: [out, blocks, BLOCK].
        scale: [out, blocks, 1]. Scale of a block.
        scales: [out, blocks, groups]. Multiples of it, of 6 bits at most.
        least: [out, blocks, 1]. Minimum of a block.
        minima: [out, blocks, groups]. Multiples of it, which are subtracted.
        size: Inputs of a group.
    """
    offsets = None if minima is None else minima.to(torch.int8).flatten(1)
    blocks = GroupBlocks(scale.flatten(1), None if least is None else -least.flatten(1), scales.shape[2])
    return GroupWeights(levels, values.flatten(1), scales.to(torch.int8).flatten(1), offsets, size, blocks=blocks)


def _half(two: Tensor) -> Tensor:
    """Reads numbers of float16: [out, blocks, 2] uint8 as [out, blocks, 1]."""
    return two.contiguous().view(torch.float16)


def _shifted(parts: Tensor, shifts: range, width: int) -> Tensor:
    """Shifts runs of bytes right by each number of bits: [..., n] as [..., n / width, shifts, width], flattened."""
    by = torch.tensor(list(shifts), dtype=torch.uint8, device=parts.device)
    return (parts.unflatten(-1, (-1, 1, width)) >> by[:, None]).flatten(2)


def _halves(parts: Tensor, width: int) -> Tensor:
    """Reads integers of 4 bits: of each run of `width` bytes the lower halves, then the upper ones."""
    return _shifted(parts, range(0, 8, 4), width) & 15


def _quarters(parts: Tensor) -> Tensor:
    """Reads integers of 2 bits: of each run of 32 bytes the lowest ones first."""
    return _shifted(parts, range(0, 8, 2), 32) & 3


def _bits(parts: Tensor) -> Tensor:
    """Reads single bits: of each byte the lowest first."""
    return _shifted(parts, range(8), 1) & 1


def _planes(parts: Tensor) -> Tensor:
    """Reads single bits: the lowest of 32 bytes first."""
    return _shifted(parts, range(8), 32) & 1


def _scales_of_k(twelve: Tensor) -> tuple[Tensor, Tensor]:
    """Reads 8 scales and 8 minima of 6 bits: the first four of each whole, the others' upper bits above those."""
    scales, minima, lower = twelve[..., :4], twelve[..., 4:8], twelve[..., 8:]
    return (
        torch.cat((scales & 63, lower & 15 | scales >> 2 & 48), -1),
        torch.cat((minima & 63, lower >> 4 | minima >> 2 & 48), -1),
    )


def _q4_0(b: Tensor) -> GroupWeights:
    return _groups(INT4, _halves(b[..., 2:], 16), _half(b[..., :2]))


def _q4_1(b: Tensor) -> GroupWeights:
    return _groups(UINT4, _halves(b[..., 4:], 16), _half(b[..., :2]), _half(b[..., 2:4]))


def _q5_0(b: Tensor) -> GroupWeights:
    values = _halves(b[..., 6:], 16) | _bits(b[..., 2:6]) << 4
    return _groups(INT5, values, _half(b[..., :2]))


def _q5_1(b: Tensor) -> GroupWeights:
    values = _halves(b[..., 8:], 16) | _bits(b[..., 4:8]) << 4
    return _groups(UINT5, values, _half(b[..., :2]), _half(b[..., 2:4]))


def _q8_0(b: Tensor) -> GroupWeights:
    return _groups(INT8, b[..., 2:] ^ ZERO, _half(b[..., :2]))


def _q2_k(b: Tensor) -> GroupWeights:
    both, least = b[..., :16], _half(b[..., 82:84])
    return _k_groups(UINT2, _quarters(b[..., 16:80]), _half(b[..., 80:82]), both & 15, least, both >> 4, SMALL)


def _q3_k(b: Tensor) -> GroupWeights:
    lower, upper = _shifted(b[..., 96:104], range(0, 8, 4), 8) & 15, _shifted(b[..., 104:108], range(0, 8, 2), 4) & 3
    scales = (lower | upper << 4).to(torch.int8) - 32
    values = _quarters(b[..., 32:96]) | _planes(b[..., :32]) << 2
    return _k_groups(INT3, values, _half(b[..., 108:]), scales, size=SMALL)


def _q4_k(b: Tensor) -> GroupWeights:
    scales, minima = _scales_of_k(b[..., 4:16])
    return _k_groups(UINT4, _halves(b[..., 16:], 32), _half(b[..., :2]), scales, _half(b[..., 2:4]), minima)


def _q5_k(b: Tensor) -> GroupWeights:
    scales, minima = _scales_of_k(b[..., 4:16])
    values = _halves(b[..., 48:], 32) | _planes(b[..., 16:48]) << 4
    return _k_groups(UINT5, values, _half(b[..., :2]), scales, _half(b[..., 2:4]), minima)


def _q6_k(b: Tensor) -> GroupWeights:
    values = _halves(b[..., :128], 64) | _quarters(b[..., 128:192]) << 4
    scales = b[..., 192:208].contiguous().view(torch.int8)
    return _k_groups(INT6, values, _half(b[..., 208:]), scales, size=SMALL)


def _iq4_nl(b: Tensor) -> GroupWeights:
    return _groups(IQ4_NL, _halves(b[..., 2:], 16), _half(b[..., :2]))


def _iq4_xs(b: Tensor) -> GroupWeights:
    lower, upper = _shifted(b[..., 4:8], range(0, 8, 4), 1) & 15, _shifted(b[..., 2:4], range(0, 8, 2), 1) & 3
    scales = (lower | upper << 4).to(torch.int8) - 32
    return _k_groups(IQ4_NL, _halves(b[..., 8:], 16), _half(b[..., :2]), scales)


def _mxfp4(b: Tensor) -> GroupWeights:
    """The numbers of `model.weight_formats.mxfp4` in another order: inputs 0 to 15 are in the lower halves of bytes."""
    exponents = b[..., :1].contiguous().view(torch.float8_e8m0fnu)
    return _groups(E2M1, _halves(b[..., 1:], 16), exponents.float().bfloat16())


UNPACKED: dict[str, Callable[[Tensor], GroupWeights]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
"""By name of the type, see `model.gguf.types`."""
