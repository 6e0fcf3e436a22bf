"""Sources of a model's tensors: a checkpoint, or a view of one under other names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorSource(Protocol):
    """A checkpoint as its reader needs it, see `model.weights.Checkpoint`."""

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, /, stored: torch.dtype | None = None
    ) -> Tensor:
        """Reads a tensor.

        Args:
            name: Name of the tensor.
            shape: Shape that it must have.
            dtype: Dtype that it is converted to, as a copy. None for a view of its file.
            stored: Dtype that it must have in its file. None for any floating point.

        Raises:
            CheckpointError: It is missing, or is another one.
        """

    def __contains__(self, name: str) -> bool: ...

    def __iter__(self) -> Iterator[str]:
        """Yields the names of all tensors."""

    def ignore(self, pattern: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Renamed:
    """A part of a checkpoint, with the names that its tensors would have in a checkpoint of their own.

    Attributes:
        prefixes: Pairs of a name's beginning as it is asked for, and as it is stored.
    """

    source: TensorSource
    prefixes: tuple[tuple[str, str], ...]

    def _there(self, name: str) -> str:
        for asked, there in self.prefixes:
            if name.startswith(asked):
                return there + name.removeprefix(asked)
        return name

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, /, stored: torch.dtype | None = None
    ) -> Tensor:
        return self.source.take(self._there(name), shape, dtype, stored=stored)

    def __contains__(self, name: str) -> bool:
        return self._there(name) in self.source

    def __iter__(self) -> Iterator[str]:
        for name in self.source:
            for asked, there in self.prefixes:
                if name.startswith(there):
                    yield asked + name.removeprefix(there)

    def ignore(self, pattern: str) -> None:
        for name in self:
            if re.fullmatch(pattern, name):
                self.source.ignore(re.escape(self._there(name)))


@dataclass(frozen=True, slots=True)
class Transposed:
    """A checkpoint whose `{name}.weight` of a linear layer is [in, out] (GPT-2), or of all experts of a layer.

    Experts' is [experts, in, out], and has no `.weight` behind its name (gpt-oss). Other tensors are as they are.
    """

    source: TensorSource

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, /, stored: torch.dtype | None = None
    ) -> Tensor:
        if len(shape) == 2 and name.endswith(".weight"):
            return self.source.take(name, shape[::-1], dtype, stored=stored).T
        if len(shape) == 3 and name.endswith("_proj"):
            return self.source.take(name, (shape[0], *shape[:0:-1]), dtype, stored=stored).transpose(1, 2)
        return self.source.take(name, shape, dtype, stored=stored)

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def ignore(self, pattern: str) -> None:
        self.source.ignore(pattern)
