"""Writes a decoder as calls of kernels for the CPU, in the order of a step."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.blocks import (
    MLP,
    BesideExperts,
    Chain,
    Experts,
    FeedForward,
    GatedMLP,
    Mixer,
    Multiplied,
    Parallel,
    PostNorm,
    PreNorm,
    Sandwich,
    SharedExperts,
    Single,
    TwoMixers,
)  # fmt: skip
from model.cpu.attention_backend import CpuAttention
from model.cpu.call_list import CallList
from model.cpu.cut_rounds import CutRounds
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.element import ELEMENTS, FLOAT
from model.cpu.kernels.embedding import write_eight_bit_embedding, write_embedding
from model.cpu.kernels.product import KernelLinear, NotCompiled
from model.cpu.kernels.program import Call
from model.cpu.kernels.rows import write_add_gated
from model.cpu.kernels.values import LANES
from model.cpu.known_parts import activation_name, kernel_of
from model.cpu.layer_input_calls import input_gate_calls, layer_inputs_calls
from model.cpu.mixer_calls import MixerCalls
from model.cpu.mixtures import Mixtures
from model.cpu.rounds import HostCall, Rounds
from model.cpu.shared_memory import SharedMemory
from model.cpu.step_values import Rotations, StepDepths
from model.decoder import Decoder
from model.embedding_table import EightBitTable, EmbeddingTable, PlainTable
from model.layer_inputs import Extended, LayerInputs
from model.parallel.collective import Gathered, Summed


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Calls of a decoder, in the order of a step.

    Attributes:
        embedding: The embedding.
        rest: Everything after it, for a step without images.
        with_depths: The same, with the further depths of images' features.
        read_out: The last norm and the output layer alone, with rounds of their own.
    """

    embedding: list[Call | HostCall]
    rest: list[Call | HostCall]
    with_depths: list[Call | HostCall]
    read_out: list[Call | HostCall]


