"""Random weights in groups, as quantized checkpoints have them, and their products by kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.gpu.float8_product import Float8Product, ScaledFloat8Weights, can_multiply
from model.gpu.group_linear import GroupProduct
from model.weight_formats.activations import RowRounding
from model.weight_formats.groups import GroupWeights, bring_back
from model.weight_formats.levels import E2M1, E4M3, INT4, INT8, Levels
from model.weight_formats.plain import PlainFormat
from model.weight_formats.scratch import Scratch
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight

DrawnProduct = GroupProduct | Float8Product


@dataclass(frozen=True, slots=True)
class GroupKind:
    """A form of weights, as kernels read it.

    Attributes:
        levels: Numbers of the stored integers.
        size: Inputs of a group. None for one group of all inputs.
        scales: Dtype of scales.
        offsets: Dtype of offsets. None without.
        rounding: Rounding of the rows that are multiplied. None without.
    """

    levels: Levels
    size: int | None
    scales: torch.dtype
    offsets: torch.dtype | None = None
    rounding: RowRounding | None = None


INT8_ROWS = GroupKind(INT8, None, torch.float32)
INT4_GROUPS = GroupKind(INT4, 32, torch.float16, torch.float16)
FP8_BLOCKS = GroupKind(E4M3, 128, torch.float32)
DENSE = {
    "int8": INT8_ROWS,
    "int4, groups of 32": INT4_GROUPS,
    "GPTQ, groups of 128": GroupKind(INT4, 128, torch.float16),
    "AWQ, groups of 128": GroupKind(INT4, 128, torch.float16, torch.float32),
    "fp8, blocks of 128": FP8_BLOCKS,
    "fp8 rows and weights": GroupKind(E4M3, None, torch.float32, rounding=RowRounding(True)),
}
"""Kinds of a dense model: of --quantization int8 and int4, and of checkpoints."""
OF_EXPERTS = {
    "int8": INT8_ROWS,
    "int4, groups of 32": INT4_GROUPS,
    "fp8, blocks of 128": FP8_BLOCKS,
    "mxfp4, groups of 32": GroupKind(E2M1, 32, torch.bfloat16),
}
"""Kinds of experts."""


class DrawnFormat(PlainFormat):
    """`model.weight_formats.groups.GroupFormat` of weights that `draw_weight` makes."""

    name = "drawn"

    def __init__(self, kind: GroupKind) -> None:
        self._kind = kind

    def groups(self, weight: StoredWeight) -> GroupWeights:
        made, kind = weight.tensors, self._kind
        size = weight.inputs if kind.size is None else kind.size
        return GroupWeights(kind.levels, made["values"], made["scales"], made.get("offsets"), size)


def draw_weight(kind: GroupKind, outputs: int, inputs: int, random: torch.Generator) -> StoredWeight:
    """Draws a weight whose numbers have about the variance 1 / inputs, on the device of the generator."""
    device, shape = random.device, (outputs, inputs)
    if kind.levels == E4M3:
        normal, deviation = torch.randn(shape, generator=random, device=device), 1.0
        values = normal.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        count, deviation = len(kind.levels.numbers), float(torch.tensor(kind.levels.numbers).std())
        values = torch.randint(0, count, shape, generator=random, dtype=torch.uint8, device=device)
    groups = 1 if kind.size is None else -(-inputs // kind.size)
    scales = torch.rand((outputs, groups), generator=random, device=device).add_(0.5).div_(deviation * inputs**0.5)
    tensors = {"values": values, "scales": scales.to(kind.scales)}
    if kind.offsets is not None:
        offsets = torch.randn((outputs, groups), generator=random, device=device).mul_(scales)
        tensors["offsets"] = offsets.to(kind.offsets)
    described = [StoredTensor(key, tuple(tensor.shape), rows=Axis(0)) for key, tensor in tensors.items()]
    return StoredWeight("drawn", outputs, inputs, described, tensors)


def product_of(kind: GroupKind, weights: Sequence[StoredWeight], dtype: torch.dtype, scratch: Scratch) -> DrawnProduct:
    """Makes the product of weights, one below the other, on their device.

    Args:
        kind: Kind of the weights.
        weights: The weights.
        dtype: Dtype of the product.
        scratch: Room that products share.

    Raises:
        RuntimeError: The device does not multiply float8, and rows are rounded to it.
    """
    device = weights[0]["values"].device
    form = DrawnFormat(kind)
    if kind.rounding is None:
        return GroupProduct(form, weights, None, dtype, scratch, device)
    made = ScaledFloat8Weights.of(form, weights, device) if can_multiply(kind.rounding, dtype, device) else None
    if made is None:
        raise RuntimeError("the device does not multiply float8")
    return Float8Product(kind.rounding, made, None)


def exact_weight(kind: GroupKind, weight: StoredWeight) -> Tensor:
    """Returns the numbers that a weight stands for, [out, in] float64."""
    return bring_back(DrawnFormat(kind).groups(weight)).double()


def exact_rows(kind: GroupKind, x: Tensor) -> Tensor:
    """Returns the rows that are multiplied, [rows, in] float64: x, rounded where the kind says so."""
    return x.double() if kind.rounding is None else kind.rounding(x.float()).double()
