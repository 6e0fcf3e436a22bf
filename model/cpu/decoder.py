"""A decoder as a program of kernels for the CPU: what its layers say they are made of, in the order of a step.

The layers of an architecture are data (`model.blocks`), and this is the other way to run them: the whole step is one
call, without Python between layers. The stream is float32, whatever the weights are in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from model.attention.backend import AttentionBackend
from model.cpu.attention_backend import CpuAttention
from model.cpu.decoder_calls import Cells, DecoderCalls
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.program import Call, Machine
from model.cpu.rounds import Exchange, Rounds, Runs
from model.decoder import Decoder
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder
from model.layers import soft_capped


class CompiledDecoder:
    """`Model` of a decoder, over a `CpuAttention`, for one thread at a time."""

    def __init__(self, machine: Machine, decoder: Decoder) -> None:
        self._machine, self._decoder = machine, decoder
        self.vision: ImageEncoder | None = decoder.vision
        self._programs: _Programs | None = None

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """See `model.forward.Model`. The result holds until the next call."""
        tokens, wanted, images = batch.tokens, batch.wanted, batch.images
        positions = batch.positions[0]  # `DecoderCalls` refuses models that turn by another axis
        programs = self._room_for(len(tokens), len(wanted), batch.attention)
        programs.attention.begin(batch.plan)
        if images is None:
            programs.cells.set(tokens, positions, wanted)
            programs.all.run()
        else:
            known = tokens.index_fill(0, images.places, 0)
            programs.cells.set(known, positions, wanted)
            programs.embedding.run()
            programs.stream.tensor[images.places, : images.features.shape[1]] = images.features.float()
            programs.rest.run()
        logits = programs.logits.tensor[: len(wanted), : len(self._decoder.embedding.tokens)]
        if self._decoder.soft_cap is not None:
            logits = soft_capped(logits, self._decoder.soft_cap)
        hidden = programs.hidden.tensor[: len(wanted), : programs.hidden_size] if batch.hidden else None
        return ForwardOutput(logits, hidden)

    def _room_for(self, tokens: int, wanted: int, attention: AttentionBackend) -> "_Programs":
        """Buffers become the next power of two where a step has more tokens than any before."""
        made = self._programs
        if made is None or made.attention is not attention or tokens > made.tokens or wanted > made.wanted:
            if not isinstance(attention, CpuAttention):
                raise TypeError(f"a compiled decoder runs over the CPU's attention, not over {attention.name}")
            if made is not None:
                tokens, wanted = max(tokens, made.tokens), max(wanted, made.wanted)
            sizes = (1 << (size - 1).bit_length() for size in (tokens, wanted))
            self._programs = made = _Programs.of(self._machine, self._decoder, attention, *sizes)
        return made


@dataclass(frozen=True, slots=True, eq=False)
class _Programs:
    """For steps of so many tokens, and so many that logits are wanted of, at most."""

    attention: CpuAttention
    tokens: int
    wanted: int
    cells: Cells
    stream: Buffer
    logits: Buffer
    hidden: Buffer
    hidden_size: int
    all: Runs
    embedding: Runs
    rest: Runs

    @staticmethod
    def of(machine: Machine, decoder: Decoder, attention: CpuAttention, tokens: int, wanted: int) -> "_Programs":
        writer = DecoderCalls(decoder, attention, tokens, wanted)
        embedding, rest = writer.written()
        return _Programs(
            attention, tokens, wanted, writer.cells, writer.stream, writer.logits,
            writer.hidden, writer.hidden_size,
            _program(machine, [*embedding, *rest], writer.rounds), _program(machine, embedding, None),
            _program(machine, rest, writer.rounds),
        )  # fmt: skip


def _program(machine: Machine, calls: Sequence[Call | Exchange], rounds: Rounds | None) -> Runs:
    """rounds: of the ranks, None where there are none among the calls."""
    if rounds is not None:
        return rounds.program(machine, calls)
    return machine.program([call for call in calls if isinstance(call, Call)])


def check_compiled(decoder: Decoder, attention: CpuAttention) -> None:
    """Raises NotCompiled for what there are no kernels for. The decoder may be one of shapes alone."""
    DecoderCalls(decoder, attention, 1, 1).written()
