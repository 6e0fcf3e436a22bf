"""Activations in 8 bits: rows are rounded before a product, where a checkpoint's scheme says so (W8A8, FP8).

The scale of a row depends on the row alone, or is the checkpoint's. So a row gets the same bits in any batch. The
product itself is in the model's dtype: rounded rows are scaled back before it, which rounds them to that dtype once
more. Kernels that multiply integers, and GPUs that multiply float8, scale their sums instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, lcm
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from model.errors import CheckpointError
from model.forward import ForwardBatch
from model.weight_formats.format import Blocks, MadeProduct, WeightFormat
from model.weight_formats.plain import PLAIN
from model.weight_formats.stored import StoredTensor, StoredWeight

LARGEST_INT8, LARGEST_E4M3 = 127.0, 448.0


@dataclass(frozen=True, slots=True)
class RowRounding:
    """Rounds rows to 8 bits and back.

    Attributes:
        floating: Whether the 8 bits are float8 e4m3 instead of int8.
        size: Inputs that share a scale. None for all of a row.
        scale: Scale of all rows (static). None for one of each row (dynamic): the largest absolute value / 127 or 448,
            as vLLM's kernels have it. The library compressed-tensors divides by 127.5 where it emulates int8.
    """

    floating: bool
    size: int | None = None
    scale: float | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Rounds x [rows, in]. Returns its dtype."""
        if self.scale is not None:
            return self._rounded(x.float(), torch.full((1, 1), self.scale, device=x.device)).to(x.dtype)
        width = x.shape[1]
        size = width if self.size is None else self.size
        parts = F.pad(x.float(), (0, -width % size)).unflatten(1, (-1, size))
        return self._rounded(parts, self._scales(parts)).flatten(1)[:, :width].to(x.dtype)

    def _scales(self, parts: Tensor) -> Tensor:
        """Returns the scale of each part of rows, [..., 1]."""
        scale = parts.abs().amax(-1, keepdim=True) / (LARGEST_E4M3 if self.floating else LARGEST_INT8)
        # A row of zeros stays one, also where its largest value / 127 is no float32 above 0.
        return torch.where(scale == 0, 1.0, scale)

    def _rounded(self, x: Tensor, scale: Tensor) -> Tensor:
        """Rounds float32. What is not a number stays so, and shows in the logits."""
        x = x / scale
        if self.floating:
            x = _in_float8(x).float()
        else:
            x = x.round().clamp(-LARGEST_INT8 - 1, LARGEST_INT8)
        return x * scale


def _in_float8(x: Tensor) -> Tensor:
    return x.clamp(-LARGEST_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)


class RoundedProduct:
    """A product whose rows are rounded."""

    def __init__(self, rounding: RowRounding, product: MadeProduct) -> None:
        self._rounding, self._product = rounding, product

    @property
    def nbytes(self) -> int:
        return self._product.nbytes

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        return self._product(self._rounding(x), batch)


class SideBySide:
    """Products of the same rows, each with outputs of its own.

    Attributes:
        parts: The products.
    """

    def __init__(self, parts: Sequence[MadeProduct]) -> None:
        self.parts = parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        return torch.cat([part(x, batch) for part in self.parts], dim=1)


Make = Callable[[RowRounding, list[StoredWeight], Tensor | None], MadeProduct]
"""Makes the product of linears whose rows are rounded alike, with their bias."""


class RoundedFormat:
    """A weight format whose products round their rows.

    It has no `groups`, so that no back end multiplies with its weights alone.

    Attributes:
        weights: Format of the weights.
    """

    def __init__(self, weights: WeightFormat, rounding: RowRounding, scale_key: str | None = None) -> None:
        """Takes the format of the weights.

        Args:
            weights: Format of the weights.
            rounding: Rounding of the rows; without a scale, where this is read.
            scale_key: Key of the scale of each linear's inputs. None where scales are computed.
        """
        self.name = weights.name
        self.weights = weights
        self._rounding, self._scale_key = rounding, scale_key
        rows, columns = weights.blocks
        self.blocks = Blocks(rows, lcm(columns, rounding.size or 1))

    def for_linear(self, name: str) -> Self:  # noqa: ARG002
        return self

    def for_tied(self, name: str) -> WeightFormat:  # noqa: ARG002
        return PLAIN

    def tensors(self, out: int, width: int) -> Sequence[StoredTensor]:
        scale = () if self._scale_key is None else (StoredTensor(self._scale_key, (1,)),)
        return (*self.weights.tensors(out, width), *scale)

    def stacked(self, out: int, width: int) -> Sequence[StoredTensor]:  # noqa: ARG002
        return ()

    def product(
        self, weights: Sequence[StoredWeight], bias: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> MadeProduct:
        """Makes a product. Raises as `parts`."""

        def make(rounding: RowRounding, run: list[StoredWeight], own: Tensor | None) -> MadeProduct:
            return RoundedProduct(rounding, self.weights.product(run, own, dtype, device))

        return self.joined(weights, bias, make)

    def joined(self, weights: Sequence[StoredWeight], bias: Tensor | None, make: Make) -> MadeProduct:
        """Makes a product of its parts. Raises as `parts`.

        Args:
            weights: See `WeightFormat.product`.
            bias: Bias of all outputs.
            make: Makes a part.
        """
        parts, start = [], 0
        for rounding, run in self.parts(weights):
            stop = start + sum(weight.outputs for weight in run)
            parts.append(make(rounding, run, None if bias is None else bias[start:stop]))
            start = stop
        return parts[0] if len(parts) == 1 else SideBySide(parts)

    def parts(self, weights: Sequence[StoredWeight]) -> list[tuple[RowRounding, list[StoredWeight]]]:
        """Returns the parts of a product whose rows are rounded alike: neighbours with the same scale.

        Raises:
            CheckpointError: A scale cannot be one.
            ValueError: A rank has a part of the inputs, and the scale of a row is that of all of them.
        """
        if self._scale_key is None and self._rounding.size is None:
            for weight in weights:
                _check_whole(weight)
        return [(rounding, list(run)) for rounding, run in groupby(weights, self._rounding_of)]

    def _rounding_of(self, weight: StoredWeight) -> RowRounding:
        """Returns the rounding of a linear's rows. Raises CheckpointError for a scale that cannot be one."""
        if self._scale_key is None or weight[self._scale_key].is_meta:
            return self._rounding
        scale = weight[self._scale_key].float().item()
        if not 0 < scale < inf:
            raise CheckpointError(f"{weight.name}.{self._scale_key} is {scale}, must be a number above 0")
        return replace(self._rounding, scale=scale)


def _check_whole(weight: StoredWeight) -> None:
    """Raises ValueError where some of a linear's inputs are cut away."""
    for one in weight.described:
        if one.columns is None:
            continue
        dimension = one.columns.dimension
        if weight[one.key].shape[dimension] != one.shape[dimension]:
            raise ValueError(
                f"{weight.name}: the inputs of a token are rounded with one scale, which a rank that has "
                f"{weight.inputs} of them does not know; use --tensor-parallel 1, and more engines instead"
            )
