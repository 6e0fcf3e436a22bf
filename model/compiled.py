"""A decoder as a program of kernels for the CPU: what its layers say they are made of, in the order of a step.

The layers of an architecture are data (`model.blocks`), and this is the other way to run them: the whole step is one
call, without Python between layers. The stream is float32, whatever the weights are in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model.attention.backend import AttentionBackend
from model.attention.cpu import CpuAttention
from model.compiled_calls import Cells, DecoderCalls
from model.decoder import Decoder, ImageFeatures
from model.kernels.buffer import Buffer
from model.kernels.program import Call, Machine
from model.layers import soft_capped
from model.parallel.collective import Runs, Turns
from model.parallel.cut import Exchange
from model.vision.encoder import VisionEncoder


class CompiledDecoder:
    """`Model` of a decoder, over a `CpuAttention`, for one thread at a time."""

    def __init__(self, machine: Machine, decoder: Decoder) -> None:
        self._machine, self._decoder = machine, decoder
        self.vision: VisionEncoder | None = decoder.vision
        self._programs: _Programs | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        attention: AttentionBackend,
        plan: Any,
        images: ImageFeatures | None = None,
    ) -> Tensor:
        """As `Decoder.forward`. What it returns holds until the next call."""
        programs = self._room_for(len(tokens), len(wanted), attention)
        programs.attention.begin(plan)
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
        return logits if self._decoder.soft_cap is None else soft_capped(logits, self._decoder.soft_cap)

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
    all: Runs
    embedding: Runs
    rest: Runs

    @staticmethod
    def of(machine: Machine, decoder: Decoder, attention: CpuAttention, tokens: int, wanted: int) -> "_Programs":
        writer = DecoderCalls(decoder, attention, tokens, wanted)
        embedding, rest = writer.written()
        return _Programs(
            attention, tokens, wanted, writer.cells, writer.stream, writer.logits,
            _program(machine, [*embedding, *rest], writer.turns), _program(machine, embedding, None),
            _program(machine, rest, writer.turns),
        )  # fmt: skip


def _program(machine: Machine, calls: Sequence[Call | Exchange], turns: Turns | None) -> Runs:
    """turns: of the ranks, None where there are none among the calls."""
    if turns is not None:
        return turns.program(machine, calls)
    return machine.program([call for call in calls if isinstance(call, Call)])


def check_compiled(decoder: Decoder, attention: CpuAttention) -> None:
    """Raises NotCompiled for what there are no kernels for. The decoder may be one of shapes alone."""
    DecoderCalls(decoder, attention, 1, 1).written()
