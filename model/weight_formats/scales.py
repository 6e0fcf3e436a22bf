"""Scales of stored weights: one for a tensor, an output, a group of inputs, or a block of outputs and inputs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """How the scales of a linear, or its zero points, lie in a checkpoint.

    Attributes:
        rows: Outputs that share a scale. None for all.
        columns: Inputs that share a scale. None for all. The last ones may be fewer.
        ordered: Whether groups are runs of inputs. Otherwise a tensor names the group of each input, and a part of
            the inputs needs the scales of all groups.
    """

    rows: int | None = None
    columns: int | None = None
    ordered: bool = True

    def groups(self, width: int) -> int:
        """Returns the number of groups of `width` inputs."""
        return 1 if self.columns is None else -(-width // self.columns)

    def described(
        self, key: str, out: int, width: int, dtype: torch.dtype | None = None, suffix: str | None = None
    ) -> StoredTensor:
        """Returns the tensor that a linear's scales are stored in: [1] for one of all, [outputs, groups] otherwise."""
        if self.rows is None:
            return StoredTensor(key, (1,), dtype, suffix=suffix)
        shape = (-(-out // self.rows), self.groups(width))
        columns = Axis(1, self.columns) if self.columns is not None and self.ordered else None
        return StoredTensor(key, shape, dtype, Axis(0, self.rows), columns, suffix)

    def of_outputs(self, stored: Tensor, outputs: int) -> Tensor:
        """Returns the stored values for each of these outputs, [outputs, groups]."""
        if self.rows is None:
            return stored.view(1, 1).expand(outputs, 1)
        return stored if self.rows == 1 else stored.repeat_interleave(self.rows, dim=0)[:outputs]


def kept_scales(scales: Tensor) -> Tensor:
    """Returns scales as they are stored where kernels read that, in float32 otherwise."""
    return scales if scales.dtype in (torch.float16, torch.bfloat16, torch.float32) else scales.float()


def finite_scales(weight: StoredWeight, key: str) -> Tensor:
    """Returns scales as `kept_scales`. Raises CheckpointError where one is not finite."""
    scales = kept_scales(weight[key])
    if not scales.is_meta and not torch.isfinite(scales).all():
        raise CheckpointError(f"{weight.name}.{key} holds values that are infinite or not a number")
    return scales


def float8_values(weight: StoredWeight, key: str = "weight") -> Tensor:
    """Returns the bytes of e4m3 weights, uint8. Raises CheckpointError where one is not a number."""
    values = weight[key].view(torch.uint8)
    if not values.is_meta and ((values & 0x7F) == 0x7F).any():
        raise CheckpointError(f"{weight.name}.{key} holds float8 values that are not a number")
    return values
