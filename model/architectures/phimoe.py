"""Phi-3.5-MoE (Microsoft, 2024): Mixtral under LayerNorms, with biases. Two experts are weighed apart (GRIN)."""

from dataclasses import replace

from model.architectures.experts import MIXTRAL_NAMES, load_experts, read_used
from model.architectures.llama import load_attention
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.rope import Rope, read_rope
from model.routing import SparseMixer
from model.tensors import Tensors


def load_phimoe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """PhimoeForCausalLM, which published checkpoints name PhiMoEForCausalLM."""
    c, fields, rope = config, config.fields, _load_rope(config, tensors)
    bias, eps = fields.flag("attention_bias"), fields.positive_float("rms_norm_eps", 1e-5)
    experts, width = fields.positive("num_local_experts", 16), fields.positive("intermediate_size")
    routing = SparseMixer(2 * fields.get("router_jitter_noise", float, 0.01))
    if routing.band < 0:
        raise fields.refuse("router_jitter_noise", "must not be below 0")
    if read_used(c, experts, SparseMixer.used) != SparseMixer.used:
        raise fields.refuse("num_experts_per_tok", f"must be {SparseMixer.used}")

    def mixture(at: Tensors) -> FeedForward:
        names = replace(MIXTRAL_NAMES, router="router" if "router.weight" in at else "gate")
        return at.ranks.summed(load_experts(c, at, experts, width, routing, names))

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.layer_norm("input_layernorm", c.hidden, eps),
            load_attention(c, at, number, rope, bias, bias),
            at.layer_norm("post_attention_layernorm", c.hidden, eps),
            mixture(at.under("mlp." if "mlp.router.weight" in at else "block_sparse_moe.")),
        )

    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    head = embedding if c.tied_embeddings else None
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("model.norm", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, head, fields.flag("lm_head_bias")),
    )


def _load_rope(config: ModelConfig, tensors: Tensors) -> Rope:
    """Loads the rotary embedding, whose factor of cosines and sines config.json has itself where it scales angles."""
    fields = config.fields
    frequencies, scale = read_rope(fields, config.head_dim, 1e6)
    rope = fields.rope
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind in ("longrope", "su"):
        scale = rope.positive_float("short_mscale")
    elif kind != "default":
        raise rope.refuse("rope_type", "must be 'default' or 'longrope'")
    return Rope(frequencies, config.context, tensors.dtype, tensors.device, scale)
