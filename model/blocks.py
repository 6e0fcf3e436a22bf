"""Building blocks of layers, each with its weights. Activations are packed: [tokens, width]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.forward import ForwardBatch
from model.layers import Activation, Product, activated, gated
from model.rope import Rope, rotate

Norm = Callable[[Tensor], Tensor]


class FeedForward(Protocol):
    """The half of a layer after its attention, or beside it: an MLP or a mixture of experts."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None, /) -> Tensor:
        """Maps [rows, hidden] to the same shape.

        Args:
            x: [rows, hidden].
            batch: See `model.layers.Product`.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """A norm over all heads of a token as one vector."""

    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises [tokens, heads, head_dim]."""
        return self.norm(x.flatten(1)).view(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Functions applied one after the other; an empty chain is the identity."""

    parts: Sequence[Norm | FeedForward]

    def __call__(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class SelfAttention:
    """Causal self-attention of one layer.

    Attributes:
        number: Index of the layer in the model.
        qkv: One product for queries, keys and values, in this order.
        output: Product after attention.
        rope: Rotary embedding. None without one.
        query_norm: Norm of queries [tokens, heads, head_dim], before the rotation. Applied only together with
            `key_norm`.
        key_norm: Norm of keys, likewise.
    """

    number: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv: Product
    output: Product
    rope: Rope | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Returns the attention of x [tokens, hidden]. Writes the tokens' KV first, so that they see one another."""
        qkv = self.qkv(x, batch).view(len(x), -1, self.head_dim)
        queries, keys, values = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if self.rope is not None:
            cos, sin = batch.cos_sin(self.rope)
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        batch.attention.write(self.number, keys, values, batch.plan)
        return self.output(batch.attention.attend(self.number, queries, batch.plan).flatten(1), batch)


@dataclass(frozen=True, slots=True, eq=False)
class MLP:
    """An MLP: up projection, activation, down projection."""

    up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.down(activated(self.up(x, batch), self.activation), batch)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """An MLP with a gate (Shazeer, GLU Variants Improve Transformer, 2020).

    Attributes:
        gate_up: One product for gate and up projection, in this order.
    """

    gate_up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.down(gated(self.gate_up(x, batch), self.activation), batch)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A mixture of experts (Shazeer et al., 2017): each token goes through the `used` experts of highest router weight.

    An expert computes the tokens of all sequences at once. Its output for a token does not depend on the others.
    Outputs are added in the order of their weights, so a token's bits do not depend on the batch.

    Attributes:
        used: Experts for each token.
        normalised: Whether the weights of a token's experts are scaled to a sum of 1.
    """

    router: Product
    experts: Sequence[FeedForward]
    used: int
    normalised: bool

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x, batch).float(), -1), self.used, -1)
        if self.normalised:
            weights = weights / _added(weights.unbind(-1)).unsqueeze(-1)
        parts = x.new_empty((self.used, *x.shape))
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            own = None if batch is None else batch.select(tokens)
            parts[place, tokens] = self.experts[expert](x[tokens], own)
        weighted = [part * weight.unsqueeze(-1) for part, weight in zip(parts, weights.to(x.dtype).T, strict=True)]
        return _added(weighted)


def _added(parts: Sequence[Tensor]) -> Tensor:
    """Adds tensors from the first to the last, so that the bits do not depend on the number of rows."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(frozen=True, slots=True, eq=False)
class PreNorm:
    """A layer that normalises before attention and before its MLP (Xiong et al., 2020)."""

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: FeedForward

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x), batch)


@dataclass(frozen=True, slots=True, eq=False)
class PostNorm:
    """A layer that normalises after each residual sum, as the first transformers (Vaswani et al., 2017)."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: FeedForward
    mlp_norm: Norm

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = self.attention_norm(x + self.attention(x, batch))
        return self.mlp_norm(x + self.mlp(x, batch))


@dataclass(frozen=True, slots=True, eq=False)
class Parallel:
    """A layer whose attention and MLP read the same input (Wang and Komatsuzaki, GPT-J, 2021).

    Attributes:
        mlp_norm: Norm of the MLP's input. None: the MLP reads what `attention_norm` returns.
    """

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm | None
    mlp: FeedForward

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        normal = self.attention_norm(x)
        other = normal if self.mlp_norm is None else self.mlp_norm(x)
        return x + self.attention(normal, batch) + self.mlp(other, batch)


@dataclass(frozen=True, slots=True, eq=False)
class Sandwich:
    """A layer that normalises the outputs of attention and MLP before they are added.

    Attributes:
        before_attention: Norm of attention's input. Gemma 2 has it, OLMo 2 does not.
        before_mlp: Norm of the MLP's input, likewise.
    """

    attention: SelfAttention
    attention_norm: Norm
    mlp: FeedForward
    mlp_norm: Norm
    before_attention: Norm | None = None
    before_mlp: Norm | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(self.before_attention(x) if self.before_attention else x, batch))
        return x + self.mlp_norm(self.mlp(self.before_mlp(x) if self.before_mlp else x, batch))
