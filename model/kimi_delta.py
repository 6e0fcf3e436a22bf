"""Kimi Delta Attention (Kimi Team, Kimi Linear, 2025): the gated delta rule with a decay for each element of a key."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.delta_net import run_delta_rule, softplus
from model.forward import ForwardBatch
from model.layers import Product, sigmoid
from model.recurrent import DeltaShape


@dataclass(frozen=True, slots=True, eq=False)
class KimiDelta:
    """The half of a layer in the place of attention. All heads have keys of their own.

    Attributes:
        number: Index of the layer in the model.
        shape: Its heads.
        qkv: One product for queries, keys and values, in this order.
        write: Product for the write gate (beta) of each head.
        forget: Two products, with a narrow result between them, for the decay of each element of a key.
        gates: Two such products for the gates of the result.
        taps: [channels, taps] float32. Weights of the convolution, the oldest token first.
        decay: [heads x key_dim] float32, above 0. Rate of the decay (exp of 'A_log'), the same for a head's elements.
        bias: [heads x key_dim] float32. Bias of the decay ('dt_bias').
        norm: [value_dim] float32. Weights of the norm of each head's output.
        eps: Epsilon of that norm.
        output: Product after it.
    """

    number: int
    shape: DeltaShape
    qkv: Product
    write: Product
    forget: tuple[Product, Product]
    gates: tuple[Product, Product]
    taps: Tensor
    decay: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    output: Product

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Maps x [tokens, hidden] to the same shape. Writes the states of the step's sequences."""
        s = self.shape
        forget, gate = (wide(narrow(x, batch), batch).float() for narrow, wide in (self.forget, self.gates))
        kept = torch.exp(-self.decay * softplus(forget + self.bias)).view(-1, s.heads, s.key_dim)
        beta = sigmoid(self.write(x, batch).float())
        made = run_delta_rule(self.number, s, batch, self.qkv(x, batch).float(), self.taps, beta, kept)
        gated = F.rms_norm(made, (s.value_dim,), self.norm, self.eps).flatten(1) * sigmoid(gate)
        return self.output(gated.to(x.dtype), batch)
