"""A recurrent layer: short convolution and gated delta rule (Yang et al., Gated Delta Networks, 2024)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.recurrence import LinearRecurrence, states_of
from model.forward import ForwardBatch
from model.layers import Product, sigmoid, silu
from model.recurrent import DeltaShape


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaNet:
    """The recurrent half of a layer, in the place of attention.

    Attributes:
        number: Index of the layer in the model.
        shape: Heads of this rank.
        qkvz: One product for queries, keys, values and output gates, in this order.
        gates: One product for the write gate (beta) and the decay of each head, in this order.
        taps: [channels, taps] float32. Weights of the convolution, the oldest token first.
        decay: [heads] float32, above 0. Rate of the decay (exp of 'A_log').
        bias: [heads] float32. Bias of the decay ('dt_bias').
        norm: [value_dim] float32. Weights of the norm of each head's output.
        eps: Epsilon of that norm.
        output: Product after it.
    """

    number: int
    shape: DeltaShape
    qkvz: Product
    gates: Product
    taps: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    output: Product

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Maps x [tokens, hidden] to the same shape. Writes the states of the step's sequences."""
        s = self.shape
        mixed = self.qkvz(x, batch).float()
        channels, gate = mixed[:, : s.channels], mixed[:, s.channels :].view(-1, s.heads, s.value_dim)
        write, forget = self.gates(x, batch).float().split(s.heads, 1)
        kept = torch.exp(-self.decay * softplus(forget + self.bias)).unsqueeze(2)
        made = run_delta_rule(self.number, s, batch, channels, self.taps, sigmoid(write), kept)
        normed = F.rms_norm(made, (s.value_dim,), self.norm, self.eps) * silu(gate)
        return self.output(normed.flatten(1).to(x.dtype), batch)


def run_delta_rule(
    number: int, shape: DeltaShape, batch: ForwardBatch, channels: Tensor, taps: Tensor, beta: Tensor, kept: Tensor
) -> Tensor:
    """Computes the convolution and the delta rule of a step's tokens. Writes the states of their sequences.

    Args:
        number: Index of the layer.
        shape: Its heads.
        batch: The step.
        channels: [tokens, channels] float32. Inputs of the convolution.
        taps: [channels, taps] float32. Its weights.
        beta: [tokens, heads] float32. Write gates.
        kept: [tokens, heads, 1 or key_dim] float32. What a head keeps of its matrix, or of each of its rows.

    Returns:
        [tokens, heads, value_dim] float32.
    """
    s, states, rows = shape, states_of(batch.attention), len(channels)
    mixed = states.convolve(number, channels, taps, None, True, batch.plan)
    queries, keys, values = mixed.split((s.keys, s.keys, s.values), 1)
    recurrence = LinearRecurrence(
        queries.view(rows, s.key_heads, s.key_dim),
        keys.view(rows, s.key_heads, s.key_dim),
        values.view(rows, s.heads, s.value_dim),
        kept,
        beta,
        delta=True,
        scale=s.key_dim**-0.5,
    )
    return states.recur(number, recurrence, batch.plan)


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x)), spelled out with log and exp: F.softplus treats the last elements with other code."""
    return x.clamp(min=0) + torch.log(1.0 + torch.exp(-x.abs()))
