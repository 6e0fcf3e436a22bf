"""Types of weights in GGUF files: rounds rows to the nearest numbers that a block holds.

The gguf package quantizes to types of 32 weights a block. For K types and IQ4, which it only reads, this writes the
layout of ggml-common.h. Scales are the ones that the extreme weights of a group need, rounded to the bits that a block
has for them. llama.cpp searches for better ones, so that its files lose less than these.
"""

from collections.abc import Callable

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Bytes = NDArray[np.uint8]

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
FALLBACKS = {
    Kind.Q2_K: Kind.Q4_0, Kind.Q3_K: Kind.Q4_0, Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0,
    Kind.IQ4_XS: Kind.IQ4_NL,
}  # fmt: skip
"""Types that llama.cpp's quantizer takes where the inputs are no multiple of 256 (`tensor_type_fallback`)."""

BLOCKS_AT_ONCE = 2**14  # keeps intermediate results small


def fitting(kind: Kind, inputs: int) -> Kind:
    """Returns the type of a matrix with this number of inputs in a file of the type `kind`."""
    return FALLBACKS[kind] if inputs % gguf.GGML_QUANT_SIZES[kind][0] else kind


def encode(rows: Floats, kind: Kind) -> Bytes:
    """Rounds rows to a type.

    Args:
        rows: [rows, in] float32.
        kind: The type, whose blocks divide the inputs.

    Returns:
        [rows, bytes] uint8.
    """
    if kind not in ENCODERS:
        return np.ascontiguousarray(gguf.quants.quantize(np.ascontiguousarray(rows), kind)).view(np.uint8)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rows.reshape(-1, block)
    made = np.empty((len(blocks), size), np.uint8)
    for start in range(0, len(blocks), BLOCKS_AT_ONCE):
        some = slice(start, start + BLOCKS_AT_ONCE)
        made[some] = np.concatenate(ENCODERS[kind](blocks[some]), axis=1)
    return made.reshape(len(rows), -1)


def decode(stored: Bytes, kind: Kind) -> Floats:
    """Returns the numbers that rows stand for, by the gguf package."""
    numbers: Floats = gguf.quants.dequantize(stored, kind)
    return numbers


