"""A checkpoint's tensors as an architecture asks for them: in the model's dtype, on its device, as layers."""

import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import lcm
from typing import Protocol

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.layers import LayerNorm, Linear, Product, RMSNorm, onednn_multiplies
from model.parallel.collective import ONE_RANK, Ranks
from model.parallel.shard import Shard
from model.source import TensorSource, Transposed
from model.weight_formats.format import JointFormat, MadeProduct, WeightFormat
from model.weight_formats.plain import PLAIN, PlainWeights, plain_weight
from model.weight_formats.stored import StoredWeight, read_stacked, read_weight


class ProductMaker(Protocol):
    """Makes the products of a back end.

    Takes the format, its weights (one below the other), their bias and the dtype of the model. The last argument is
    whether the first half of the outputs are gates of the second, as in `GatedMLP`. None is for a format that the back
    end leaves to `WeightFormat.product`.
    """

    def __call__(
        self,
        weight_format: WeightFormat,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        gated: bool,
        /,
    ) -> MadeProduct | None: ...


@dataclass
class Held:
    """Bytes of the weights that the layers keep."""

    bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTable:
    """Embeddings of tokens, which an output layer may be tied to.

    Attributes:
        name: Full name in the checkpoint, without a suffix.
        weight: [vocabulary, width], in the model's dtype.
    """

    name: str
    weight: Tensor


