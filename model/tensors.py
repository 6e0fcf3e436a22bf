"""A checkpoint's tensors as an architecture asks for them: in the model's dtype, on its device, as layers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.layers import LayerNorm, Linear, RMSNorm


class Source(Protocol):
    """A checkpoint as its reader needs it, see `model.weights.Checkpoint`."""

    def __contains__(self, name: str) -> bool: ...

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, copy: bool = True) -> Tensor: ...

    def ignore(self, pattern: str) -> None: ...


class NamedSource(Source, Protocol):
    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""


@dataclass(frozen=True, slots=True)
class Renamed:
    """A part of a checkpoint, under the names that it would have if it were all. prefixes: pairs of a name's beginning
    as it is asked for, and as it is there.
    """

    source: NamedSource
    prefixes: tuple[tuple[str, str], ...]

    def _there(self, name: str) -> str:
        for asked, there in self.prefixes:
            if name.startswith(asked):
                return there + name.removeprefix(asked)
        return name

    def __contains__(self, name: str) -> bool:
        return self._there(name) in self.source

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, copy: bool = True) -> Tensor:
        return self.source.take(self._there(name), shape, dtype, copy)

    def ignore(self, pattern: str) -> None:
        for name in self.source:
            for asked, there in self.prefixes:
                if name.startswith(there) and re.fullmatch(pattern, asked + name.removeprefix(there)):
                    self.source.ignore(re.escape(name))


class Tensors:
    """Those whose names begin with `prefix`, which all methods put before the names that they are given."""

    def __init__(self, checkpoint: Source, dtype: torch.dtype, device: torch.device, prefix: str = "") -> None:
        self.checkpoint, self.dtype, self.device, self.prefix = checkpoint, dtype, device, prefix

    def under(self, prefix: str) -> "Tensors":
        return Tensors(self.checkpoint, self.dtype, self.device, self.prefix + prefix)

    def under_any(self, prefixes: Sequence[str], name: str) -> "Tensors":
        """Under the first of these prefixes under which there is this tensor; the first of all if there is none."""
        return self.under(next((prefix for prefix in prefixes if prefix + name in self), prefixes[0]))

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Raises CheckpointError where it is missing or has another shape."""
        return self.checkpoint.take(self.prefix + name, shape, self.dtype).to(self.device)

    def _view(self, name: str, *shape: int) -> Tensor:
        """The same, for who copies it anyway."""
        return self.checkpoint.take(self.prefix + name, shape, self.dtype, copy=False).to(self.device)

    def linear(self, parts: Sequence[tuple[str, int]] | str, width: int, out: int = 0, bias: bool = False) -> Linear:
        """One product for several that read the same input. parts: name and output width of each, or one name, whose
        width is `out`.
        """
        parts = [(parts, out)] if isinstance(parts, str) else parts
        weight = torch.cat([self._view(f"{name}.weight", out, width) for name, out in parts])
        return Linear(weight, torch.cat([self(f"{name}.bias", out) for name, out in parts]) if bias else None)

    def rms_norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """offset: what is added to the weights (Gemma: 1)."""
        weight = self(f"{name}.weight", width)
        return RMSNorm(weight.float() + offset if offset else weight, eps)

    def layer_norm(self, name: str, width: int, eps: float, bias: bool = True) -> LayerNorm:
        return LayerNorm(self(f"{name}.weight", width), self(f"{name}.bias", width) if bias else None, eps)

    def head(self, name: str, vocabulary: int, width: int, embedding: Tensor | None, bias: bool = False) -> Linear:
        """The output layer. embedding: what it is tied to, if it is; some checkpoints save it a second time."""
        if embedding is not None:
            self.ignore(re.escape(f"{self.prefix}{name}.weight"))
        weight = self._view(f"{name}.weight", vocabulary, width) if embedding is None else embedding
        return Linear(weight, self(f"{name}.bias", vocabulary) if bias else None)

    def ignore(self, pattern: str) -> None:
        """Tensors whose whole name, prefix included, matches this are not part of the model."""
        self.checkpoint.ignore(pattern)


def head_by_head(at: Tensors, name: str, width: int, shape: tuple[int, int, int], bias: bool) -> Linear:
    """A product whose outputs stand group by group, put into the order of queries, keys, values. shape: groups of
    heads, heads in a group (its queries, one of keys, one of values), head_dim.
    """
    groups, heads, dim = shape
    order = torch.arange(groups * heads * dim).view(shape)
    order = torch.cat([part.flatten() for part in (order[:, :-2], order[:, -2], order[:, -1])]).to(at.device)
    weight = at(f"{name}.weight", groups * heads * dim, width)[order]
    return Linear(weight, at(f"{name}.bias", groups * heads * dim)[order] if bias else None)
