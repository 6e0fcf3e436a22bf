"""A recurrent layer: short convolution and selective state space (Dao and Gu, Transformers are SSMs, 2024: Mamba-2)."""

import enum
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.recurrence import LinearRecurrence, states_of
from model.delta_net import softplus
from model.forward import ForwardBatch
from model.layers import Product, silu
from model.parallel.norms import SharedGroup
from model.recurrent import ScanShape


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
class TimeSteps:
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
    steps: TimeSteps
    skip: Tensor
    norm: GatedNorm
    output: Product

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Maps x [tokens, hidden] to the same shape. Writes the states of the step's sequences."""
        s, states, rows = self.shape, states_of(batch.attention), len(x)
        channels, gates, raw = self.inputs(x, batch).float().split((s.channels, s.values, s.heads), 1)
        steps, kept = self.steps(raw)
        mixed = states.convolve(self.number, channels, self.taps, self.bias, True, batch.plan)
        values, keys, queries = mixed.split((s.values, s.keys, s.keys), 1)
        recurrence = LinearRecurrence(
            queries.view(rows, s.groups, s.state_dim),
            keys.view(rows, s.groups, s.state_dim),
            values.view(rows, s.heads, s.head_dim),
            kept.unsqueeze(2),
            steps,
            delta=False,
            skip=self.skip,
        )
        made = states.recur(self.number, recurrence, batch.plan)
        return self.output(self.norm(made.flatten(1), gates, s.groups).to(x.dtype), batch)
