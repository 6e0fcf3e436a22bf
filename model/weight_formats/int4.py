"""Weights in 4 bits that are made while a checkpoint is loaded (--quantization int4).

A group of 32 inputs of an output has a scale and an offset in 16 bits: 5 bits a weight. They are fitted to the weights
by least squares, after a first rounding between the smallest and the largest of them. Output layers stay in
8 bits, see `model.weight_formats.int8`: they decide which token is drawn, and are read once a step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import CheckpointError
from model.weight_formats.format import MadeProduct, WeightFormat
from model.weight_formats.groups import GroupProducts, GroupWeights
from model.weight_formats.int8 import Int8Format
from model.weight_formats.levels import INT4
from model.weight_formats.plain import PlainWeights
from model.weight_formats.stored import StoredWeight

GROUP = 32
TOGETHER = 8  # inputs that kernels decode at once; groups are a multiple of it
FIRST, LAST = -8, 7  # levels
FITS = 2  # of a group; errors of normal weights are 7.82 % after none, 7.49 after one, 7.35 after two, 7.28 after three
BLOCK = 2**16  # weights that are quantized at once, in the cache

Floats = NDArray[np.float32]
OUTPUT_LAYERS = ("lm_head", "embed_out", "head")


def group_size(width: int) -> int:
    """Returns the inputs of a group: GROUP, or less where that divides the inputs of a linear into equal groups."""
    return next((size for size in range(GROUP, 0, -TOGETHER) if width % size == 0), GROUP)


def quantize_groups(rows: Tensor, size: int) -> GroupWeights:
    """Quantizes rows in groups.

    A group that is not finite, or larger than float16 holds, gets a scale that is not finite either.

    Args:
        rows: [out, in] of any float dtype, on the CPU or without numbers.
        size: Inputs of a group.
    """
    out, width = rows.shape
    groups = -(-width // size)
    values = torch.empty((out, width), dtype=torch.uint8, device=rows.device)
    scales, offsets = (torch.empty((out, groups), dtype=torch.float16, device=rows.device) for _ in range(2))
    if not rows.is_meta:
        full = width // size * size
        for start in range(0, out, count := max(1, BLOCK // width)):
            block = slice(start, start + count)
            numbers = rows[block].float().numpy()
            for part in (slice(0, full), slice(full, width)):  # the last group may be smaller
                if part.start < part.stop:
                    of = slice(part.start // size, -(-part.stop // size))
                    places = values[block, part], scales[block, of], offsets[block, of]
                    made = _quantize(numbers[:, part], min(size, part.stop - part.start))
                    for place, found in zip(places, made, strict=True):
                        place.copy_(torch.from_numpy(found))
    return GroupWeights(INT4, values, scales, offsets, size)


def _quantize(rows: Floats, size: int) -> tuple[NDArray[np.uint8], Floats, Floats]:
    """Quantizes rows, [n, in], whose groups all have `size` inputs.

    By numpy: torch's threads would wait for each other after each of these short operations, 5 times as long as the
    operations take where processors are busy.

    Returns:
        Integers 0 .. 15, [n, in], and scales and offsets, [n, groups].
    """
    weights = np.ascontiguousarray(rows.reshape(-1, size).T)  # [size, groups]: sums of a group add rows to rows
    with np.errstate(all="ignore"):
        lowest, highest = weights.min(0), weights.max(0)
        scale = _in_16_bits((highest - lowest) / (LAST - FIRST))
        offset = _in_16_bits(lowest - FIRST * scale)
        mean = weights.mean(0)
        best = values = _nearest(weights, scale, offset)
        best_scale, best_offset, least = scale, offset, _error(weights, values, scale, offset)
        for _ in range(FITS):
            scale, offset = _fitted(weights, mean, values)
            values = _nearest(weights, scale, offset)
            error = _error(weights, values, scale, offset)
            better = error < least
            best, best_scale, best_offset, least = (
                np.where(better, new, old)
                for new, old in ((values, best), (scale, best_scale), (offset, best_offset), (error, least))
            )
    shape = len(rows), -1
    return (best.T - FIRST).astype(np.uint8).reshape(shape), best_scale.reshape(shape), best_offset.reshape(shape)


def _in_16_bits(numbers: Floats) -> Floats:
    return numbers.astype(np.float16).astype(np.float32)


def _nearest(weights: Floats, scale: Floats, offset: Floats) -> Floats:
    """Returns the levels nearest to weights, [size, groups]; 0 for what is not a number."""
    levels = (weights - offset) * (1 / np.where(scale == 0, 1, scale))
    return np.nan_to_num(np.clip(np.rint(levels), FIRST, LAST))


def _fitted(weights: Floats, mean: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Returns the scale and offset with the least squared error for these levels; `mean` is that of the weights."""
    middle = values.mean(0)
    spread = values - middle
    squares, common = np.einsum("ij,ij->j", spread, spread), np.einsum("ij,ij->j", spread, weights - mean)
    scale = _in_16_bits(common / np.where(squares == 0, 1, squares))
    return scale, _in_16_bits(mean - scale * middle)


def _error(weights: Floats, values: Floats, scale: Floats, offset: Floats) -> Floats:
    missed = values * scale + offset - weights
    return np.einsum("ij,ij->j", missed, missed)


class Int4Format(PlainWeights):
    """`GroupFormat` of weights that are stored plain and kept in 4 bits."""

    name = "int4"

    def __init__(self) -> None:
        self._products, self._output = GroupProducts(), Int8Format()

    def for_linear(self, name: str) -> WeightFormat:  # type: ignore[override] # some are in 8 bits
        return self._output if name.split(".")[-1] in OUTPUT_LAYERS else self

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return self._output

    def groups(self, weight: StoredWeight) -> GroupWeights:
        """Quantizes a linear. Raises CheckpointError where a weight is no number that 4 bits and a scale can hold."""
        made = quantize_groups(weight["weight"], group_size(weight.inputs))
        kept = [made.scales, *([] if made.offsets is None else [made.offsets])]
        if not made.values.is_meta and not all(one.isfinite().all() for one in kept):
            raise CheckpointError(
                f"{weight.name} has weights that are infinite, not a number or beyond the range of float16, which "
                "--quantization int4 cannot hold; use int8 or leave it unset"
            )
        return made

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return self._products.product(self, weights, bias, dtype, device)
