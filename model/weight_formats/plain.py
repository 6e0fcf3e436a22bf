"""Weights as numbers of 16 or 32 bits, `{name}.weight` of [out, in], in the dtype that the model computes in."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from model.layers import Linear
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight

ROWS, COLUMNS = Axis(0), Axis(1)


class PlainWeights:
    """The stored form of `PlainFormat`, and of formats that are made while a checkpoint is loaded."""

    blocks = Blocks()

    def for_linear(self, name: str) -> Self:  # noqa: ARG002
        return self

    def for_tied(self, name: str) -> "WeightFormat":  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        return (StoredTensor("weight", (out, width), rows=ROWS, columns=COLUMNS),)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:
        """Returns the tensor that transformers 5 holds all experts of a layer in."""
        return (StoredTensor("weight", (out, width), rows=ROWS, columns=COLUMNS, suffix=""),)


class PlainFormat(PlainWeights):
    """`WeightFormat` of weights as they are stored."""

    name = "plain"

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        return Linear(torch.cat([part["weight"].to(dtype).to(device) for part in weights]), bias)


PLAIN = PlainFormat()


def plain_weight(weight: Tensor, name: str = "") -> StoredWeight:
    """Returns the weight, [out, in]."""
    out, width = weight.shape
    return StoredWeight(name, out, width, PLAIN.tensors(out, width), {"weight": weight})