class DecoderCalls:
    """Writes the calls of a decoder, with the buffers that they read and write."""

    def __init__(self, decoder: Decoder, attention: CpuAttention, tokens: int, wanted: int) -> None:
        self._decoder, self._attention, self._tokens, self._wanted = decoder, attention, tokens, wanted
        table, projection = decoder.embedding.tokens, decoder.embedding.projection
        self._element = ELEMENTS[table.dtype]
        self.rotations = Rotations(tokens)
        width = table.width if projection is None else kernel_of(projection).outputs
        self._check_width("the hidden size", width)
        self.stream = Buffer.of(tokens, width, FLOAT)
        self._hidden = width
        self.rounds, self.read_out_rounds = self._rounds_of(decoder.head), self._rounds_of(decoder.head)
        self._to = CallList(tokens, wanted, width, self._element, self.rounds)
        self.cells = self._to.cells
        self._mixers = MixerCalls(attention, self._to, self.rotations)
        self._mixtures = Mixtures(tokens, width, self.cells.at("rows"), self._to.buffer)
        self.depths = StepDepths.of(len(decoder.deepstack), tokens, width)
        self.logits = Buffer.of(wanted, table.vocabulary, FLOAT)

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
        embedding, self._to.calls = self._to.calls, []
        if self._decoder.inputs is not None:
            self._make_inputs(self._decoder.inputs)
        added = list[int]()  # indices of calls
        for number, layer in enumerate(self._decoder.layers):
            self._layer(layer)
            if number in self._decoder.deepstack:
                added.append(len(self._to.calls))
                self._add_depth(self.depths.parts[self._decoder.deepstack.index(number)])
        layers = len(self._to.calls)
        self.hidden, self.hidden_size = self._last(self._decoder.norm)
        last = self._to.calls[layers:]
        self._head(self._decoder.head, self.hidden, self.rounds)
        every, self._to.calls = self._to.calls, last
        self._head(self._decoder.head, self.hidden, self.read_out_rounds)
        rest = [call for i, call in enumerate(every) if i not in added]
        return Written(embedding, rest, every, self._to.calls)

    def _add_depth(self, part: Buffer) -> None:
        """Adds features to the stream. To add zeros elsewhere changes no value."""
        self._to.mixed(self.depths.ones, part, self.stream, add=True)

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
        if e.norm is not None:
            if e.projection is not None or learned is not None or self._decoder.vision is not None:
                raise NotCompiled("normalised embeddings are projected, or positions or images are added to them")
            found = self._to.buffer("found", self._hidden, FLOAT)
            self._look_up_tokens(e.tokens, found, scale)
            self._to.norm(e.norm, found, self.stream)
            return
        if e.projection is None:
            self._look_up_tokens(e.tokens, self.stream, scale, learned)
            return
        if self._decoder.vision is not None:
            raise NotCompiled("images stand among embeddings that are projected")
        narrow = e.tokens.width
        self._check_width("the width of the embedding", narrow)
        found, rounded = self._to.buffer("found", narrow, FLOAT), self._to.buffer("rounded", narrow)
        self._look_up_tokens(e.tokens, found, scale)
        self._to.rounded(found, rounded, narrow)
        if learned is not None:
            self._look_up("positions", learned, self.stream)
        self._to.linear(e.projection, rounded, self.stream, add=learned is not None)

    def _make_inputs(self, inputs: LayerInputs) -> None:
        """Makes the inputs of all layers, of which features of images have a part."""
        self._check_width("the width of a layer's own input", inputs.width)
        self._inputs = self._to.buffer("inputs of layers", inputs.tokens.width, FLOAT)
        self._look_up_tokens(inputs.tokens, self._inputs, float(torch.tensor(inputs.scale, dtype=inputs.tokens.dtype)))
        layer_inputs_calls(inputs, self._to, self.stream, self._inputs)

    def _head(self, head: object, x: Buffer, rounds: Rounds | None) -> None:
        if rounds is None or not isinstance(head, Gathered):
            self._to.linear(head, x, self.logits, rows="wanteds")
            return
        part = rounds.to_gather(self._wanted, max(head.widths))
        self._to.linear(head.part, x, part, rows="wanteds")
        self._to.calls.append(rounds.gathered(self.cells.at("wanteds"), self.logits, head.widths))

    def _look_up_tokens(
        self, table: EmbeddingTable, y: Buffer, scale: float = 1.0, learned: Tensor | None = None
    ) -> None:
        """Writes the embedding of tokens; arguments as `_look_up`."""
        match table:
            case PlainTable():
                self._look_up("tokens", table.weight, y, scale, learned)
            case EightBitTable():
                self._look_up_in_8_bits(table, y, scale, learned)
            case _:
                raise NotCompiled(f"there are no kernels for {type(table).__name__}")

    def _look_up_in_8_bits(self, table: EightBitTable, y: Buffer, scale: float, learned: Tensor | None) -> None:
        self._check_width("the size of an embedding's groups", table.group_size)
        rows, added = table.rows, learned is not None
        marks = f"{'' if rows.offsets is None else '_offsets'}{'_positions' if added else ''}"
        self._to.call(
            f"eight_bit_embedding_{self._element.name}{marks}",
            write_eight_bit_embedding(self._element, added, rows.offsets is not None),
            self.cells.at("rows"), self.cells.at("tokens"), self.cells.at("positions"), rows.values, rows.scales,
            0 if rows.offsets is None else rows.offsets, 0 if learned is None else learned, y.tensor, y.stride,
            rows.scales.shape[1], table.group_size, scale,
        )  # fmt: skip

    def _look_up(self, what: str, table: Tensor, y: Buffer, scale: float = 1.0, learned: Tensor | None = None) -> None:
        """Writes an embedding.

        Args:
            what: Cell with the row numbers.
            table: Table whose rows are looked up.
            y: Buffer of the result.
            scale: Factor of the rows.
            learned: Table of positions, whose rows are added. None for none.
        """
        self._to.call(
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
            self._to.rounded(self.stream, y, self._hidden, rows="wanteds", chosen=True)
            parts = [] if isinstance(first, Chain) else [first, *parts]
        else:
            self._to.norm(first, self.stream, y, rows="wanteds", chosen=True)
        for part in parts:
            width = kernel_of(part).outputs
            x, y = y, Buffer.of(self._wanted, width, self._element)
            self._to.linear(part, x, y, rows="wanteds")
        return y, width

    def _layer(self, layer: object) -> None:
        x, normal = self.stream, self._to.buffer("normal", self._hidden)
        match layer:
            case PreNorm():
                self._to.norm(layer.attention_norm, x, normal)
                self._mixers.write(layer.attention, normal, x)
                self._to.norm(layer.mlp_norm, x, normal)
                self._mlp(layer.mlp, normal, x)
            case PostNorm():
                self._to.rounded(x, normal, self._hidden)
                self._mixers.write(layer.attention, normal, x)
                self._to.norm(layer.attention_norm, x, x)
                self._to.rounded(x, normal, self._hidden)
                self._mlp(layer.mlp, normal, x)
                self._to.norm(layer.mlp_norm, x, x)
            case Parallel():
                self._to.norm(layer.attention_norm, x, normal)
                other = normal
                if layer.mlp_norm is not None:
                    other = self._to.buffer("normal for the mlp", self._hidden)
                    self._to.norm(layer.mlp_norm, x, other)
                self._mixers.write(layer.attention, normal, x)
                self._mlp(layer.mlp, other, x)
            case Sandwich():
                made = self._to.buffer("made", self._hidden, FLOAT)
                for before, part, after in (
                    (layer.before_attention, layer.attention, layer.attention_norm),
                    (layer.before_mlp, layer.mlp, layer.mlp_norm),
                ):
                    if before is not None:
                        self._to.norm(before, x, normal)
                    elif not isinstance(part, BesideExperts):
                        self._to.rounded(x, normal, self._hidden)
                    if isinstance(part, BesideExperts):
                        self._beside_experts(part, made)
                    else:
                        self._part(part, normal, made, add=False)
                    if isinstance(after, Multiplied):
                        self._to.mixed(torch.full((self._tokens,), after.factor), made, x, add=True)
                    else:
                        self._to.norm(after, made, x, add=True)
            case Single():
                self._to.norm(layer.norm, x, normal)
                self._part(layer.part, normal, x)
            case TwoMixers():
                self._two_mixers(layer, normal, x)
            case Extended():
                self._layer(layer.inner)
                if layer.gate is not None:
                    input_gate_calls(layer.gate, self._to, x, self._inputs)
                self._to.mixed(layer.factor.float().repeat(self._tokens), x, x, add=False)
            case _:
                raise NotCompiled(f"there are no kernels for a layer of {type(layer).__name__}")

    def _two_mixers(self, layer: TwoMixers, normal: Buffer, x: Buffer) -> None:
        """Writes a layer whose mixers read the stream as it was before the first of them."""
        mixed, made = (self._to.buffer(name, self._hidden, FLOAT) for name in ("made by mixers", "made"))
        for number, (norm, mixer, factor) in enumerate(layer.mixers):
            self._to.norm(norm, x, normal)
            self._mixers.write(mixer, normal, made, add=False)
            self._to.mixed(torch.full((self._tokens,), factor), made, mixed, add=number > 0)
        self._to.mixed(torch.ones(self._tokens), mixed, x, add=True)
        self._to.norm(layer.mlp_norm, x, normal)
        self._mlp(layer.mlp, normal, made, add=False)
        self._to.mixed(torch.full((self._tokens,), layer.mlp_factor), made, x, add=True)

    def _part(self, part: Mixer | FeedForward, x: Buffer, y: Buffer, add: bool = True) -> None:
        if isinstance(part, Mixer):
            self._mixers.write(part, x, y, add)
        else:
            self._mlp(part, x, y, add)

    def _mlp(self, mlp: object, x: Buffer, y: Buffer, add: bool = True) -> None:
        match mlp:
            case GatedMLP():
                first, width = mlp.gate_up, kernel_of(mlp.gate_up).outputs // 2
                if not kernel_of(first).gated or mlp.limit is not None:
                    raise NotCompiled("its gates were not loaded as such (gated=True), or have a limit")
            case MLP():
                first, width = mlp.up, kernel_of(mlp.up).outputs
            case Experts():
                self._to.calls += self._mixtures.calls(mlp, *self._seen(mlp, x), y, add)
                return
            case SharedExperts():
                self._to.calls += self._mixtures.calls(mlp.routed, *self._seen(mlp.routed, x), y, add)
                if mlp.gate is None:
                    self._mlp(mlp.shared, x, y)
                else:
                    self._add_gated(mlp.shared, mlp.gate, x, y)
                return
            case Summed():
                self._to.summed(y, self._hidden, add, lambda part: self._mlp(mlp.part, x, part, add=False))
                return
            case _:
                raise NotCompiled(f"there are no kernels for {type(mlp).__name__}")
        inner = self._to.buffer("inner", width)
        self._to.linear(first, x, inner, activation=activation_name(mlp.activation))
        self._to.linear(mlp.down, inner, y, add=add)

    def _beside_experts(self, part: BesideExperts, y: Buffer) -> None:
        """Writes what an MLP and experts make of the stream, each with its own norms, to y."""
        normal, made = self._to.buffer("normal", self._hidden), self._to.buffer("made apart", self._hidden, FLOAT)
        self._to.norm(part.before_dense, self.stream, normal)
        self._mlp(part.dense, normal, made, add=False)
        self._to.norm(part.after_dense, made, y)
        self._mlp(part.experts, self.stream, made, add=False)
        self._to.norm(part.after_experts, made, y, add=True)

    def _seen(self, mixture: Experts, x: Buffer) -> tuple[Buffer, Buffer]:
        """Returns what the experts of a mixture read, and what their router does."""
        if mixture.norm is None or mixture.router_norm is None:
            return x, x
        normal, seen = self._to.buffer("normal", self._hidden), self._to.buffer("seen by a router", self._hidden)
        self._to.norm(mixture.norm, x, normal)
        self._to.norm(mixture.router_norm, x, seen)
        return normal, seen

    def _add_gated(self, mlp: GatedMLP | MLP, gate: object, x: Buffer, y: Buffer) -> None:
        """Adds an MLP's result to y, times the sigmoid of a number for each row."""
        numbers, made = (
            self._to.buffer("gates of rows", 1, FLOAT),
            self._to.buffer("made by a shared MLP", self._hidden, FLOAT),
        )
        self._mlp(mlp, x, made, add=False)
        self._to.linear(gate, x, numbers)
        self._to.call(
            "add_gated", write_add_gated(),
            self.cells.at("rows"), numbers.tensor, numbers.stride, made.tensor, made.stride, y.tensor, y.stride,
            self._hidden,
        )  # fmt: skip
