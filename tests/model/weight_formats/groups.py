"""A weight format as GPTQ's, small: 4 bits a weight, a scale for each group of inputs of an output."""

from collections.abc import Callable, Sequence
from math import lcm
from pathlib import Path

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.fields import Fields
from model.forward import ForwardBatch
from model.layers import Linear
from model.weight_formats.format import Blocks, WeightFormat
from model.weight_formats.plain import PLAIN
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight
from tests.model.families.styles import edit_config, edit_tensors

PACKED = 8  # weights of 4 bits in an int32, inputs of one output
ZERO = 8  # what stands for 0

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class GroupedLinear:
    """Brings all weights back for each product, and multiplies as `Linear` does."""

    def __init__(self, qweight: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._qweight, self._scales, self._bias, self._dtype = qweight, scales, bias, dtype
        self.nbytes = qweight.nbytes + scales.nbytes

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        return Linear(unpacked(self._qweight, self._scales).to(self._dtype), self._bias)(x)


class Groups:
    """`WeightFormat`: qweight int32 [in / 8, out] and scales float32 [in / group_size, out]."""

    name = "groups"

    def __init__(self, options: Fields) -> None:
        self._group = options.positive("group_size")
        self._plain = options.get("modules_to_not_convert", list, [])
        self.blocks = Blocks(columns=lcm(PACKED, self._group))

    def for_linear(self, name: str) -> WeightFormat:
        return PLAIN if any(part in name for part in self._plain) else self

    def for_tied(self, name: str) -> WeightFormat:
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        return self._described(out, width, ".")

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:
        return self._described(out, width, "_")

    def _described(self, out: int, width: int, mark: str) -> Sequence[StoredTensor]:
        if width % self._group:
            raise CheckpointError(f"{width} inputs are no multiple of 'group_size' {self._group}")
        values, groups = (width // PACKED, out), (width // self._group, out)
        rows = Axis(1)
        return (
            StoredTensor("qweight", values, torch.int32, rows, Axis(0, PACKED), f"{mark}qweight"),
            StoredTensor("scales", groups, torch.float32, rows, Axis(0, self._group), f"{mark}scales"),
        )

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> GroupedLinear:
        qweight, scales = (torch.cat([part[key] for part in weights], 1).to(device) for key in ("qweight", "scales"))
        return GroupedLinear(qweight, scales, bias, dtype)


def packed(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight: [out, in]. Returns qweight and scales."""
    out, width = weight.shape
    grouped = weight.float().view(out, width // group, group)
    scales = grouped.abs().amax(2) / (ZERO - 1)
    scales = torch.where(scales == 0, 1.0, scales)
    values = (grouped / scales[..., None]).round().to(torch.int32).view(out, width // PACKED, PACKED) + ZERO
    qweight = torch.zeros(out, width // PACKED, dtype=torch.int32)
    for place in range(PACKED):
        qweight |= values[..., place] << 4 * place
    return qweight.T.contiguous(), scales.T.contiguous()


def unpacked(qweight: Tensor, scales: Tensor) -> Tensor:
    """Returns the weight, float32 [out, in]."""
    shifts = torch.arange(0, 4 * PACKED, 4, dtype=torch.int32)
    values = (qweight.T[..., None] >> shifts & 15) - ZERO
    out, groups = scales.T.shape
    return (values.reshape(out, groups, -1) * scales.T[..., None]).reshape(out, -1)


def in_groups(directory: Path, names: Sequence[str], group: int, lying: bool, plain: Sequence[str] = ()) -> None:
    """Stores these weights in groups. lying: they are [in, out], as in GPT-2."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {name: tensor for name, tensor in tensors.items() if name not in names}
        for name in names:
            linear = name.removesuffix(".weight")
            qweight, scales = packed(tensors[name].T if lying else tensors[name], group)
            made |= {f"{linear}.qweight": qweight, f"{linear}.scales": scales}
        return made

    options = {"quant_method": "groups", "group_size": group, "modules_to_not_convert": list(plain)}
    edit_tensors(directory, change)
    edit_config(directory, lambda values: values | {"quantization_config": options})


def brought_back(names: Sequence[str], group: int, lying: bool) -> Change:
    """Makes weights plain again: what their groups stand for."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = dict(tensors)
        for name in names:
            meant = unpacked(*packed(tensors[name].T if lying else tensors[name], group))
            made[name] = meant.T if lying else meant
        return made

    return change
