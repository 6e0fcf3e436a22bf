"""A checkpoint's tensors as an architecture asks for them: in the model's dtype, on its device, as layers."""

import re
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import lcm
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from model.embedding_table import EightBitTable, EmbeddingTable, PlainTable
from model.errors import CheckpointError
from model.layers import LayerNorm, Linear, Product, RMSNorm, onednn_multiplies
from model.parallel.collective import ONE_RANK, Ranks
from model.parallel.shard import Shard
from model.source import TensorSource, Transposed
from model.weight_formats.activations import RoundedFormat
from model.weight_formats.format import EmbeddingFormat, JointFormat, MadeProduct, WeightFormat
from model.weight_formats.groups import GroupFormat, bring_back
from model.weight_formats.plain import PLAIN, plain_weight
from model.weight_formats.stored import StoredWeight, read_stacked, read_weight

Part = TypeVar("Part")


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
    """Bytes of the weights that the layers keep.

    Attributes:
        bytes: All of them.
        repeated: Those of parts that are not made, where tensors have no numbers and others are alike.
    """

    bytes: int = 0
    repeated: int = 0

    def repeat(self, size: int) -> None:
        """Adds a part like one that was made."""
        self.bytes += size
        self.repeated += size


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
        packs: bool | None = None,
    ) -> None:
        """Makes a view of all tensors.

        Args:
            checkpoint: Source of the tensors.
            dtype: Dtype of the model.
            device: Device that the model runs on.
            weights: Format of the weights.
            maker: Makes products of a back end's own.
            ranks: Ranks that products are divided among.
            packs: Whether an output layer that is tied to the embedding counts as a packed copy of it, as the CPU's
                kernels make it. None: where oneDNN makes one.
        """
        self._packs = device.type != "cuda" and onednn_multiplies(dtype) if packs is None else packs
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

    def floats(self, name: str, *shape: int) -> Tensor:
        """Reads a tensor in float32, whatever the model's dtype is. Raises as `__call__`."""
        tensor = self.checkpoint.take(self.prefix + name, shape, torch.float32).to(self.device)
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
            columns: Inputs of the product. None for all. Where ranks have some of them, one rank adds the bias.
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
            biases = [] if self.ranks.shard.rank else biases
        return self._product(weight_format, weights, torch.cat(biases) if biases else None, gated)

    def summed(self, name: str, width: int, out: int, bias: bool, columns: slice) -> Product:
        """Makes a product of which each rank has these inputs. The ranks' results are added up, the bias once."""
        weight_format = self._weights.for_linear(self.prefix + name)
        weight = self._read(weight_format, name, out, width)
        biases = self._biases([(name, out)], [weight], bias)
        mine = biases[0] if biases and self.ranks.shard.rank == 0 else None
        return self.ranks.summed(self._product(weight_format, [weight.columns(columns)], mine))

    def dense(self, name: str, width: int, out: int) -> Tensor:
        """Reads the weights of a linear for products that are none of its own, [out, width] in the model's dtype.

        Raises:
            CheckpointError: They are stored in a format that has no weights by themselves.
        """
        weight_format = self._weights.for_linear(self.prefix + name)
        weight = self._read(weight_format, name, out, width)
        if list(weight.tensors) == ["weight"]:  # plain, or to be quantized online
            return weight["weight"].to(self.device, self.dtype)
        inner = weight_format.weights if isinstance(weight_format, RoundedFormat) else weight_format
        if not isinstance(inner, GroupFormat):
            raise CheckpointError(f"{self.prefix}{name} is in the format {inner.name}, in which it is not served")
        return bring_back(inner.groups(weight)).to(self.device, self.dtype)

    def product_of(self, weight: Tensor) -> Product:
        """Makes a product of weights [out, in] from `dense`."""
        return self._product(PLAIN, [plain_weight(weight)], None)

    def each(self, prefix: str, count: int, names: Sequence[str], load: Callable[["Tensors"], Part]) -> list[Part]:
        """Loads parts of one shape, whose names begin with the prefix and their numbers.

        Without numbers in tensors, parts in the same weight formats are alike, and one stands for all: each takes a
        millisecond there, and a model has tens of thousands of experts.

        Args:
            prefix: Beginning of the parts' names.
            count: The number of parts.
            names: Linears of a part.
            load: Loads a part from a view of its tensors.
        """
        views = [self.under(f"{prefix}{number}.") for number in range(count)]
        if self.device.type != "meta":
            return [load(view) for view in views]
        made, parts = list[tuple[list[WeightFormat], Part, int]](), list[Part]()
        for view in views:
            formats, before = [self._weights.for_linear(view.prefix + name) for name in names], self.held.bytes
            for others, part, size in made:
                if all(one is other for one, other in zip(formats, others, strict=True)):
                    self.held.repeat(size)
                    parts.append(part)
                    break
            else:
                parts.append(load(view))
                made.append((formats, parts[-1], self.held.bytes - before))
        return parts

    def is_stacked(self, name: str, width: int, out: int) -> bool:
        """Whether the experts of a layer are saved as one tensor."""
        full = self.prefix + name
        described = self._weights.for_linear(full).stacked(out, width)
        return len(described) > 0 and described[0].named(full) in self.checkpoint

    def stacked(
        self,
        name: str,
        count: int,
        width: int,
        out: int,
        gated: bool = False,
        rows: Sequence[slice] | None = None,
        columns: slice | None = None,
        bias: bool = False,
    ) -> list[Product]:
        """Makes the product of each of `count` experts that are saved as one tensor, as `linear`.

        The bias of all experts is one tensor too, `{name}_bias`. Where ranks have some of the inputs, one rank adds it.

        Raises:
            CheckpointError: The format of weights knows no such tensor, or it is missing, or is another one.
        """
        full = self.prefix + name
        weight_format = self._weights.for_linear(full)
        described = weight_format.stacked(out, width)
        if not described:
            raise CheckpointError(f"{full} is one tensor for all experts, which {weight_format.name} does not know")
        runs = [slice(0, out)] if rows is None else [run for _, run in runs_of([out], rows)]
        biases = self(f"{name}_bias", count, out) if bias else None
        if columns is not None and self.ranks.shard.rank:
            biases = None
        stored = read_stacked(self.checkpoint, full, count, out, width, described)
        # Without numbers all are alike. One takes 10 ms there: the start would take 15 s for gpt-oss 20b.
        alike, before, made = self.device.type == "meta", self.held.bytes, list[Product]()
        for number, weight in enumerate(stored[:1] if alike else stored):
            parts = [weight] if rows is None else [weight.rows(run) for run in runs]
            parts = parts if columns is None else [part.columns(columns) for part in parts]
            own = None if biases is None else torch.cat([biases[number, run] for run in runs])
            made.append(self._product(weight_format, parts, own, gated))
        if alike:
            self.held.repeat((count - 1) * (self.held.bytes - before))
            return made * count
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
        """Reads the embeddings of tokens: in 8 bits where an output layer that is tied to them would be quantized."""
        weight_format = self._weights.for_tied(self.prefix + name)
        if not isinstance(weight_format, EmbeddingFormat):
            return PlainTable(self.prefix + name, self(f"{name}.weight", vocabulary, width))
        weight = self._read(weight_format, name, vocabulary, width)
        table = EightBitTable(self.prefix + name, weight_format.embedding(weight, self.device), self.dtype)
        self.held.bytes += table.nbytes
        return table

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
        weight_format = self._weights.for_tied(table.name)
        if not isinstance(table, PlainTable):
            out, width = table.vocabulary, table.width
            described = weight_format.tensors(out, width)
            weight = read_weight(self.checkpoint, table.name, out, width, described)
            return self._product(weight_format, [weight.rows(rows)], bias)
        embedding = table.weight[rows]
        if weight_format is not PLAIN:
            return self._product(weight_format, [plain_weight(embedding)], bias)
        made = self._of_back_end(weight_format, [plain_weight(embedding)], bias)
        if made is not None:
            self.held.bytes += made.nbytes
            return made
        if self._packs:
            self.held.bytes += embedding.nbytes  # the packed copy
        return Linear(embedding, bias)

    def ignore(self, pattern: str) -> None:
        """Ignores tensors whose full name, prefix included, matches the pattern: they are not part of the model."""
        self.checkpoint.ignore(pattern)


