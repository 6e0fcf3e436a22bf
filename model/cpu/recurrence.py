"""Recurrent layers as calls of kernels."""

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from model.blocks import Recurrence
from model.cpu.call_list import CallList
from model.cpu.kernels import math
from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.code import Code
from model.cpu.kernels.delta import write_gated_norm, write_gates, write_recurrence
from model.cpu.kernels.element import FLOAT
from model.cpu.kernels.product import NotCompiled
from model.cpu.kernels.program import Argument
from model.cpu.kernels.state_space import write_mixer_norm, write_mixer_squares, write_scan, write_steps
from model.cpu.kernels.states import Convolution, together, write_convolution
from model.cpu.kernels.values import LANES, Value
from model.cpu.known_parts import kernel_of
from model.cpu.states import CpuStates
from model.delta_net import GatedDeltaNet
from model.kimi_delta import KimiDelta
from model.short_convolution import ShortConvolution
from model.state_space import GatedNorm, GateOrder, StateSpace


class RecurrenceCalls:
    """Writes recurrent layers as calls.

    Args:
        states: States of the layers, None for a model without some.
        to: The calls of a step.
    """

    def __init__(self, states: CpuStates | None, to: CallList) -> None:
        self._states, self._to = states, to

    def write(self, mixer: Recurrence, x: Buffer, y: Buffer, add: bool) -> None:
        """Writes a layer that reads x, of the products' element, and writes y, float32, or adds to it.

        Raises:
            NotCompiled: A size is no multiple of a vector, or the pool has no states.
        """
        if self._states is None:
            raise NotCompiled("the layout of the KV cache has no states")
        match mixer:
            case GatedDeltaNet():
                made = self._delta(mixer, self._states, x)
            case KimiDelta():
                made = self._kimi_delta(mixer, self._states, x)
            case StateSpace():
                made = self._state_space(mixer, self._states, x)
            case ShortConvolution():
                made = self._short_convolution(mixer, self._states, x)
        self._to.linear(mixer.output, made, y, add=add)

    def _convolve(
        self, kind: Convolution, number: int, states: CpuStates, x: Buffer, y: Buffer, taps: Tensor, bias: Tensor | None
    ) -> None:
        where = states.places(number)
        self._to.call(
            kind.name, write_convolution(kind),
            *states.cells(), x.tensor, x.stride, taps.T.contiguous(), 0 if bias is None else bias, y.tensor, y.stride,
            len(taps), states.pool, states.page_bytes, int(where[0, 0]), int(where[1, 0]),
        )  # fmt: skip

    def _short_convolution(self, mixer: ShortConvolution, states: CpuStates, x: Buffer) -> Buffer:
        channels = mixer.shape.channels
        _check((("channels", channels),))
        inputs, made = self._to.buffer("gated inputs", 3 * channels, FLOAT), self._to.buffer("convolved", channels)
        self._to.linear(mixer.inputs, x, inputs)
        kind = Convolution(mixer.shape.taps, mixer.bias is not None, made.element)
        self._convolve(kind, mixer.number, states, inputs, made, mixer.taps, mixer.bias)
        return made

    def _delta(self, net: GatedDeltaNet, states: CpuStates, x: Buffer) -> Buffer:
        s, to = net.shape, self._to
        mixed, raw = to.buffer("mixed", s.channels + s.values, FLOAT), to.buffer("raw gates", 2 * s.heads, FLOAT)
        to.linear(net.qkvz, x, mixed)
        to.linear(net.gates, x, raw)
        decays = raw.tensor[:, s.heads :], raw.stride, _whole(net.decay), _whole(net.bias)
        made = self._delta_rule(net, states, mixed, raw, decays)
        return self._gated(net, made, mixed.tensor[:, s.channels :], mixed.stride, math.silu)

    def _kimi_delta(self, net: KimiDelta, states: CpuStates, x: Buffer) -> Buffer:
        s, to = net.shape, self._to
        mixed, raw = to.buffer("mixed", s.channels, FLOAT), to.buffer("raw gates", s.heads, FLOAT)
        forget, gates = to.buffer("raw decays", s.keys, FLOAT), to.buffer("gates of results", s.values, FLOAT)
        to.linear(net.qkv, x, mixed)
        to.linear(net.write, x, raw)
        for (narrow, wide), y in ((net.forget, forget), (net.gates, gates)):
            between = to.buffer("between two products", kernel_of(narrow).columns)
            to.linear(narrow, x, between)
            to.linear(wide, between, y)
        decays = forget.tensor, forget.stride, net.decay, net.bias
        made = self._delta_rule(net, states, mixed, raw, decays)
        return self._gated(net, made, gates.tensor, gates.stride, math.sigmoid)

    def _delta_rule(
        self,
        net: GatedDeltaNet | KimiDelta,
        states: CpuStates,
        mixed: Buffer,
        write: Buffer,
        decays: tuple[Tensor, int, Tensor, Tensor],
    ) -> Buffer:
        """Writes the convolution and the delta rule.

        Args:
            net: The layer.
            states: Where its states are.
            mixed: Inputs of the convolution.
            write: Write gates before their activation.
            decays: Decays before theirs, bytes of a row of them, their rates and biases in whole vectors.
        """
        s, to, (forget, forget_stride, rates, biases) = net.shape, self._to, decays
        _check((("channels", s.channels), ("elements of a key", s.key_dim), ("of a value", s.value_dim)))
        padded, vectors, where = _in_vectors(s.heads), together(s.value_dim), states.places(net.number)
        convolved, made = to.buffer("convolved", s.channels, FLOAT), to.buffer("recurrence", s.values, FLOAT)
        gates = to.buffer("gates of a recurrence", padded + len(rates), FLOAT)
        self._convolve(Convolution(s.taps), net.number, states, mixed, convolved, net.taps, None)
        to.call(
            "delta_gates", write_gates(),
            to.cells.at("rows"), write.tensor, write.stride, forget, forget_stride, rates, biases, gates.tensor,
            gates.stride, padded, len(rates),
        )  # fmt: skip
        by_element = isinstance(net, KimiDelta)
        to.call(
            f"delta_{s.key_dim}_{vectors}{'_by_element' if by_element else ''}",
            write_recurrence(s.key_dim, vectors, by_element),
            *states.cells(), convolved.tensor, convolved.stride, gates.tensor, gates.stride, padded, made.tensor,
            made.stride, s.keys, s.heads, s.heads // s.key_heads, s.value_dim, states.pool, states.page_bytes,
            where[0, 1:].copy(), where[1, 1:].copy(), s.key_dim**-0.5,
        )  # fmt: skip
        return made

    def _gated(
        self,
        net: GatedDeltaNet | KimiDelta,
        made: Buffer,
        gates: Tensor,
        stride: int,
        gate_of: Callable[[Code, Value], Value],
    ) -> Buffer:
        """Writes the norm of a delta rule's result and its gates, `stride` bytes a row."""
        normed = self._to.buffer("normed", net.shape.values)
        self._to.call(
            f"gated_norm_{gate_of.__name__}_{normed.element.name}", write_gated_norm(normed.element, gate_of),
            self._to.cells.at("rows"), made.tensor, made.stride, gates, stride, net.norm, normed.tensor, normed.stride,
            net.shape.heads, net.shape.value_dim, net.eps,
        )  # fmt: skip
        return normed

    def _state_space(self, mixer: StateSpace, states: CpuStates, x: Buffer) -> Buffer:
        s, to, rows, norm = mixer.shape, self._to, self._to.cells.at("rows"), mixer.norm
        width = s.values // s.groups
        _check((("channels", s.channels), ("elements of a head", s.head_dim), ("of a group", width)))
        padded, vectors, where = _in_vectors(s.heads), together(s.head_dim), states.places(mixer.number)
        mixed = to.buffer("mixed", s.channels + s.values + padded, FLOAT)
        convolved, made = to.buffer("convolved", s.channels, FLOAT), to.buffer("recurrence", s.values, FLOAT)
        steps, normed = to.buffer("time steps", 2 * padded, FLOAT), to.buffer("normed", s.values)
        to.linear(mixer.inputs, x, mixed)
        self._convolve(Convolution(s.taps, biased=True), mixer.number, states, mixed, convolved, mixer.taps, mixer.bias)
        raw = mixed.tensor[:, s.channels + s.values :]
        to.call(
            "state_space_steps", write_steps(),
            rows, raw, mixed.stride, _whole(mixer.steps.decay), _whole(mixer.steps.bias), steps.tensor, steps.stride,
            padded, mixer.steps.factor, mixer.steps.least, mixer.steps.most,
        )  # fmt: skip
        to.call(
            f"state_space_{s.state_dim}_{vectors}", write_scan(s.state_dim, vectors),
            *states.cells(), convolved.tensor, convolved.stride, steps.tensor, steps.stride, padded, made.tensor,
            made.stride, s.keys, s.heads, s.heads // s.groups, s.head_dim, states.pool, states.page_bytes,
            where[0, 1:].copy(), where[1, 1:].copy(), mixer.skip,
        )  # fmt: skip
        gates, name = mixed.tensor[:, s.channels :], norm.order.name.lower()
        means, shared = self._mean_squares(norm, made, gates, mixed.stride, width)
        to.call(
            f"mixer_norm_{name}_{normed.element.name}{'_shared' if shared else ''}",
            write_mixer_norm(norm.order, normed.element, shared),
            rows, made.tensor, made.stride, gates, mixed.stride, norm.weight, normed.tensor, normed.stride, s.groups,
            width, norm.eps, norm.factor, *means,
        )  # fmt: skip
        return normed

    def _mean_squares(
        self, norm: GatedNorm, made: Buffer, gates: Tensor, stride: int, width: int
    ) -> tuple[tuple[Argument, Argument], bool]:
        """Writes the mean square of a group that ranks share, if there is one.

        Args:
            norm: Norm of the mixer's result.
            made: The rank's part of the result.
            gates: Its gates.
            stride: Bytes of a row of gates.
            width: Elements of the part.

        Returns:
            Where they are, as `write_mixer_norm` has them, and whether there are some.
        """
        group, to = norm.shared, self._to
        if group is None or norm.order is GateOrder.GATED:
            return (0, 0), False
        means = to.buffer("mean squares", LANES, FLOAT)

        def squares(part: Buffer) -> None:
            to.call(
                f"mixer_squares_{norm.order.name.lower()}", write_mixer_squares(norm.order),
                to.cells.at("rows"), made.tensor, made.stride, gates, stride, width, part.tensor, part.stride,
                group.number, norm.factor, group.share,
            )  # fmt: skip

        to.summed(means, LANES, False, squares)
        return (means.tensor[:, group.number :], means.stride), True


def _check(sizes: Sequence[tuple[str, int]]) -> None:
    for what, size in sizes:
        if size % LANES:
            raise NotCompiled(f"a recurrent layer has {size} {what}, no multiple of {LANES}")


def _in_vectors(heads: int) -> int:
    """Returns the number of heads in whole vectors."""
    return -(-heads // LANES) * LANES


def _whole(of_heads: Tensor) -> Tensor:
    """Returns numbers of heads, filled up with zeros to whole vectors."""
    return F.pad(of_heads, (0, _in_vectors(len(of_heads)) - len(of_heads)))
