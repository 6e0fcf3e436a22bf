"""Mixers of tokens as calls of kernels: attention, and what stands in its place."""

from model.blocks import Mixer, SelfAttention
from model.cpu.attention_backend import CpuAttention
from model.cpu.call_list import CallList
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.delta import write_attention_gates
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.heads import write_head_squares
from model.cpu.kernels.product import NotCompiled
from model.cpu.kernels.program import Argument
from model.cpu.kernels.values import LANES
from model.cpu.known_parts import kernel_of
from model.cpu.latent_calls import latent_calls
from model.cpu.norm_arguments import head_norms
from model.cpu.recurrence import RecurrenceCalls
from model.cpu.step_values import Rotations
from model.latent_attention import LatentAttention
from model.parallel.norms import TogetherOnRanks


class MixerCalls:
    """Writes the mixers of a decoder.

    Args:
        attention: Back end of the step.
        to: The calls of a step.
        rotations: Angles of the step's tokens.
    """

    def __init__(self, attention: CpuAttention, to: CallList, rotations: Rotations) -> None:
        self._attention, self._to, self._rotations = attention, to, rotations
        self._recurrences = RecurrenceCalls(attention.states, to)

    def write(self, mixer: Mixer, x: Buffer, y: Buffer, add: bool = True) -> None:
        """Writes a mixer that reads x and writes y, or adds to it.

        Raises:
            NotCompiled: There are no kernels for a part of it.
        """
        match mixer:
            case SelfAttention():
                self._attend(mixer, x, y, add)
            case LatentAttention():
                made = latent_calls(mixer, self._attention, self._to, self._rotations, x)
                self._to.linear(mixer.output, made, y, add=add)
            case _:
                self._recurrences.write(mixer, x, y, add)

    def _attend(self, attention: SelfAttention, x: Buffer, y: Buffer, add: bool) -> None:
        a, h, cells = attention, self._attention.heads_of(attention.number), self._to.cells
        first_value = h.heads + (0 if a.values_are_keys else a.kv_heads)
        qkv = self._to.buffer("qkv", max(kernel_of(a.qkv).columns, (first_value + a.kv_heads) * h.dim), FLOAT)
        queries, mixed = (self._to.buffer(name, h.heads * h.dim, h.element) for name in ("queries", "mixed"))
        self._to.linear(a.qkv, x, qkv)
        norm, *norms = head_norms(a)
        variances = self._variances(a, qkv, h.heads, h.dim)
        turns, pairs, apart, cosines, sines = self._rotations.of(a.rope)
        scaled = a.query_scales is not None
        if scaled and turns != "positions":
            raise NotCompiled("its queries have factors by position and rotate by several axes")
        self._to.call(
            self._attention.heads_name(norm, scaled),
            self._attention.heads_writer(norm, scaled),
            cells.at("rows"), self._attention.slots(a.number), cells.at(turns), qkv.tensor, qkv.stride, queries.tensor,
            self._attention.pool_of(a.number), h.heads, a.kv_heads, first_value, h.dim, pairs, apart,
            cosines, sines, *norms, a.query_scales if a.query_scales is not None else 0, *variances,
        )  # fmt: skip
        self._to.calls += self._attention.calls(a.number, queries.tensor, mixed.tensor, a.sinks)
        if a.gates is not None:
            gates, width = self._to.buffer("gates of attention", kernel_of(a.gates).columns, FLOAT), h.heads * h.dim
            self._to.linear(a.gates, x, gates)
            self._to.call(
                f"attention_gates_{h.element.name}", write_attention_gates(h.element),
                cells.at("rows"), gates.tensor, gates.stride, mixed.tensor, mixed.stride, width,
            )  # fmt: skip
        self._to.linear(a.output, mixed, y, add=add)

    def _variances(self, a: SelfAttention, qkv: Buffer, heads: int, dim: int) -> tuple[Argument, Argument]:
        """Writes the mean squares over the heads of all ranks, where these are normalised together.

        Returns:
            Buffer and stride, as `write_heads` has them.
        """
        if not isinstance(a.query_norm, TogetherOnRanks) or not isinstance(a.key_norm, TogetherOnRanks):
            return 0, 0
        made, shares = self._to.buffer("mean squares", LANES, FLOAT), (a.query_norm.part.share, a.key_norm.part.share)

        def squares(part: Buffer) -> None:
            self._to.call(
                "head_squares", write_head_squares(), self._to.cells.at("rows"), qkv.tensor, qkv.stride, heads * dim,
                a.kv_heads * dim, part.tensor, part.stride, *shares,
            )  # fmt: skip

        self._to.summed(made, LANES, False, squares)
        return made.tensor, made.stride