def _fields(values: Integers, bits: int, width: int) -> Bytes:
    """Packs integers [n, count] into bytes: each byte of a run of `width` has one of each `width` integers."""
    shifts = np.arange(0, 8, bits)[:, None]
    runs = values.reshape(len(values), -1, 8 // bits, width)
    packed: Bytes = (runs << shifts).sum(axis=2).astype(np.uint8).reshape(len(values), -1)
    return packed


def _half(numbers: Floats) -> tuple[Bytes, Floats]:
    """Returns numbers [n, 1] as bytes of float16, and rounded to it."""
    halves = numbers.astype(np.float16)
    return np.ascontiguousarray(halves).view(np.uint8), halves.astype(np.float32)


def _whole(numbers: Floats, steps: Floats) -> Integers:
    """Divides and rounds to the nearest integer; 0 where the step is 0."""
    divided = np.divide(numbers, steps, out=np.zeros(np.broadcast(numbers, steps).shape, np.float32), where=steps != 0)
    return np.rint(divided).astype(np.int64)


def _extremes(groups: Floats) -> Floats:
    """Returns the number of each group, along the last axis, that is farthest from 0."""
    found: Floats = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    return found


def _symmetric(blocks: Floats, groups: int, lowest: int, most_scale: int) -> tuple[Bytes, Integers, Integers]:
    """Rounds weights to integers from `lowest`, which the extreme of a group gets, to -lowest - 1.

    Returns:
        The scale of the block as float16; scales [n, groups] of the groups, in units of it, from -most_scale - 1 to
        most_scale; integers [n, weights].
    """
    parts = blocks.reshape(len(blocks), groups, -1)
    steps = _extremes(parts) / np.float32(lowest)
    half, unit = _half(np.abs(steps).max(1, keepdims=True) / np.float32(most_scale))
    scales = _whole(steps, unit).clip(-most_scale - 1, most_scale)
    values = _whole(parts, (unit * scales)[..., None].astype(np.float32)).clip(lowest, -lowest - 1)
    return half, scales, values.reshape(blocks.shape)


def _asymmetric(blocks: Floats, groups: int, most: int, most_scale: int) -> tuple[Bytes, Integers, Integers, Integers]:
    """Rounds weights to scale * (0 .. most) - minimum.

    Returns:
        Scale and minimum of the block as float16, 4 bytes; scales, and minima, [n, groups] of the groups, in units of
        these, from 0 to most_scale; integers [n, weights].
    """
    parts = blocks.reshape(len(blocks), groups, -1)
    least = np.minimum(parts.min(-1), 0)
    steps = (np.maximum(parts.max(-1), 0) - least) / np.float32(most)
    scale_half, scale_unit = _half(steps.max(1, keepdims=True) / np.float32(most_scale))
    least_half, least_unit = _half(-least.min(1, keepdims=True) / np.float32(most_scale))
    scales = _whole(steps, scale_unit).clip(0, most_scale)
    minima = _whole(-least, least_unit).clip(0, most_scale)
    above = parts + (least_unit * minima)[..., None].astype(np.float32)
    values = _whole(above, (scale_unit * scales)[..., None].astype(np.float32)).clip(0, most)
    return np.concatenate((scale_half, least_half), 1), scales, minima, values.reshape(blocks.shape)


def _k_scales(scales: Integers, minima: Integers) -> Bytes:
    """Packs 8 scales and 8 minima of 6 bits into 12 bytes."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minima[:, :4] | minima[:, 4:] >> 4 << 6
    third = scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4
    return np.concatenate((first, second, third), 1).astype(np.uint8)


def _q2_k(blocks: Floats) -> tuple[Bytes, ...]:
    halves, scales, minima, values = _asymmetric(blocks, 16, 3, 15)
    return (scales | minima << 4).astype(np.uint8), _fields(values, 2, 32), halves


def _q3_k(blocks: Floats) -> tuple[Bytes, ...]:
    half, scales, values = _symmetric(blocks, 16, -4, 31)
    lifted, above = values + 4, scales + 32
    return (
        _fields(lifted >> 2, 1, 32), _fields(lifted & 3, 2, 32), _fields(above & 15, 4, 8), _fields(above >> 4, 2, 4),
        half,
    )  # fmt: skip


def _q4_k(blocks: Floats) -> tuple[Bytes, ...]:
    halves, scales, minima, values = _asymmetric(blocks, 8, 15, 63)
    return halves, _k_scales(scales, minima), _fields(values, 4, 32)


def _q5_k(blocks: Floats) -> tuple[Bytes, ...]:
    halves, scales, minima, values = _asymmetric(blocks, 8, 31, 63)
    return halves, _k_scales(scales, minima), _fields(values >> 4, 1, 32), _fields(values & 15, 4, 32)


def _q6_k(blocks: Floats) -> tuple[Bytes, ...]:
    half, scales, values = _symmetric(blocks, 16, -32, 127)
    lifted = values + 32
    return _fields(lifted & 15, 4, 64), _fields(lifted >> 4, 2, 32), scales.astype(np.int8).view(np.uint8), half


def _nearest_iq4(parts: Floats, steps: Floats) -> Integers:
    """Returns the places of the nearest levels of IQ4."""
    safe = np.where(steps == 0, np.float32(1), steps)
    return np.searchsorted((IQ4[1:] + IQ4[:-1]) / 2, parts / safe)


def _iq4_nl(blocks: Floats) -> tuple[Bytes, ...]:
    half, unit = _half(_extremes(blocks)[:, None] / IQ4[0])
    return half, _fields(_nearest_iq4(blocks, unit), 4, 16)


def _iq4_xs(blocks: Floats) -> tuple[Bytes, ...]:
    parts = blocks.reshape(len(blocks), 8, -1)
    steps = _extremes(parts) / IQ4[0]
    half, unit = _half(np.abs(steps).max(1, keepdims=True) / np.float32(31))
    scales = _whole(steps, unit).clip(-32, 31)
    values = _nearest_iq4(parts, (unit * scales)[..., None].astype(np.float32)).reshape(blocks.shape)
    above = scales + 32
    return half, _fields(above >> 4, 2, 1), _fields(above & 15, 4, 1), _fields(values, 4, 16)


ENCODERS: dict[Kind, Callable[[Floats], tuple[Bytes, ...]]] = {
    Kind.Q2_K: _q2_k, Kind.Q3_K: _q3_k, Kind.Q4_K: _q4_k, Kind.Q5_K: _q5_k, Kind.Q6_K: _q6_k, Kind.IQ4_NL: _iq4_nl,
    Kind.IQ4_XS: _iq4_xs,
}  # fmt: skip
"""The parts of blocks [n, weights], in their order, by type."""
