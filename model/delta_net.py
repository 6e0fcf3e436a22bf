"""A recurrent layer: short convolution and gated delta rule (Yang et al., Gated Delta Networks, 2024).

Computed token by token in float32, whatever the chunk, so the bits do not depend on how a prompt is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.forward import ForwardBatch
from model.layers import Product, sigmoid, silu
from model.recurrent import DeltaShape
from model.short_convolution import convolved, states_of

L2_EPS = 1e-6  # of the norm of queries and keys


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
    s, made = shape, torch.empty(len(channels), shape.heads, shape.value_dim, device=channels.device)

    def advance(state: Sequence[Tensor] | None, here: slice) -> list[Tensor]:
        """Computes some tokens of one sequence. Returns the state after them."""
        if state is None:
            sizes = s.channels * (s.taps - 1), s.heads * s.key_dim * s.value_dim
            state = [channels.new_zeros(size) for size in sizes]
        window, matrix = state[0].view(-1, s.channels), state[1].view(s.heads, s.key_dim, s.value_dim)
        mixed, window = convolved(channels[here], window, taps)
        queries, keys, values = _heads(s, silu(mixed))
        for token in range(here.start, here.stop):
            i = token - here.start
            matrix = matrix * kept[token, :, :, None]
            missed = (values[i] - (matrix * keys[i, :, :, None]).sum(1)) * beta[token, :, None]
            matrix = matrix + keys[i, :, :, None] * missed[:, None]
            made[token] = (matrix * queries[i, :, :, None]).sum(1)
        return [window.flatten(), matrix.flatten()]

    states_of(batch.attention).recur(number, batch.plan, advance)
    return made


def _heads(shape: DeltaShape, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts channels into normalised queries and keys [tokens, heads, key_dim], and values."""
    s = shape
    queries, keys, values = x.split((s.keys, s.keys, s.values), 1)
    shared = s.heads // s.key_heads
    queries, keys = (
        normalised(part.reshape(len(x), s.key_heads, s.key_dim)).repeat_interleave(shared, 1)
        for part in (queries, keys)
    )
    return queries * s.key_dim**-0.5, keys, values.reshape(len(x), s.heads, s.value_dim)


def normalised(x: Tensor) -> Tensor:
    """Divides vectors by their length."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def softplus(x: Tensor) -> Tensor:
    """Computes log(1 + exp(x)), spelled out with log and exp: F.softplus treats the last elements with other code."""
    return x.clamp(min=0) + torch.log(1.0 + torch.exp(-x.abs()))
