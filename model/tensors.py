"""A checkpoint's tensors as an architecture asks for them: in the model's dtype, on its device, as layers."""

import re
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.forward import ForwardBatch
from model.layers import LayerNorm, Linear, Product, RMSNorm, onednn_multiplies
from model.parallel.collective import ALONE, Ranks
from model.parallel.shard import Shard
from model.quantization import Int8Linear, Scratch


class Source(Protocol):
    """A checkpoint as its reader needs it, see `model.weights.Checkpoint`."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, /) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...

    def __iter__(self) -> Iterator[str]:
        """Names of all tensors."""

    def ignore(self, pattern: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Renamed:
    """A part of a checkpoint, under the names that it would have if it were all. prefixes: pairs of a name's beginning
    as it is asked for, and as it is there.
    """

    source: Source
    prefixes: tuple[tuple[str, str], ...]

    def _there(self, name: str) -> str:
        for asked, there in self.prefixes:
            if name.startswith(asked):
                return there + name.removeprefix(asked)
        return name

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
        return self.source.take(self._there(name), shape, dtype)

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


class MadeProduct(Protocol):
    """A `Product` that says how many bytes its weights take."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None, /) -> Tensor: ...


class ProductMaker(Protocol):
    """Of weights [out, in] each, one below the other, in this dtype. gated: as in `Tensors.product`. quantized: the
    weights are kept in 8 bits.
    """

    def __call__(
        self, weights: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype, gated: bool, quantized: bool, /
    ) -> MadeProduct: ...


@dataclass
class Held:
    """bytes: of the weights that the layers keep."""

    bytes: int = 0