class Tensors:
    """A view of a checkpoint's tensors whose names begin with `prefix`; methods take names without it.

    Attributes:
        checkpoint: Source of the tensors.
        dtype: Dtype of the model.
        device: Device that the model runs on.
        prefix: Beginning of the tensors' names.
        ranks: Ranks that products are divided among, where an architecture says how. A rank copies and packs no more
            than its part.
        held: Memory of all layers that this view, or one made from it, has made.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        weights: WeightFormat = PLAIN,
        maker: ProductMaker | None = None,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        self.checkpoint, self.dtype, self.device, self.prefix = checkpoint, dtype, device, ""
        self.ranks = ranks
        self.held = Held()
        self._weights, self._maker = weights, maker

    @property
    def shard(self) -> Shard:
        """The rank's shard. Blocks of the weight format stay together in it."""
        return replace(self.ranks.shard, grain=lcm(*self._weights.blocks))

    def of(self, source: TensorSource) -> "Tensors":
        """Returns the same view of another source."""
        other = copy(self)
        other.checkpoint = source
        return other

    def under(self, prefix: str) -> "Tensors":
        other = copy(self)
        other.prefix += prefix
        return other

    def under_any(self, prefixes: Sequence[str], name: str) -> "Tensors":
        """Returns the view under the first prefix that has this tensor, or under the first of all if none has it."""
        return self.under(next((prefix for prefix in prefixes if prefix + name in self), prefixes[0]))

    def plain(self) -> "Tensors":
        """Returns the same with plain products that no rank divides."""
        other = self.unquantized()
        other._maker = None
        other.ranks = ONE_RANK
        return other

    def unquantized(self) -> "Tensors":
        """Returns the same with products of weights as they are stored."""
        other = copy(self)
        other._weights = PLAIN
        return other

    def transposed(self) -> "Tensors":
        """Returns the same, for a family that saves the plain weights of linears as [in, out]."""
        return self.of(Transposed(self.checkpoint))

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self.checkpoint

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Reads a tensor. Raises CheckpointError where it is missing or has another shape."""
        tensor = self.checkpoint.take(self.prefix + name, shape, self.dtype).to(self.device)
        self.held.bytes += tensor.nbytes
        return tensor

    def linear(
        self,
        parts: Sequence[tuple[str, int]] | str,
        width: int,
        out: int = 0,
        bias: bool = False,
        gated: bool = False,
        rows: Sequence[slice] | None = None,
        columns: slice | None = None,
    ) -> Product:
        """Makes one product of several linears that read the same input.

        Args:
            parts: Name and output width of each, or one name, whose width is `out`.
            width: Width of the input.
            out: Output width of the one part, where `parts` is a name.
            bias: Whether the linears have a bias.
            gated: See `GatedMLP`.
            rows: Outputs of the product, in its order, each run of them of one part. None for all.
            columns: Inputs of the product. None for all.
        """
        parts = [(parts, out)] if isinstance(parts, str) else parts
        weight_format, formats = self._formats([name for name, _ in parts])
        weights = [self._read(form, name, out, width) for form, (name, out) in zip(formats, parts, strict=True)]
        biases = self._biases(parts, weights, bias)
        if rows is not None:
            runs = runs_of([out for _, out in parts], rows)
            weights = [weights[part].rows(run) for part, run in runs]
            biases = [biases[part][run] for part, run in runs] if bias else []
        if columns is not None:
            weights = [weight.columns(columns) for weight in weights]
        return self._product(weight_format, weights, torch.cat(biases) if bias else None, gated)

    def summed(self, name: str, width: int, out: int, bias: bool, columns: slice) -> Product:
        """Makes a product of which each rank has these inputs. The ranks' results are added up, the bias once."""
        weight_format = self._weights.for_linear(self.prefix + name)
        weight = self._read(weight_format, name, out, width)
        biases = self._biases([(name, out)], [weight], bias)
        mine = biases[0] if biases and self.ranks.shard.rank == 0 else None
        return self.ranks.summed(self._product(weight_format, [weight.columns(columns)], mine))

    def stacked(
        self,
        name: str,
        count: int,
        width: int,
        out: int,
        gated: bool = False,
        rows: Sequence[slice] | None = None,
        columns: slice | None = None,
    ) -> list[Product] | None:
        """Makes the product of each of `count` experts, as `linear`. None where they are not saved as one tensor."""
        full = self.prefix + name
        weight_format = self._weights.for_linear(full)
        described = weight_format.stacked(out, width)
        if not described or described[0].named(full) not in self.checkpoint:
            return None
        made = []
        for weight in read_stacked(self.checkpoint, full, count, out, width, described):
            parts = [weight] if rows is None else [weight.rows(run) for _, run in runs_of([out], rows)]
            parts = parts if columns is None else [part.columns(columns) for part in parts]
            made.append(self._product(weight_format, parts, None, gated))
        return made

    def _biases(self, parts: Sequence[tuple[str, int]], weights: Sequence[StoredWeight], bias: bool) -> list[Tensor]:
        """Returns the biases of linears, none where they have none: what a format stores as one is zeros then."""
        if bias:
            return [self(f"{name}.bias", out) for name, out in parts]
        for weight in weights:
            if "bias" in weight.tensors and weight["bias"].any():
                raise CheckpointError(
                    f"{weight.name}.bias is not zero, and not part of the model that config.json describes. Do "
                    "config.json and the weights belong together?"
                )
        return []

    def _formats(self, names: Sequence[str]) -> tuple[WeightFormat, list[WeightFormat]]:
        """Returns the format of the product of these linears, and that of each.

        Raises CheckpointError where they differ and no format makes a product of them.
        """
        formats = [self._weights.for_linear(self.prefix + name) for name in names]
        if all(other is formats[0] for other in formats):
            return formats[0], formats
        joints = [one.joint if isinstance(one, JointFormat) else one for one in formats]
        if any(other is not joints[0] for other in joints):
            said = ", ".join(f"{name} {one.name}" for name, one in zip(names, formats, strict=True))
            raise CheckpointError(f"{self.prefix}: parts of one product are in several weight formats: {said}")
        return joints[0], formats

    def _read(self, weight_format: WeightFormat, name: str, out: int, width: int) -> StoredWeight:
        """Reads views of the files. `_product` copies them."""
        return read_weight(self.checkpoint, self.prefix + name, out, width, weight_format.tensors(out, width))

    def _product(
        self, weight_format: WeightFormat, weights: Sequence[StoredWeight], bias: Tensor | None, gated: bool = False
    ) -> Product:
        made = self._of_back_end(weight_format, weights, bias, gated)
        if made is None:
            made = weight_format.product(weights, bias, self.dtype, self.device)
        self.held.bytes += made.nbytes
        return made

    def _of_back_end(
        self, weight_format: WeightFormat, weights: Sequence[StoredWeight], bias: Tensor | None, gated: bool = False
    ) -> MadeProduct | None:
        """Makes the back end's own product. None where it has none for this format."""
        return None if self._maker is None else self._maker(weight_format, weights, bias, self.dtype, gated)

    def rms_norm(self, name: str, width: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """Makes an RMSNorm; `offset` is added to the weights (Gemma: 1)."""
        weight = self(f"{name}.weight", width)
        return RMSNorm(weight.float() + offset if offset else weight, eps)

    def layer_norm(self, name: str, width: int, eps: float, bias: bool = True) -> LayerNorm:
        return LayerNorm(self(f"{name}.weight", width), self(f"{name}.bias", width) if bias else None, eps)

    def table(self, name: str, vocabulary: int, width: int) -> EmbeddingTable:
        """Reads the embeddings of tokens."""
        return EmbeddingTable(self.prefix + name, self(f"{name}.weight", vocabulary, width))

    def head(
        self, name: str, vocabulary: int, width: int, embedding: EmbeddingTable | None, bias: bool = False
    ) -> Product:
        """Makes the output layer, of which each rank has a part.

        A tied output layer is multiplied in the format that `WeightFormat.for_tied` says. Some checkpoints save it a
        second time.

        Args:
            name: Name of the layer.
            vocabulary: Outputs.
            width: Width of the input.
            embedding: Embedding that the layer is tied to, None for an untied one.
            bias: Whether it has a bias.
        """
        places = self.shard.parts(vocabulary)
        rows = places[self.ranks.shard.rank]
        if embedding is None:
            return self.ranks.gathered(self.linear(name, width, vocabulary, bias, rows=[rows]), places)
        self.ignore(re.escape(f"{self.prefix}{name}.weight"))
        biases = self(f"{name}.bias", vocabulary)[rows] if bias else None
        return self.ranks.gathered(self._tied(embedding, rows, biases), places)

    def _tied(self, table: EmbeddingTable, rows: slice, bias: Tensor | None) -> Product:
        """Makes the rank's rows of the tied output layer."""
        embedding, weight_format = table.weight[rows], self._weights.for_tied(table.name)
        if isinstance(weight_format, PlainWeights):
            weights = [plain_weight(embedding)]
        else:
            out, width = table.weight.shape
            described = weight_format.tensors(out, width)
            weights = [read_weight(self.checkpoint, table.name, out, width, described).rows(rows)]
        made = self._of_back_end(weight_format, weights, bias)
        if made is None and weight_format is not PLAIN:
            made = weight_format.product(weights, bias, self.dtype, self.device)
        if made is not None:
            self.held.bytes += made.nbytes
            return made
        if self.device.type != "cuda" and onednn_multiplies(self.dtype):
            self.held.bytes += embedding.nbytes  # the packed copy
        return Linear(embedding, bias)

    def ignore(self, pattern: str) -> None:
        """Ignores tensors whose full name, prefix included, matches the pattern: they are not part of the model."""
        self.checkpoint.ignore(pattern)


def runs_of(widths: Sequence[int], rows: Sequence[slice]) -> list[tuple[int, slice]]:
    """Finds rows in parts that stand one below the other. Returns the part of each run, and its rows of that part.

    No run crosses from a part to the next. Runs that follow each other in a part become one, so that a tensor that
    nothing is left out of is not cut.
    """
    runs: list[tuple[int, slice]] = []
    first = 0
    for part, width in enumerate(widths):
        for run in rows:
            if not first <= run.start < first + width:
                continue
            start, stop = run.start - first, run.stop - first
            if runs and runs[-1][0] == part and runs[-1][1].stop == start:
                start = runs.pop()[1].start
            runs.append((part, slice(start, stop)))
        first += width
    return runs


def head_by_head(
    at: Tensors, name: str, width: int, shape: tuple[int, int, int], bias: bool, rows: Sequence[slice]
) -> Product:
    """Makes a product whose outputs stand group by group, in the order of queries, keys, values.

    Args:
        at: Tensors of the model.
        name: Name of the linear.
        width: Width of the input.
        bias: Whether it has a bias.
        shape: Groups of heads, heads in a group (its queries, one of keys, one of values), head_dim.
        rows: Outputs that the rank has, in this order.
    """
    groups, heads, dim = shape
    places = torch.arange(groups * heads).view(groups, heads)
    order = torch.cat([part.flatten() for part in (places[:, :-2], places[:, -2], places[:, -1])]).tolist()
    mine = [order[head] for run in rows for head in range(run.start // dim, run.stop // dim)]
    runs = [slice(head * dim, (head + 1) * dim) for head in mine]
    return at.linear(name, width, groups * heads * dim, bias, rows=runs)
