"""The tensors that hold one linear's weight in a checkpoint, and how they are cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.source import TensorSource


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimension of a tensor that holds the outputs, or the inputs, of a linear.

    Attributes:
        dimension: Index of the dimension.
        block: Outputs or inputs that stand together. No cut goes through a block; the last one may be shorter.
        elements: Elements of the tensor in this dimension for each block.
    """

    dimension: int
    block: int = 1
    elements: int = 1


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of the tensors that a linear is stored in.

    Attributes:
        key: Its name in `StoredWeight`.
        shape: Shape in the file.
        dtype: Dtype in the file. None for any floating point.
        rows: Axis of the outputs. None where the tensor belongs to all of them.
        columns: Axis of the inputs. None where the tensor belongs to all of them.
        suffix: Follows the linear's name in the file. None for "." and the key.
        optional: It may be missing from the file, and then from `StoredWeight`.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    rows: Axis | None = None
    columns: Axis | None = None
    suffix: str | None = None
    optional: bool = False

    def named(self, linear: str) -> str:
        """Returns the tensor's name in the file."""
        return linear + (f".{self.key}" if self.suffix is None else self.suffix)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """The weight of a linear, or some of its outputs and inputs, as tensors of its format.

    Cuts are views: what is copied is copied once, by the product.

    Attributes:
        name: Name of the linear, for errors.
        outputs: Number of the linear's outputs that are here.
        inputs: Number of its inputs that are here.
        described: Descriptions of the tensors, in the order of their keys.
        tensors: Tensors by key.
    """

    name: str
    outputs: int
    inputs: int
    described: Sequence[StoredTensor]
    tensors: Mapping[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def rows(self, run: slice) -> "StoredWeight":
        """Returns these outputs.

        Raises:
            ValueError: The run cuts a block in two.
            CheckpointError: The run takes single outputs out of blocks.
        """
        if run.step is None:
            cut = {one.key: self._cut(one, one.rows, run, self.outputs, "outputs") for one in self.described}
        else:
            cut = {one.key: self._picked(one, run) for one in self.described}
        return replace(self, outputs=len(range(run.start, run.stop, run.step or 1)), tensors=cut)

    def columns(self, run: slice) -> "StoredWeight":
        """Returns these inputs. Raises ValueError where the run cuts a block in two."""
        cut = {one.key: self._cut(one, one.columns, run, self.inputs, "inputs") for one in self.described}
        return replace(self, inputs=run.stop - run.start, tensors=cut)

    def _picked(self, one: StoredTensor, run: slice) -> Tensor:
        """Returns outputs with a step between them."""
        axis = one.rows
        if axis is None:
            return self.tensors[one.key]
        if (axis.block, axis.elements) != (1, 1):
            raise CheckpointError(
                f"{one.named(self.name)} keeps blocks of {axis.block} outputs together. The pairs of this family's "
                "heads must be put in another order, so it is not served in this format of weights"
            )
        return self.tensors[one.key][(slice(None),) * axis.dimension + (run,)]

    def _cut(self, one: StoredTensor, axis: Axis | None, run: slice, size: int, what: str) -> Tensor:
        tensor = self.tensors[one.key]
        if axis is None:
            return tensor
        if run.start % axis.block or (run.stop % axis.block and run.stop != size):
            raise ValueError(
                f"{one.named(self.name)} keeps blocks of {axis.block} {what} together, and cannot be cut into "
                f"{what} {run.start} to {run.stop} of {size}; use --tensor-parallel 1"
            )
        first, last = run.start // axis.block, -(-run.stop // axis.block)
        return tensor[(slice(None),) * axis.dimension + (slice(first * axis.elements, last * axis.elements),)]


def read_weight(
    source: TensorSource, name: str, out: int, width: int, described: Sequence[StoredTensor]
) -> StoredWeight:
    """Returns views of the file. Raises CheckpointError for a tensor that is missing or is another one."""
    described = [one for one in described if not one.optional or one.named(name) in source]
    tensors = {one.key: source.take(one.named(name), one.shape, None, stored=one.dtype) for one in described}
    return StoredWeight(name, out, width, described, tensors)


def read_stacked(
    source: TensorSource, name: str, count: int, out: int, width: int, described: Sequence[StoredTensor]
) -> list[StoredWeight]:
    """Returns the weights of `count` experts. The file holds them as one, with a leading dimension.

    Raises:
        CheckpointError: A tensor is missing or is another one.
    """
    whole = {one.key: _take_stacked(source, name, count, one) for one in described}
    return [
        StoredWeight(f"{name}[{expert}]", out, width, described, {key: all_[expert] for key, all_ in whole.items()})
        for expert in range(count)
    ]


def _take_stacked(source: TensorSource, name: str, count: int, one: StoredTensor) -> Tensor:
    """Returns a tensor of all experts, [count, *shape].

    Plain weights may be saved as [count, in, out], as transformers 4 had Qwen3-VL's.
    """
    try:
        return source.take(one.named(name), (count, *one.shape), None, stored=one.dtype)
    except CheckpointError as error:
        if one.dtype is not None or len(one.shape) != 2:
            raise
        try:
            return source.take(one.named(name), (count, *one.shape[::-1]), None).transpose(1, 2)
        except CheckpointError:
            raise error from None


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Joins weights, one below the other; a single one is not copied.

    Weights without numbers are not joined by torch: its way of doing that takes 0.8 s to import.
    """
    if len(parts) == 1:
        return parts[0]
    if parts[0].is_meta:
        return parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
    return torch.cat(list(parts))
