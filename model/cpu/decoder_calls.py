"""Writes a decoder as calls of kernels for the CPU, in the order of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model import layers
from model.blocks import MLP, Chain, Experts, GatedMLP, Parallel, PostNorm, PreNorm, Sandwich, SelfAttention, Together
from model.cpu.attention_backend import CpuAttention
from model.cpu.cut_rounds import CutRounds
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import ELEMENTS, FLOAT, Element
from model.cpu.kernels.experts import MOST_EXPERTS, Routes, write_choice, write_jobs, write_mixed
from model.cpu.kernels.heads import HeadNorm
from model.cpu.kernels.product import KernelLinear, NotCompiled, experts_call
from model.cpu.kernels.program import Argument, Call
from model.cpu.kernels.rows import Norm, write_embedding, write_norm, write_rounded
from model.cpu.kernels.values import LANES
from model.cpu.rounds import HostCall, Rounds
from model.cpu.shared_memory import SharedMemory
from model.cpu.step_values import Cells, StepAngles, StepDepths
from model.decoder import Decoder
from model.layers import Activation, LayerNorm, RMSNorm
from model.parallel.collective import Gathered, Summed
from model.rope import Rope

ACTIVATIONS: Mapping[Activation, str] = {
    layers.silu: "silu", layers.gelu: "gelu", layers.gelu_tanh: "gelu_tanh", layers.quick_gelu: "quick_gelu",
    F.relu: "relu",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Calls of a decoder, in the order of a step.

    Attributes:
        embedding: The embedding.
        rest: Everything after it, for a step without images.
        with_depths: The same, with the further depths of images' features.
    """

    embedding: list[Call | HostCall]
    rest: list[Call | HostCall]
    with_depths: list[Call | HostCall]


