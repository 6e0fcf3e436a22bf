"""Hunyuan dense (Tencent, 2025): Llama with norms of queries and keys after their rotation.

Its rope is called 'dynamic', yet with an 'alpha' it is fixed: the base alone is stretched (NTK-aware scaling).
"""

from dataclasses import replace

from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps
from model.blocks import Norm, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.fields import Fields
from model.tensors import Tensors

NORMS = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}


def load_hunyuan(config: ModelConfig, tensors: Tensors) -> Decoder:
    """HunYuanDenseV1ForCausalLM."""
    c, eps, bias = config, norm_eps(config), config.fields.flag("attention_bias")
    rope = load_rope(config, tensors, fields=_stretched(config.fields, c.head_dim))

    def head_norm(at: Tensors, name: str) -> Norm:
        return at.rms_norm(NORMS[name], c.head_dim, eps)

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, eps),
            replace(load_attention(c, at, number, rope, bias, bias, head_norm), rotated_first=True),
            at.rms_norm("post_attention_layernorm", c.hidden, eps),
            load_mlp(c, at),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def _stretched(fields: Fields, dim: int) -> Fields:
    """Returns fields whose base is stretched by the rope's 'alpha', where it has one."""
    rope = fields.rope
    if rope.values.get("rope_type", rope.values.get("type")) != "dynamic" or "alpha" not in rope:
        return fields
    theta = (rope if "rope_theta" in rope else fields).positive_float("rope_theta", 10000.0)
    stretched = theta * rope.positive_float("alpha") ** (dim / (dim - 2))
    return fields.having({"rope_parameters": {"rope_theta": stretched}, "rope_scaling": None})
