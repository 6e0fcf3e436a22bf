"""Building blocks of layers, each with its weights. Activations are packed: [tokens, width]."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from model.delta_net import GatedDeltaNet
from model.forward import ForwardBatch
from model.kimi_delta import KimiDelta
from model.latent_attention import LatentAttention
from model.layers import Activation, Product, activated, gated, sigmoid
from model.rope import Rope, rotate
from model.routing import AnyRouting, added
from model.short_convolution import ShortConvolution
from model.state_space import StateSpace

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
class OwnNorms:
    """LayerNorm of each head, with weights of its own [heads, head_dim]."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises [tokens, heads, head_dim]."""
        return (F.layer_norm(x.float(), x.shape[-1:], eps=self.eps) * self.weight.float()).to(x.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Multiplied:
    """A factor in the place of a norm: Granite's of what is added to the residual stream."""

    factor: float

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


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
        number: Index of the layer in the model; of the one that has written its KV if that is another.
        kv_heads: KV heads that it writes. 0 where it reads what an earlier layer has written.
        qkv: One product for queries, keys and values, in this order.
        output: Product after attention.
        rope: Rotary embedding. None without one.
        query_norm: Norm of queries [tokens, heads, head_dim], before the rotation. None without one.
        key_norm: Norm of keys, likewise.
        value_norm: Norm of values, likewise.
        values_are_keys: Whether values are the keys before norm and rotation, so that `qkv` makes none.
        gates: Product whose sigmoid multiplies the result, before the output (Qwen3-Next). None without one.
        rotated_first: Whether these norms come after the rotation.
        sinks: [heads] float32, see `AttentionBackend.attend`. None without sinks.
        query_scales: [context] float32. Factor of queries by position (Llama 4). None without one.
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
    value_norm: Norm | None = None
    values_are_keys: bool = False
    gates: Product | None = None
    rotated_first: bool = False
    sinks: Tensor | None = None
    query_scales: Tensor | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Returns the attention of x [tokens, hidden]. Writes the tokens' KV first, so that they see one another."""
        qkv = self.qkv(x, batch).view(len(x), -1, self.head_dim)
        queries = self._turned(qkv[:, : self.heads], self.query_norm, batch)
        if self.query_scales is not None:
            queries = (queries * self.query_scales[batch.positions[0]].view(-1, 1, 1)).to(queries.dtype)
        if self.kv_heads:
            keys, values = qkv[:, self.heads : self.heads + self.kv_heads], qkv[:, -self.kv_heads :]
            values = values if self.value_norm is None else self.value_norm(values)
            batch.attention.write(self.number, self._turned(keys, self.key_norm, batch), values, batch.plan)
        mixed = batch.attention.attend(self.number, queries, batch.plan, self.sinks).flatten(1)
        if self.gates is not None:
            mixed = activated(self.gates(x, batch), sigmoid) * mixed
        return self.output(mixed, batch)

    def _turned(self, heads: Tensor, norm: Norm | None, batch: ForwardBatch) -> Tensor:
        """Normalises and rotates [tokens, heads, head_dim]."""
        if norm is not None and not self.rotated_first:
            heads = norm(heads)
        if self.rope is not None:
            heads = rotate(heads, *batch.cos_sin(self.rope), self.rope.apart)
        return norm(heads) if norm is not None and self.rotated_first else heads


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
        limit: See `gated`.
    """

    gate_up: Product
    down: Product
    activation: Activation
    limit: float | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        return self.down(gated(self.gate_up(x, batch), self.activation, self.limit), batch)


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """A mixture of experts (Shazeer et al., 2017): each token goes through the few that `routing` chooses.

    An expert computes the tokens of all sequences at once. Its output for a token does not depend on the others.
    Outputs are added in the order of their weights, so a token's bits do not depend on the batch.

    Attributes:
        router: Product that gives a logit of each expert.
        routing: Chooses experts by their logits.
        router_norm: Norm of the router's input (Gemma 4). None: it reads what experts read.
        norm: Norm of the experts' input. Only with the other one.
        weighs_inputs: Whether an expert's weight multiplies what it reads, not what it gives (Llama 4).
    """

    router: Product
    experts: Sequence[FeedForward]
    routing: AnyRouting
    router_norm: Norm | None = None
    norm: Norm | None = None
    weighs_inputs: bool = False

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        seen = x if self.router_norm is None else self.router_norm(x)
        weights, chosen = self.routing(self.router(seen, batch).float())
        x = x if self.norm is None else self.norm(x)
        parts = x.new_empty((self.routing.used, *x.shape))
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            own = None if batch is None else batch.select(tokens)
            read = x[tokens] * weights[tokens, place, None].to(x.dtype) if self.weighs_inputs else x[tokens]
            parts[place, tokens] = self.experts[expert](read, own)
        if self.weighs_inputs:
            return added(parts.unbind())
        weighted = [part * weight.unsqueeze(-1) for part, weight in zip(parts, weights.to(x.dtype).T, strict=True)]
        return added(weighted)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExperts:
    """A mixture of experts beside an MLP that all tokens go through (Dai et al., DeepSeekMoE, 2024).

    Attributes:
        gate: Product with one output, whose sigmoid multiplies what the shared MLP gives (Qwen). None without one.
    """

    routed: Experts
    shared: GatedMLP | MLP
    gate: Product | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        made = self.shared(x, batch)
        if self.gate is not None:
            made = activated(self.gate(x, batch), sigmoid) * made
        return self.routed(x, batch) + made


@dataclass(frozen=True, slots=True, eq=False)
class BesideExperts:
    """An MLP and a mixture of experts that read the same input and have norms of their own (Gemma 4).

    Attributes:
        dense: The MLP.
        experts: The mixture, which normalises its input itself.
    """

    before_dense: Norm
    dense: FeedForward
    after_dense: Norm
    experts: FeedForward
    after_experts: Norm

    def __call__(self, x: Tensor, batch: ForwardBatch | None = None) -> Tensor:
        made = self.after_dense(self.dense(self.before_dense(x), batch))
        return made + self.after_experts(self.experts(x, batch))


Recurrence = GatedDeltaNet | KimiDelta | StateSpace | ShortConvolution
Mixer = SelfAttention | LatentAttention | Recurrence
"""The half of a layer that mixes tokens: attention, or what stands in its place."""


@dataclass(frozen=True, slots=True, eq=False)
class PreNorm:
    """A layer that normalises before attention and before its MLP (Xiong et al., 2020)."""

    attention_norm: Norm
    attention: Mixer
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

    attention: Mixer
    attention_norm: Norm
    mlp: FeedForward
    mlp_norm: Norm
    before_attention: Norm | None = None
    before_mlp: Norm | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + self.attention_norm(self.attention(self.before_attention(x) if self.before_attention else x, batch))
        return x + self.mlp_norm(self.mlp(self.before_mlp(x) if self.before_mlp else x, batch))


@dataclass(frozen=True, slots=True, eq=False)
class Single:
    """A layer of one part: a mixer, an MLP or experts (NVIDIA, Nemotron-H, 2025)."""

    norm: Norm
    part: Mixer | FeedForward

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        return x + self.part(self.norm(x), batch)


@dataclass(frozen=True, slots=True, eq=False)
class TwoMixers:
    """A layer with two mixers side by side, then an MLP (TII, Falcon-H1, 2025).

    Attributes:
        mixers: Each with the norm of its input and the factor of its result.
        mlp_factor: Factor of the MLP's result.
    """

    mixers: Sequence[tuple[Norm, Mixer, float]]
    mlp_norm: Norm
    mlp: FeedForward
    mlp_factor: float

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = x + added([mixer(norm(x), batch) * factor for norm, mixer, factor in self.mixers])
        return x + self.mlp(self.mlp_norm(x), batch) * self.mlp_factor