class DecoderCalls:
    """Writes the calls of a decoder, with the buffers that they read and write."""

    def __init__(self, decoder: Decoder, attention: CpuAttention, tokens: int, wanted: int) -> None:
        self._decoder, self._attention, self._tokens, self._wanted = decoder, attention, tokens, wanted
        table, projection = decoder.embedding.tokens, decoder.embedding.projection
        self._element = ELEMENTS[table.dtype]
        self._calls: list[Call | HostCall] = []
        self._buffers: dict[tuple[str, int, str, int], Buffer] = {}
        self._routes: dict[tuple[int, int], Routes] = {}
        self._angle_tables: dict[int, tuple[Tensor, Tensor]] = {}
        self.cells = Cells(tokens)
        self.angles: dict[int, StepAngles] = {}  # by rotary embedding
        width = table.shape[1] if projection is None else _kernel(projection).outputs
        self._check_width("the hidden size", width)
        self.stream = Buffer.of(tokens, width, FLOAT)
        self._hidden = width
        self.depths = StepDepths.of(len(decoder.deepstack), tokens, width)
        self.logits = Buffer.of(wanted, table.shape[0], FLOAT)
        self.rounds = self._rounds_of(decoder.head)

    def _rounds_of(self, head: object) -> Rounds | None:
        if not isinstance(head, Gathered):
            return None
        collective = head.collective
        if isinstance(collective, SharedMemory):
            return collective.rounds((self._tokens, self._hidden), (self._wanted, max(head.widths)))
        return CutRounds(collective)

    def written(self) -> "Written":
        """Writes all calls, with all rounds of the ranks.

        Raises:
            NotCompiled: A part has no kernels.
        """
        self._embed()
        embedding, self._calls = self._calls, []
        added = list[int]()  # indices of calls
        for number, layer in enumerate(self._decoder.layers):
            self._layer(layer)
            if number in self._decoder.deepstack:
                added.append(len(self._calls))
                self._add_depth(self.depths.parts[self._decoder.deepstack.index(number)])
        self.hidden, self.hidden_size = self._last(self._decoder.norm)
        self._head(self._decoder.head, self.hidden)
        return Written(embedding, [call for i, call in enumerate(self._calls) if i not in added], self._calls)

    def _add_depth(self, part: Buffer) -> None:
        """Adds features to the stream. To add zeros elsewhere changes no value."""
        x = self.stream
        self._call(
            "mixed_add", write_mixed(True),
            self.cells.at("rows"), 1, self.depths.ones, part.tensor, part.stride, x.tensor, x.stride, self._hidden,
        )  # fmt: skip

    def _call(self, name: str, write: Callable, *arguments: Argument) -> None:
        self._calls.append(Call(name, write, arguments))

    def _buffer(self, name: str, width: int, element: Element | None = None, times: int = 1) -> Buffer:
        """Returns the buffer of this name, width and element, which all layers share; `times` is its rows for a token.

        The output layer uses such buffers too, and may have more rows than a step has tokens.
        """
        kind = element or self._element
        key = name, width, kind.name, times
        if key not in self._buffers:
            self._buffers[key] = Buffer.of(max(self._tokens, self._wanted) * times, width, kind)
        return self._buffers[key]

    @staticmethod
    def _check_width(what: str, width: int) -> None:
        if width % LANES:
            raise NotCompiled(f"{what} is {width}, no multiple of {LANES}")

    # Parts of a decoder

    def _embed(self) -> None:
        e = self._decoder.embedding
        if e.positions is not None and self._decoder.vision is not None:
            raise NotCompiled("images stand among learned positions")
        scale = 1.0 if e.scale is None else float(torch.tensor(e.scale, dtype=e.tokens.dtype))
        learned = None if e.positions is None else e.positions[e.offset :]
        if e.projection is None:
            self._look_up("tokens", e.tokens, self.stream, scale, learned)
            return
        if self._decoder.vision is not None:
            raise NotCompiled("images stand among embeddings that are projected")
        narrow = e.tokens.shape[1]
        self._check_width("the width of the embedding", narrow)
        found, rounded = self._buffer("found", narrow, FLOAT), self._buffer("rounded", narrow)
        self._look_up("tokens", e.tokens, found, scale)
        self._round(found, rounded, narrow)
        if learned is not None:
            self._look_up("positions", learned, self.stream)
        self._linear(e.projection, rounded, self.stream, add=learned is not None)

    def _head(self, head: object, x: Buffer) -> None:
        if self.rounds is None or not isinstance(head, Gathered):
            self._linear(head, x, self.logits, rows="wanteds")
            return
        part = self.rounds.to_gather(self._wanted, max(head.widths))
        self._linear(head.part, x, part, rows="wanteds")
        self._calls.append(self.rounds.gathered(self.cells.at("wanteds"), self.logits, head.widths))

    def _look_up(self, what: str, table: Tensor, y: Buffer, scale: float = 1.0, learned: Tensor | None = None) -> None:
        """Writes an embedding.

        Args:
            what: Cell with the row numbers.
            table: Table whose rows are looked up.
            y: Buffer of the result.
            scale: Factor of the rows.
            learned: Table of positions, whose rows are added. None for none.
        """
        self._call(
            f"embedding_{self._element.name}{'' if learned is None else '_positions'}",
            write_embedding(self._element, learned is not None),
            self.cells.at("rows"), self.cells.at(what), self.cells.at("positions"), table,
            0 if learned is None else learned, y.tensor, y.stride, table.shape[1], scale,
        )  # fmt: skip

    def _last(self, norm: object) -> tuple[Buffer, int]:
        """Returns what the output layer reads, and its width."""
        first, *parts = norm.parts if isinstance(norm, Chain) and norm.parts else (norm,)
        y, width = Buffer.of(self._wanted, self._hidden, self._element), self._hidden
        if isinstance(first, KernelLinear | Chain):
            self._round(self.stream, y, self._hidden, rows="wanteds", chosen=True)
            parts = [] if isinstance(first, Chain) else [first, *parts]
        else:
            self._norm(first, self.stream, y, rows="wanteds", chosen=True)
        for part in parts:
            width = _kernel(part).outputs
            x, y = y, Buffer.of(self._wanted, width, self._element)
            self._linear(part, x, y, rows="wanteds")
        return y, width

    def _layer(self, layer: object) -> None:
        x, normal = self.stream, self._buffer("normal", self._hidden)
        match layer:
            case PreNorm():
                self._norm(layer.attention_norm, x, normal)
                self._attend(layer.attention, normal, x)
                self._norm(layer.mlp_norm, x, normal)
                self._mlp(layer.mlp, normal, x)
            case PostNorm():
                self._round(x, normal, self._hidden)
                self._attend(layer.attention, normal, x)
                self._norm(layer.attention_norm, x, x)
                self._round(x, normal, self._hidden)
                self._mlp(layer.mlp, normal, x)
                self._norm(layer.mlp_norm, x, x)
            case Parallel():
                self._norm(layer.attention_norm, x, normal)
                other = normal
                if layer.mlp_norm is not None:
                    other = self._buffer("normal for the mlp", self._hidden)
                    self._norm(layer.mlp_norm, x, other)
                self._attend(layer.attention, normal, x)
                self._mlp(layer.mlp, other, x)
            case Sandwich():
                made = self._buffer("made", self._hidden, FLOAT)
                for before, part, after in (
                    (layer.before_attention, layer.attention, layer.attention_norm),
                    (layer.before_mlp, layer.mlp, layer.mlp_norm),
                ):
                    if before is None:
                        self._round(x, normal, self._hidden)
                    else:
                        self._norm(before, x, normal)
                    if isinstance(part, SelfAttention):
                        self._attend(part, normal, made, add=False)
                    else:
                        self._mlp(part, normal, made, add=False)
                    self._norm(after, made, x, add=True)
            case _:
                raise NotCompiled(f"there are no kernels for a layer of {type(layer).__name__}")

    def _attend(self, attention: SelfAttention, x: Buffer, y: Buffer, add: bool = True) -> None:
        a, h = attention, self._attention.heads_of(attention.number)
        qkv = self._buffer("qkv", max(_kernel(a.qkv).columns, (h.heads + 2 * h.kv_heads) * h.dim), FLOAT)
        queries, mixed = (self._buffer(name, h.heads * h.dim, h.element) for name in ("queries", "mixed"))
        self._linear(a.qkv, x, qkv)
        norm, *norms = self._head_norms(a)
        turns, pairs, cosines, sines = self._angles(a.rope)
        self._call(
            self._attention.heads_name(norm),
            self._attention.heads_writer(norm),
            self.cells.at("rows"), self._attention.slots(a.number), self.cells.at(turns), qkv.tensor, qkv.stride,
            queries.tensor, self._attention.pool_of(a.number), h.heads, h.kv_heads, h.dim, pairs, cosines, sines,
            *norms,
        )  # fmt: skip
        self._calls += self._attention.calls(a.number, queries.tensor, mixed.tensor)
        self._linear(a.output, mixed, y, add=add)

    @staticmethod
    def _head_norms(a: SelfAttention) -> tuple[HeadNorm | None, float, Argument, Argument, Argument, Argument]:
        """Returns the head norms' kind, epsilon, weights and biases; of the pairs, that of queries comes first."""
        queries, keys = a.query_norm, a.key_norm
        if queries is None or keys is None:
            return None, 0.0, 0, 0, 0, 0
        together = isinstance(queries, Together)
        alike = together == isinstance(keys, Together)
        queries, keys = (norm.norm if isinstance(norm, Together) else norm for norm in (queries, keys))
        if not isinstance(queries, RMSNorm | LayerNorm) or type(queries) is not type(keys) or queries.eps != keys.eps:
            raise NotCompiled("there is no kernel for its norms of queries and keys")
        if not alike or _kind(queries) != _kind(keys):
            raise NotCompiled("its norms of queries and of keys are not alike")
        kind = HeadNorm(_kind(queries), together)
        return kind, queries.eps, queries.weight.float(), keys.weight.float(), _bias(queries), _bias(keys)

    def _angles(self, rope: Rope | None) -> tuple[str, int, Argument, Argument]:
        """Returns the cell with each token's row of the tables, the number of rotated pairs, and both tables.

        The tables are padded, since kernels read whole vectors, past the end of the last row. Another embedding than
        `Rope` may turn by several axes: its tables are a step's own angles, in the order of the tokens.
        """
        if rope is None:
            return "positions", 0, 0, 0
        if type(rope) is not Rope:
            if id(rope) not in self.angles:
                self.angles[id(rope)] = StepAngles.of(rope, self._tokens)
            own = self.angles[id(rope)]
            return "order", own.cosines.shape[1], own.cosines, own.sines
        if id(rope) not in self._angle_tables:
            cosines, sines = (F.pad(table.float(), (0, 0, 0, LANES)) for table in rope.tables)
            self._angle_tables[id(rope)] = cosines, sines
        cosines, sines = self._angle_tables[id(rope)]
        return "positions", cosines.shape[1], cosines, sines

    def _mlp(self, mlp: object, x: Buffer, y: Buffer, add: bool = True) -> None:
        match mlp:
            case GatedMLP():
                first, width = mlp.gate_up, _kernel(mlp.gate_up).outputs // 2
                if not _kernel(first).gated:
                    raise NotCompiled("its gates were not loaded as such (gated=True)")
            case MLP():
                first, width = mlp.up, _kernel(mlp.up).outputs
            case Experts():
                self._experts(mlp, x, y, add)
                return
            case Summed():
                self._summed(y, add, lambda part: self._mlp(mlp.part, x, part, add=False))
                return
            case _:
                raise NotCompiled(f"there are no kernels for {type(mlp).__name__}")
        if mlp.activation not in ACTIVATIONS:
            raise NotCompiled("there is no kernel for its activation")
        inner = self._buffer("inner", width)
        self._linear(first, x, inner, activation=ACTIVATIONS[mlp.activation])
        self._linear(mlp.down, inner, y, add=add)

    def _experts(self, mlp: Experts, x: Buffer, y: Buffer, add: bool) -> None:
        rows, experts, used = self.cells.at("rows"), len(mlp.experts), mlp.used
        parts = [part for part in mlp.experts if isinstance(part, GatedMLP)]
        if len(parts) < experts or any(part.activation not in ACTIVATIONS for part in parts):
            raise NotCompiled("there are no kernels for its experts")
        if experts > MOST_EXPERTS:
            raise NotCompiled(f"there are {experts} experts, more than {MOST_EXPERTS}")
        gates, downs = [_kernel(part.gate_up) for part in parts], [_kernel(part.down) for part in parts]
        if not all(gate.gated for gate in gates) or len({part.activation for part in parts}) > 1:
            raise NotCompiled("its experts' gates were not loaded as such (gated=True), or their activations differ")
        if (experts, used) not in self._routes:
            self._routes[experts, used] = Routes.of(self._tokens, experts, used)
        routes = self._routes[experts, used]
        logits = self._buffer("logits of experts", experts, FLOAT)
        inner = self._buffer("inner of experts", downs[0].inputs, times=used)
        made = self._buffer("made by experts", self._hidden, FLOAT, used)
        self._linear(mlp.router, x, logits)
        self._call(
            f"choice{'_normalised' if mlp.normalised else ''}", write_choice(mlp.normalised),
            rows, logits.tensor, logits.stride, experts, used, routes.chosen, routes.weights,
        )  # fmt: skip
        self._call(
            "jobs", write_jobs,
            rows, used, experts, routes.chosen, routes.order, routes.jobs, routes.count,
        )  # fmt: skip
        activation = ACTIVATIONS[parts[0].activation]
        self._calls.append(experts_call(gates, routes, x, inner, gather=True, activation=activation))
        self._calls.append(experts_call(downs, routes, inner, made, gather=False))
        self._call(
            f"mixed{'_add' if add else ''}", write_mixed(add),
            rows, used, routes.weights, made.tensor, made.stride, y.tensor, y.stride, self._hidden,
        )  # fmt: skip

    def _linear(
        self,
        product: object,
        x: Buffer,
        y: Buffer,
        rows: str = "rows",
        add: bool = False,
        activation: str | None = None,
    ) -> None:
        if isinstance(product, Summed):
            self._summed(y, add, lambda part: self._linear(product.part, x, part, rows, activation=activation))
            return
        self._calls += _kernel(product).calls(self.cells.at(rows), x, y, self._buffer, add, activation)

    def _summed(self, y: Buffer, add: bool, made: Callable[[Buffer], None]) -> None:
        """Writes a part that is divided among ranks, and the sum of all ranks' parts.

        Args:
            y: Buffer of the sum.
            add: Whether the sum is added to y.
            made: Writes this rank's part into a buffer as wide as the stream.
        """
        if self.rounds is None:
            raise NotCompiled("a part of it is divided among ranks, its output layer is not")
        made(self.rounds.to_sum(self._tokens, self._hidden))
        self._calls.append(self.rounds.summed(self.cells.at("rows"), y, self._hidden, add))

    def _norm(
        self, norm: object, x: Buffer, y: Buffer, rows: str = "rows", add: bool = False, chosen: bool = False
    ) -> None:
        if not isinstance(norm, RMSNorm | LayerNorm):
            raise NotCompiled("there is no kernel for one of its norms")
        kind = _kind(norm)
        name = f"{kind.name}_{y.element.name}{'_add' if add else ''}{'_chosen' if chosen else ''}"
        self._call(
            name,
            write_norm(kind, y.element, add, chosen),
            self.cells.at(rows), self.cells.at("wanted"), x.tensor, x.stride, norm.weight.float(),
            _bias(norm), y.tensor, y.stride, len(norm.weight), norm.eps,
        )  # fmt: skip

    def _round(self, x: Buffer, y: Buffer, width: int, rows: str = "rows", chosen: bool = False) -> None:
        self._call(
            f"rounded_{y.element.name}{'_chosen' if chosen else ''}", write_rounded(y.element, chosen),
            self.cells.at(rows), self.cells.at("wanted"), x.tensor, x.stride, y.tensor, y.stride, width,
        )  # fmt: skip


def _kind(norm: RMSNorm | LayerNorm) -> Norm:
    return Norm(isinstance(norm, LayerNorm), isinstance(norm, LayerNorm) and norm.bias is not None)


def _bias(norm: RMSNorm | LayerNorm) -> Argument:
    return norm.bias.float() if isinstance(norm, LayerNorm) and norm.bias is not None else 0


def _kernel(product: object) -> KernelLinear:
    if not isinstance(product, KernelLinear):
        raise NotCompiled(f"there are no kernels for {type(product).__name__}")
    return product