class Tensors:
    """Those whose names begin with `prefix`, which all methods put before the names that they are given.

    quantized: whether products keep their weights in 8 bits. maker: makes products in place of `Linear`. held: what
    all that was made with this or with one that was made from it takes. ranks: among which products are divided, where
    an architecture says how; a rank copies and packs no more than its part.
    """

    def __init__(
        self,
        checkpoint: Source,
        dtype: torch.dtype,
        device: torch.device,
        quantized: bool = False,
        maker: ProductMaker | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.checkpoint, self.dtype, self.device, self.prefix = checkpoint, dtype, device, ""
        self.ranks = ranks
        self.held = Held()
        self._scratch = Scratch(dtype, device) if quantized else None
        self._maker = maker

    @property
    def shard(self) -> Shard:
        return self.ranks.shard

    def of(self, source: Source) -> "Tensors":
        """The same, out of another source."""
        other = copy(self)
        other.checkpoint = source
        return other

    def under(self, prefix: str) -> "Tensors":
        other = copy(self)
        other.prefix += prefix
        return other

    def under_any(self, prefixes: Sequence[str], name: str) -> "Tensors":
        """Under the first of these prefixes under which there is this tensor; the first of all if there is none."""
        return self.under(next((prefix for prefix in prefixes if prefix + name in self), prefixes[0]))

    def plain(self) -> "Tensors":
        """The same, but with products of the plain kind, whole in each rank."""
        other = copy(self)
        other._scratch = other._maker = None
        other.ranks = ALONE
        return other

    def unquantized(self) -> "Tensors":
        """The same, but with products of weights as they are."""
        other = copy(self)
        other._scratch = None
        return other

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Raises CheckpointError where it is missing or has another shape."""
        tensor = self.checkpoint.take(self.prefix + name, shape, self.dtype).to(self.device)
        self.held.bytes += tensor.nbytes
        return tensor

    def stored(self, name: str, *shape: int) -> Tensor:
        """As it stands in its file, for `product`, which copies it."""
        return self.checkpoint.take(self.prefix + name, shape, None)

    def product(self, weights: Sequence[Tensor], bias: Tensor | None = None, gated: bool = False) -> Product:
        """One for several that read the same input. weights: [out, in] each, as they are stored. gated: as in
        `GatedMLP`.
        """
        if self._maker is not None:
            made = self._maker(weights, bias, self.dtype, gated, self._scratch is not None)
            self.held.bytes += made.nbytes
            return made
        if self._scratch is not None:
            quantized = Int8Linear(weights, bias, self._scratch, self.device)
            self.held.bytes += sum(part.nbytes for part in quantized.weights)
            return quantized
        weight = torch.cat([part.to(self.dtype).to(self.device) for part in weights])
        self.held.bytes += weight.nbytes
        return Linear(weight, bias)

    def linear(
        self,
        parts: Sequence[tuple[str, int]] | str,
        width: int,
        out: int = 0,
        bias: bool = False,
        gated: bool = False,
        rows: Sequence[slice] | None = None,
    ) -> Product:
        """parts: name and output width of each, or one name, whose width is `out`. rows: which outputs the rank has,
        each run of them of one part; None for all.
        """
        parts = [(parts, out)] if isinstance(parts, str) else parts
        weights = [self.stored(f"{name}.weight", out, width) for name, out in parts]
        biases = [self(f"{name}.bias", out) for name, out in parts] if bias else []
        if rows is not None:
            weights, biases = _chosen(weights, rows), _chosen(biases, rows)
        return self.product(weights, torch.cat(biases) if bias else None, gated)

    def summed(self, name: str, width: int, out: int, bias: bool, columns: slice) -> Product:
        """One of which each rank has these inputs. What they make is added up, the bias once."""
        biases = self(f"{name}.bias", out) if bias else None
        return self.summed_product(self.stored(f"{name}.weight", out, width), biases, columns)

    def summed_product(self, weight: Tensor, bias: Tensor | None, columns: slice) -> Product:
        """Likewise, of a weight [out, in] as it is stored."""
        mine = bias if self.shard.rank == 0 else None
        return self.ranks.summed(self.product([weight[:, columns]], mine))

    def rms_norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """offset: what is added to the weights (Gemma: 1)."""
        weight = self(f"{name}.weight", width)
        return RMSNorm(weight.float() + offset if offset else weight, eps)

    def layer_norm(self, name: str, width: int, eps: float, bias: bool = True) -> LayerNorm:
        return LayerNorm(self(f"{name}.weight", width), self(f"{name}.bias", width) if bias else None, eps)

    def head(self, name: str, vocabulary: int, width: int, embedding: Tensor | None, bias: bool = False) -> Product:
        """The output layer, of which each rank has a part. embedding: what it is tied to, if it is, and then it is not
        quantized either; some checkpoints save it a second time.
        """
        rows = self.shard.part(vocabulary)
        if embedding is None:
            return self.ranks.gathered(self.linear(name, width, vocabulary, bias, rows=[rows]), vocabulary)
        self.ignore(re.escape(f"{self.prefix}{name}.weight"))
        biases = self(f"{name}.bias", vocabulary)[rows] if bias else None
        return self.ranks.gathered(self._tied(embedding[rows], biases), vocabulary)

    def _tied(self, embedding: Tensor, bias: Tensor | None) -> Product:
        """embedding: the rows that the rank has."""
        if self._maker is not None:
            return self.unquantized().product([embedding], bias)
        if self.device.type != "cuda" and onednn_multiplies(self.dtype):
            self.held.bytes += embedding.nbytes  # the packed copy
        return Linear(embedding, bias)

    def ignore(self, pattern: str) -> None:
        """Tensors whose whole name, prefix included, matches this are not part of the model."""
        self.checkpoint.ignore(pattern)


def _chosen(parts: Sequence[Tensor], rows: Sequence[slice]) -> list[Tensor]:
    """Views of these rows of all parts, one below the other; no run of them crosses from a part to the next."""
    chosen, first = [], 0
    for part in parts:
        last = first + len(part)
        chosen += [part[run.start - first : run.stop - first] for run in rows if first <= run.start < last]
        first = last
    return chosen


def head_by_head(
    at: Tensors, name: str, width: int, shape: tuple[int, int, int], bias: bool, rows: Sequence[slice]
) -> Product:
    """A product whose outputs stand group by group, put into the order of queries, keys, values. shape: groups of
    heads, heads in a group (its queries, one of keys, one of values), head_dim. rows: in this order, those that the
    rank has.
    """
    groups, heads, dim = shape
    order = torch.arange(groups * heads * dim).view(shape)
    order = torch.cat([part.flatten() for part in (order[:, :-2], order[:, -2], order[:, -1])])
    order = torch.cat(_chosen([order], rows))
    weight = at.stored(f"{name}.weight", groups * heads * dim, width)[order]
    return at.product([weight], at(f"{name}.bias", groups * heads * dim)[order.to(at.device)] if bias else None)
