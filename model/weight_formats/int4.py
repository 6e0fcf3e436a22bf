"""Weights in 4 bits that are made while a checkpoint is loaded (--quantization int4).

A group of 32 inputs of an output has a scale and an offset in 16 bits: 5 bits a weight. They are fitted to the weights
by least squares, after a first rounding between the smallest and the largest of them. Output layers stay in
8 bits, see `model.weight_formats.int8`: they decide which token is drawn, and are read once a step.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.weight_formats.format import MadeProduct, WeightFormat
from model.weight_formats.groups import INT4, GroupProducts, GroupWeights
from model.weight_formats.int8 import Int8Format
from model.weight_formats.plain import PlainWeights
from model.weight_formats.stored import StoredWeight

GROUP = 32
TOGETHER = 8  # inputs that kernels decode at once; groups are a multiple of it
FIRST, LAST = -8, 7  # levels
FITS = 2  # of a group; errors of normal weights are 7.82 % after none, 7.49 after one, 7.35 after two, 7.28 after three
BLOCK = 2**17  # weights that are quantized at once, in the cache: 5 to 15 times as fast as all of a linear
OUTPUT_LAYERS = ("lm_head", "embed_out", "head")


def group_size(width: int) -> int:
    """Returns the inputs of a group: GROUP, or less where that divides the inputs of a linear into equal groups."""
    return next((size for size in range(GROUP, 0, -TOGETHER) if width % size == 0), GROUP)


def quantize_groups(rows: Tensor, size: int) -> GroupWeights:
    """Quantizes rows, [out, in] of any float dtype, in groups of `size` inputs.

    A group that is not finite, or larger than float16 holds, gets a scale that is not finite either.
    """
    width = rows.shape[1]
    full = width // size * size
    parts = [_in_blocks(rows[:, :full], size)] if full else []
    if full != width:
        parts.append(_in_blocks(rows[:, full:], width - full))
    values, scales, offsets = (torch.cat(kind, dim=1) for kind in zip(*parts, strict=True))
    return GroupWeights(INT4, values, scales, offsets, size)


def _in_blocks(rows: Tensor, size: int) -> list[Tensor]:
    """Returns `_quantize` of all rows."""
    made = [_quantize(block, size) for block in rows.split(max(1, BLOCK // rows.shape[1]))]
    return [torch.cat(kind) for kind in zip(*made, strict=True)]


def _quantize(rows: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns integers, [out, in] uint8, scales and offsets, [out, groups] float16; `size` divides the inputs."""
    weights = rows.float().unflatten(1, (-1, size))
    lowest, highest = weights.amin(2, keepdim=True), weights.amax(2, keepdim=True)
    scale = _in_16_bits((highest - lowest) / (LAST - FIRST))
    offset = _in_16_bits(lowest - FIRST * scale)
    values = _nearest(weights, scale, offset)
    best, least = [values, scale, offset], _error(weights, values, scale, offset)
    for _ in range(FITS):
        scale, offset = _fitted(weights, values)
        values = _nearest(weights, scale, offset)
        error = _error(weights, values, scale, offset)
        found = zip((values, scale, offset), best, strict=True)
        best = [torch.where(error < least, new, old) for new, old in found]
        least = torch.minimum(error, least)
    values, scale, offset = best
    stored = (values - FIRST).to(torch.uint8).flatten(1)
    return stored, scale[..., 0].half(), offset[..., 0].half()


def _in_16_bits(numbers: Tensor) -> Tensor:
    return numbers.half().float()


def _nearest(weights: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Returns the levels nearest to weights, 0 for what is not a number."""
    safe = torch.where(scale == 0, 1.0, scale)
    return ((weights - offset) / safe).round_().clamp_(FIRST, LAST).nan_to_num_(0.0)


def _fitted(weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scale and offset with the least squared error for these integers."""
    mean_value, mean_weight = values.mean(2, keepdim=True), weights.mean(2, keepdim=True)
    spread = values - mean_value
    squares = (spread * spread).sum(2, keepdim=True)
    scale = (spread * (weights - mean_weight)).sum(2, keepdim=True) / torch.where(squares == 0, 1.0, squares)
    scale = _in_16_bits(scale)
    return scale, _in_16_bits(mean_weight - scale * mean_value)


def _error(weights: Tensor, values: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    return (values * scale + offset - weights).square_().sum(2, keepdim=True)


class Int4Format(PlainWeights):
    """`GroupFormat` of weights that are stored plain and kept in 4 bits."""

    name = "int4"

    def __init__(self) -> None:
        self._products, self._output = GroupProducts(), Int8Format()

    def for_linear(self, name: str) -> WeightFormat:  # type: ignore[override] # some are in 8 bits
        return self._output if name.split(".")[-1] in OUTPUT_LAYERS else self

    def for_tied(self) -> WeightFormat:
        return self._output

    def groups(self, weight: StoredWeight) -> GroupWeights:
        return quantize_groups(weight["weight"], group_size(weight.inputs))

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)
