"""A recurrent layer: short convolution and selective state space (Dao and Gu, Transformers are SSMs, 2024: Mamba-2).

Computed token by token in float32, whatever the chunk, so the bits do not depend on how a prompt is cut.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.delta_net import softplus
from model.forward import ForwardBatch
from model.layers import Product, silu
from model.parallel.norms import SharedGroup
from model.recurrent import ScanShape
from model.short_convolution import convolved, states_of


class GateOrder(enum.Enum):
    """Order in which gates and norm change a mixer's result."""

    GATED_NORMED = "gated, normed"
    NORMED_GATED = "normed, gated"
    GATED = "gated"


@dataclass(frozen=True, slots=True, eq=False)
class GatedNorm:
    """Gates of a mixer's result, and its norm over groups of heads.

    Attributes:
        order: What is done, in order.
        weight: [values] float32. Weights of the norm, which `GateOrder.GATED` does not read.
        eps: Epsilon of the norm.
        factor: Factor of gates, before their SiLU.
        shared: The only group, where ranks share it. None where a rank has whole groups.
    """

    order: GateOrder
    weight: Tensor
    eps: float
    factor: float = 1.0
    shared: SharedGroup | None = None

    def __call__(self, x: Tensor, gates: Tensor, groups: int) -> Tensor:
        """Maps x [tokens, values] to the same shape; gates likewise. The norm is over each of `groups` parts."""
        opened = silu(gates * self.factor if self.factor != 1.0 else gates)
        if self.order is not GateOrder.NORMED_GATED:
            x = x * opened
        if self.order is not GateOrder.GATED and self.shared is not None:
            x = x * torch.rsqrt(self.shared.mean_square(x) + self.eps) * self.weight
        elif self.order is not GateOrder.GATED:
            parts = x.view(len(x), groups, -1)
            x = F.rms_norm(parts, parts.shape[-1:], eps=self.eps).flatten(1) * self.weight
        return x * opened if self.order is GateOrder.NORMED_GATED else x


@dataclass(frozen=True, slots=True, eq=False)
class StepSizes:
    """Makes the time step of each head, and the part of its state that is left after it.

    Attributes:
        decay: [heads] float32, above 0. Rate of the decay (exp of 'A_log').
        bias: [heads] float32. Bias of the time steps ('dt_bias').
        least: Bound of the time steps.
        most: Likewise.
        factor: Factor of what the steps are made of, before the bias.
    """

    decay: Tensor
    bias: Tensor
    least: float = 0.0
    most: float = math.inf
    factor: float = 1.0

    def __call__(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Makes the steps of raw [tokens, heads], and which part of a state each leaves."""
        steps = softplus(raw * self.factor + self.bias if self.factor != 1.0 else raw + self.bias)
        steps = steps.clamp(self.least, self.most)
        return steps, torch.exp(-self.decay * steps)


@dataclass(frozen=True, slots=True, eq=False)
class StateSpace:
    """The mixer of a layer, in the place of attention or beside it.

    Attributes:
        number: Index of the layer in the model.
        shape: Its heads.
        inputs: One product for the convolution's channels, the gates and the heads' time steps, in this order.
        taps: [channels, taps] float32. Weights of the convolution, the oldest token first.
        bias: [channels] float32. Bias of the convolution.
        steps: Makes the time steps.
        skip: [heads] float32. Factor of the inputs that are added to the result ('D').
        norm: Gates and norm of the result.
        output: Product after it.
    """

    number: int
    shape: ScanShape
    inputs: Product
    taps: Tensor
    bias: Tensor
    steps: StepSizes
    skip: Tensor
    norm: GatedNorm
    output: Product

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Maps x [tokens, hidden] to the same shape. Writes the states of the step's sequences."""
        s = self.shape
        channels, gates, raw = self.inputs(x, batch).float().split((s.channels, s.values, s.heads), 1)
        steps, kept = self.steps(raw)
        made = torch.empty(len(x), s.heads, s.head_dim, device=x.device)

        def advance(state: Sequence[Tensor] | None, here: slice) -> list[Tensor]:
            """Computes some tokens of one sequence. Returns the state after them."""
            if state is None:
                sizes = s.channels * (s.taps - 1), s.heads * s.state_dim * s.head_dim
                state = [channels.new_zeros(size) for size in sizes]
            window, matrix = state[0].view(-1, s.channels), state[1].view(s.heads, s.state_dim, s.head_dim)
            mixed, window = convolved(channels[here], window, self.taps, self.bias)
            values, keys, queries = self._heads(silu(mixed))
            for token in range(here.start, here.stop):
                i = token - here.start
                written = values[i] * steps[token, :, None]
                matrix = matrix * kept[token, :, None, None] + keys[i, :, :, None] * written[:, None]
                made[token] = (matrix * queries[i, :, :, None]).sum(1) + values[i] * self.skip[:, None]
            return [window.flatten(), matrix.flatten()]

        states_of(batch.attention).recur(self.number, batch.plan, advance)
        return self.output(self.norm(made.flatten(1), gates, s.groups).to(x.dtype), batch)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Cuts channels into inputs [tokens, heads, head_dim], and what writes and reads [tokens, heads, state_dim]."""
        s = self.shape
        values, *parts = x.split((s.values, s.keys, s.keys), 1)
        keys, queries = (
            part.reshape(len(x), s.groups, s.state_dim).repeat_interleave(s.heads // s.groups, 1) for part in parts
        )
        return values.reshape(len(x), s.heads, s.head_dim), keys, queries
