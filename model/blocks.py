"""The parts that layers are made of, each with its weights. Activations are packed: [tokens, width]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model.forward import ForwardBatch
from model.layers import Activation, Product, activated, gated
from model.rope import Rope, rotate

Norm = Callable[[Tensor], Tensor]


class Part(Protocol):
    """Half of a layer: what comes after its attention, or beside it."""

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None, /) -> Tensor:
        """x: [rows, hidden] -> the same shape. batch: as in `model.layers.Product`."""


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """A norm of all heads of a token as one row. x: [tokens, heads, head_dim]."""

    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Parts one after the other; none changes nothing."""

    parts: Sequence[Norm | Part]

    def __call__(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class SelfAttention:
    """Causal attention of layer `number`. qkv: one product for queries, keys and values, in this order. query_norm,
    key_norm: of [tokens, heads, head_dim], before the rotation.
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
    """Up, activation, down."""

    up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.down(activated(self.up(x, batch), self.activation), batch)


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """The same with a gate. gate_up: both in one product."""

    gate_up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.down(gated(self.gate_up(x, batch), self.activation), batch)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A mixture of experts (Shazeer et al., 2017): each token goes through the `used` ones that its router likes best.

    normalised: their weights are made to add up to 1. An expert has the tokens of all sequences at once; what it makes
    of one does not depend on the others, and is added up in order of its weights.
    """

    router: Product
    experts: Sequence[Part]
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
    """From the first to the last, so that the bits do not depend on how many rows there are."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@dataclass(frozen=True, slots=True, eq=False)
class PreNorm:
    """A layer that normalises before each of its two parts, one after the other (Xiong et al., 2020)."""

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: Part

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x), batch)


@dataclass(frozen=True, slots=True, eq=False)
class PostNorm:
    """A layer that normalises after its parts have been added, as the first transformers (Vaswani et al., 2017)."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: Part
    mlp_norm: Norm

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = self.attention_norm(x + self.attention(x, batch))
        return self.mlp_norm(x + self.mlp(x, batch))


@dataclass(frozen=True, slots=True, eq=False)
class Parallel:
    """A layer whose two parts read the same input (Wang and Komatsuzaki, GPT-J, 2021). mlp_norm None: what attention's
    norm has made.
    """

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm | None
    mlp: Part

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        normal = self.attention_norm(x)
        other = normal if self.mlp_norm is None else self.mlp_norm(x)
        return x + self.attention(normal, batch) + self.mlp(other, batch)


@dataclass(frozen=True, slots=True, eq=False)
class Sandwich:
    """A layer that normalises what its parts make, before it is added, and what they read too if the norms for that are
    there (Gemma 2 has them, OLMo 2 has not).
    """

    attention: SelfAttention
    attention_norm: Norm
    mlp: Part
    mlp_norm: Norm
    before_attention: Norm | None = None
    before_mlp: Norm | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(self.before_attention(x) if self.before_attention else x, batch))
        return x + self.mlp_norm(self.mlp(self.before_mlp(x) if self.before_mlp else x, batch))
