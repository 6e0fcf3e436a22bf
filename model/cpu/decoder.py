"""Runs a decoder as a program of kernels for the CPU.

An architecture's layers are data (`model.blocks`). This is the second way to run them: the whole step is one call,
without Python between layers. The residual stream is float32, whatever the weights are in.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model.attention.backend import AttentionBackend
from model.cpu.attention_backend import CpuAttention
from model.cpu.decoder_calls import DecoderCalls
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.program import Call, Machine
from model.cpu.rounds import HostCall, Rounds, Runs
from model.cpu.step_values import Cells, StepAngles, StepDepths
from model.decoder import Decoder
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder
from model.layers import soft_capped


class CompiledDecoder:
    """`Model` of a decoder over a `CpuAttention`, for one thread at a time."""

    def __init__(self, machine: Machine, decoder: Decoder) -> None:
        self._machine, self._decoder = machine, decoder
        self.vision: ImageEncoder | None = decoder.vision
        self._programs: _Programs | None = None

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Computes the batch. See `model.forward.Model`. The result holds until the next call."""
        parts, wanted = batch.parts, batch.wanted
        rows = [] if parts is None else parts.split(self._decoder.embedding.tokens.vocabulary)
        programs = self._room_for(len(batch.tokens), max(map(len, (*rows, wanted))), batch.attention)
        # All parts use one buffer, so the logits that are returned come last.
        first, *others = *rows, wanted
        self._run(programs, batch, first)
        logits = self._logits(programs, len(first))
        for more in others:
            if parts is not None:
                parts.read(logits)
            programs.cells.set(batch.tokens, batch.positions[0], more)
            programs.read_out.run()
            logits = self._logits(programs, len(more))
        hidden = programs.hidden.tensor[: len(wanted), : programs.hidden_size] if batch.hidden else None
        return ForwardOutput(logits, hidden)

    def _run(self, programs: "_Programs", batch: ForwardBatch, wanted: Tensor) -> None:
        """Runs a full step, up to the logits of the tokens at these packed offsets."""
        tokens, images = batch.tokens, batch.images
        positions = batch.positions[0]  # other axes are in the step's own angles
        programs.attention.begin(batch.plan)
        for angles in programs.angles:
            angles.fill(batch)
        if images is None:
            programs.cells.set(tokens, positions, wanted)
            programs.all.run()
            return
        # Any number may stand where an image does, so it is replaced by a valid id. Features replace its embedding.
        known = tokens.index_fill(0, images.places, 0)
        programs.cells.set(known, positions, wanted)
        programs.embedding.run()
        programs.stream.tensor[images.places, : images.features.shape[2]] = images.features[0].float()
        programs.depths.fill(len(tokens), images)
        programs.rest.run()

    def _logits(self, programs: "_Programs", count: int) -> Tensor:
        """Returns the logits of the program that ran last, [count, vocabulary]."""
        logits = programs.logits.tensor[:count, : self._decoder.embedding.tokens.vocabulary]
        if self._decoder.logit_scale != 1.0:
            logits *= self._decoder.logit_scale  # in place: the output layer writes all of it in each run
        return logits if self._decoder.soft_cap is None else soft_capped(logits, self._decoder.soft_cap)

    def _room_for(self, tokens: int, wanted: int, attention: AttentionBackend) -> "_Programs":
        """Returns programs with room for a step.

        Buffers grow to the next power of two when a step has more tokens than any before, so that growth is rare.
        """
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
    """Programs of a decoder, with their buffers.

    Attributes:
        tokens: Most tokens of a step.
        wanted: Most tokens whose logits are computed together.
        cells: Addresses and counts of a step, which kernels read.
        stream: Residual stream, [tokens, hidden] float32.
        all: Program of a full step.
        embedding: Program of the embedding alone, for steps with images.
        rest: Program of all that follows the embedding, for steps with images.
        read_out: Program of the last norm and the output layer alone, for other tokens of the step that ran last.
        angles: Angles that are filled in for each step.
        depths: Features that are filled in for each step with images.
    """

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
    read_out: Runs
    angles: Sequence[StepAngles]
    depths: StepDepths

    @staticmethod
    def of(machine: Machine, decoder: Decoder, attention: CpuAttention, tokens: int, wanted: int) -> "_Programs":
        writer = DecoderCalls(decoder, attention, tokens, wanted)
        calls = writer.written()
        return _Programs(
            attention, tokens, wanted, writer.cells, writer.stream, writer.logits,
            writer.hidden, writer.hidden_size,
            _program(machine, [*calls.embedding, *calls.rest], writer.rounds), _program(machine, calls.embedding, None),
            _program(machine, calls.with_depths, writer.rounds),
            _program(machine, calls.read_out, writer.read_out_rounds),
            list(writer.rotations.of_steps.values()), writer.depths,
        )  # fmt: skip


def _program(machine: Machine, calls: Sequence[Call | HostCall], rounds: Rounds | None) -> Runs:
    """Makes a program; `rounds` are those of the ranks, None where no rank takes part in the calls."""
    if rounds is not None:
        return rounds.program(machine, calls)
    return machine.program([call for call in calls if isinstance(call, Call)])


def check_compiled(decoder: Decoder, attention: CpuAttention) -> None:
    """Checks that kernels exist for all parts of a decoder, which may be one of shapes alone.

    Raises:
        NotCompiled: A part has no kernels.
    """
    DecoderCalls(decoder, attention, 1, 1).written()