def runs_of(widths: Sequence[int], rows: Sequence[slice]) -> list[tuple[int, slice]]:
    """Finds rows in parts that stand one below the other. Returns the part of each run, and its rows of that part.

    No run crosses from a part to the next. Runs that follow each other in a part become one, so that a tensor that
    nothing is left out of is not cut. Those with a step stay as they are.
    """
    runs: list[tuple[int, slice]] = []
    first = 0
    for part, width in enumerate(widths):
        for run in rows:
            if not first <= run.start < first + width:
                continue
            start, stop = run.start - first, run.stop - first
            last = runs[-1][1] if runs and runs[-1][0] == part else None
            if last is not None and last.stop == start and last.step is run.step is None:
                start = runs.pop()[1].start
            runs.append((part, slice(start, stop, run.step)))
        first += width
    return runs


def in_halves(run: slice, dim: int, rotated: int) -> list[slice]:
    """Returns the rows of heads whose rotated pairs are neighbours, in the order that `model.rope` rotates.

    That is the first elements of all pairs, the second ones, then the elements that are not rotated. Scores are sums
    over a head, so they are the same where queries and keys are both in this order.

    Args:
        run: Rows of whole heads.
        dim: Elements of a head.
        rotated: Elements of a head that are rotated.
    """
    made: list[slice] = []
    for head in range(run.start, run.stop, dim):
        made += [slice(head, head + rotated, 2), slice(head + 1, head + rotated, 2)]
        if rotated < dim:
            made.append(slice(head + rotated, head + dim))
    return made


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
