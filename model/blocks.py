"""The parts that layers are made of, each with its weights. Activations are packed: [tokens, width]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.attention.backend import AttentionBackend
from model.layers import Activation, Product, activated, gated
from model.rope import Rope, Turn, rotate

Norm = Callable[[Tensor], Tensor]
Part = Callable[[Tensor], Tensor]


class Step:
    """What all layers of one forward pass share. positions: [tokens]."""

    def __init__(self, positions: Tensor, attention: AttentionBackend, plan: Any) -> None:
        self.positions, self.attention, self.plan = positions, attention, plan
        self._turns: dict[int, Turn] = {}

    def turn(self, rope: Rope) -> Turn:
        """Its angles at the positions of the step, looked up once for all layers."""
        if id(rope) not in self._turns:
            self._turns[id(rope)] = rope.at(self.positions)
        return self._turns[id(rope)]


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """A norm of all heads of a token as one row. x: [tokens, heads, head_dim]."""

    norm: Norm

    def __call__(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(1)).view(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Parts one after the other; none changes nothing."""

    parts: Sequence[Part]

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

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        qkv = self.qkv(x).view(len(x), -1, self.head_dim)
        queries, keys, values = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if self.rope is not None:
            cos, sin = step.turn(self.rope)
            queries, keys = rotate(queries, cos, sin), rotate(keys, cos, sin)
        step.attention.write(self.number, keys, values, step.plan)
        return self.output(step.attention.attend(self.number, queries, step.plan).flatten(1))


@dataclass(frozen=True, slots=True, eq=False)
class MLP:
    """Up, activation, down."""

    up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(activated(self.up(x), self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """The same with a gate. gate_up: both in one product."""

    gate_up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x), self.activation))


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

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(torch.softmax(self.router(x).float(), -1), self.used, -1)
        if self.normalised:
            weights = weights / _added(weights.unbind(-1)).unsqueeze(-1)
        parts = x.new_empty((self.used, *x.shape))
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            parts[place, tokens] = self.experts[expert](x[tokens])
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

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.attention(self.attention_norm(x), step)
        return x + self.mlp(self.mlp_norm(x))


@dataclass(frozen=True, slots=True, eq=False)
class PostNorm:
    """A layer that normalises after its parts have been added, as the first transformers (Vaswani et al., 2017)."""

    attention: SelfAttention
    attention_norm: Norm
    mlp: Part
    mlp_norm: Norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        x = self.attention_norm(x + self.attention(x, step))
        return self.mlp_norm(x + self.mlp(x))


@dataclass(frozen=True, slots=True, eq=False)
class Parallel:
    """A layer whose two parts read the same input (Wang and Komatsuzaki, GPT-J, 2021). mlp_norm None: what attention's
    norm has made.
    """

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm | None
    mlp: Part

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        normal = self.attention_norm(x)
        return x + self.attention(normal, step) + self.mlp(normal if self.mlp_norm is None else self.mlp_norm(x))


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

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.attention_norm(self.attention(self.before_attention(x) if self.before_attention else x, step))
        return x + self.mlp_norm(self.mlp(self.before_mlp(x) if self.before_mlp else x))
