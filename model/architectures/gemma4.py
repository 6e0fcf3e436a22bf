"""The text of Gemma 4 (Gemma Team, 2026): Gemma's sandwich of norms, with layers that differ.

Layers without a window have wider heads, of which a quarter is rotated, and may take their keys as values. Values are
normalised. The last layers may read an earlier layer's KV. Small models have inputs of each layer's own, the mixture
has experts beside each MLP.
"""

from dataclasses import replace

import torch

from model.architectures.experts import ExpertNames, load_experts, read_used
from model.architectures.llama import load_mlp, norm_eps
from model.blocks import BesideExperts, Experts, FeedForward, GatedMLP, Sandwich, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.families import FULL, SLIDING, types_of_gemma4
from model.layer_inputs import Extended, InputGate, LayerInputs
from model.layers import RMSNorm, read_activation
from model.rope import Rope, read_rope, read_spread_frequencies
from model.routing import Routing
from model.tensors import Tensors

NAMES = ExpertNames(router="router.proj")
SPREAD = "proportional"
THETA = {FULL: 1e6, SLIDING: 1e4}
ROTATED = 0.25  # part of a head, in layers without a window


def load_gemma4(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Gemma4ForCausalLM.

    Raises:
        CheckpointError: All tokens see each other, or a field is wrong.
    """
    c, fields = config, config.fields
    if fields.values.get("use_bidirectional_attention") == "all":
        raise fields.refuse("use_bidirectional_attention", "it is the attention of an encoder, which does not generate")
    kinds = types_of_gemma4(fields, c.layers)
    ropes = {kind: _rope(c.of_layer(kinds.index(kind)), tensors, kind) for kind in dict.fromkeys(kinds)}
    width = fields.get("hidden_size_per_layer_input", int, 256) or 0

    def layer(number: int) -> Extended:
        at = tensors.under(f"model.layers.{number}.")
        return Extended(
            _sandwich(c, at, number, kinds[number], ropes[kinds[number]]),
            _gate(c, at, number, width) if width else None,
            at("layer_scalar", 1),
        )

    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    inputs = _inputs(c, tensors, width) if width else None
    layers = [layer(number) for number in range(c.layers)]
    head = tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None)
    cap = fields.positive_float("final_logit_softcapping") if "final_logit_softcapping" in fields else None
    scaled = Embedding(embedding, scale=c.hidden**0.5)
    return Decoder(scaled, layers, _norm(c, tensors, "model.norm"), head, cap, inputs=inputs)


def _norm(config: ModelConfig, at: Tensors, name: str, width: int | None = None) -> RMSNorm:
    return at.rms_norm(name, width or config.hidden, norm_eps(config))


def _plain_norm(config: ModelConfig, at: Tensors, width: int) -> RMSNorm:
    """Makes a norm without weights of its own."""
    return RMSNorm(torch.ones(width, dtype=at.dtype, device=at.device), norm_eps(config))


def _rope(config: ModelConfig, tensors: Tensors, kind: str) -> Rope:
    """Loads the rotary embedding of layers of one type, whose heads `config` has."""
    fields, dim = config.fields, config.head_dim
    rope = fields.section("rope_parameters").section(kind)
    own = fields.having({"rope_parameters": rope.values, "rope_scaling": None})
    if rope.get("rope_type", str, SPREAD if kind == FULL else "default") == SPREAD:
        partial = 1.0 if rope.values else ROTATED
        spread = read_spread_frequencies(own, dim, THETA[kind], partial)
        return Rope(spread, config.context, tensors.dtype, tensors.device, apart=dim // 2)
    frequencies, scale = read_rope(own, dim, THETA[kind])
    return Rope(frequencies, config.context, tensors.dtype, tensors.device, scale)


def _attention(config: ModelConfig, at: Tensors, number: int, kind: str, rope: Rope) -> SelfAttention:
    owner = config.kv_layers[number] if config.kv_layers else number
    c, shared = config.of_layer(number), owner != number
    bias, queries, keys = c.fields.flag("attention_bias"), c.heads * c.head_dim, c.kv_heads * c.head_dim
    same = kind == FULL and c.fields.flag("attention_k_eq_v")
    parts = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    used = 1 if shared else 2 if same else 3
    if shared:
        at.ignore(rf"model\.layers\.{number}\.self_attn\.[kv]_(?:proj|norm)\..*")
    mine = at.shard.of(c)
    return SelfAttention(
        owner,
        mine.heads,
        0 if shared else mine.kv_heads,
        c.head_dim,
        qkv=at.linear(parts[:used], c.hidden, bias=bias, rows=at.shard.qkv(c)[:used]),
        output=at.summed("self_attn.o_proj", queries, c.hidden, bias, at.shard.queries(c)),
        rope=rope,
        query_norm=_norm(c, at, "self_attn.q_norm", c.head_dim),
        key_norm=None if shared else _norm(c, at, "self_attn.k_norm", c.head_dim),
        value_norm=None if shared else _plain_norm(c, at, c.head_dim),
        values_are_keys=same and not shared,
    )


def _sandwich(config: ModelConfig, at: Tensors, number: int, kind: str, rope: Rope) -> Sandwich:
    mlp = _mlp(config, at, wide=bool(config.kv_layers) and config.kv_layers[number] != number)
    mixed = config.fields.flag("enable_moe_block")
    return Sandwich(
        attention=_attention(config, at, number, kind, rope),
        attention_norm=_norm(config, at, "post_attention_layernorm"),
        mlp=_beside_experts(config, at, mlp) if mixed else mlp,
        mlp_norm=_norm(config, at, "post_feedforward_layernorm"),
        before_attention=_norm(config, at, "input_layernorm"),
        before_mlp=None if mixed else _norm(config, at, "pre_feedforward_layernorm"),
    )


def _mlp(config: ModelConfig, at: Tensors, wide: bool) -> FeedForward:
    """Loads an MLP; `wide` for a layer without KV of its own, which may have it twice as wide."""
    fields = config.fields
    if wide and fields.flag("use_double_wide_mlp"):
        fields = fields.having({"intermediate_size": 2 * fields.positive("intermediate_size")})
    activation = read_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
    return load_mlp(replace(config, fields=fields), at, activation=activation)


def _beside_experts(config: ModelConfig, at: Tensors, mlp: FeedForward) -> BesideExperts:
    c, fields = config, config.fields
    experts, width = fields.positive("num_experts"), fields.positive("moe_intermediate_size")
    used = read_used(c, experts, 1, "top_k_experts")
    routing = Routing(used, normalised=True, scales=at.floats("router.per_expert_scale", experts))
    gelu = replace(c, fields=fields.having({"hidden_act": fields.values.get("hidden_activation", "gelu_pytorch_tanh")}))
    seen = at.floats("router.scale", c.hidden) * c.hidden**-0.5
    load = _load_joined if fields.flag("experts_gate_up") else load_experts
    routed = replace(
        load(gelu, at, experts, width, routing, NAMES),
        router_norm=RMSNorm(seen, norm_eps(c)),
        norm=_norm(c, at, "pre_feedforward_layernorm_2"),
    )
    return BesideExperts(
        _norm(c, at, "pre_feedforward_layernorm"),
        mlp,
        _norm(c, at, "post_feedforward_layernorm_1"),
        at.ranks.summed(routed),
        _norm(c, at, "post_feedforward_layernorm_2"),
    )


def _load_joined(
    config: ModelConfig, at: Tensors, experts: int, width: int, routing: Routing, names: ExpertNames
) -> Experts:
    """Loads experts whose gate and up products are one tensor each, as llama.cpp saves them; as `load_experts`."""
    activation = read_activation(config.fields, "hidden_act", "gelu_pytorch_tanh")

    def one(own: Tensors) -> GatedMLP:
        joined = [("gate_up_proj", 2 * width)]
        gates = own.linear(joined, config.hidden, gated=True, rows=own.shard.gated(width))
        return GatedMLP(gates, own.linear("down_proj", width, config.hidden, columns=own.shard.part(width)), activation)

    parts = at.each("experts.", experts, ("gate_up_proj", "down_proj"), one)
    return Experts(at.unquantized().linear(names.router, config.hidden, experts), parts, routing)


def _inputs(config: ModelConfig, tensors: Tensors, width: int) -> LayerInputs:
    c = config
    vocabulary, every = c.fields.positive("vocab_size_per_layer_input", 262144), c.layers * width
    return LayerInputs(
        tensors.table("model.embed_tokens_per_layer", vocabulary, every),
        width**0.5,
        tensors.linear("model.per_layer_model_projection", c.hidden, every),
        c.hidden**-0.5,
        _norm(c, tensors, "model.per_layer_projection_norm", width),
    )


def _gate(config: ModelConfig, at: Tensors, number: int, width: int) -> InputGate:
    return InputGate(
        number,
        at.linear("per_layer_input_gate", config.hidden, width),
        read_activation(config.fields, "hidden_activation", "gelu_pytorch_tanh"),
        at.linear("per_layer_projection", width, config.hidden),
        _norm(config, at, "post_per_layer_input_norm"),
    )
