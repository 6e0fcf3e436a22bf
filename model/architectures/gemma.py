"""Gemma (Gemma Team, 2024), Gemma 2 and the text of Gemma 3.

The embedding is scaled, weights of norms stand for 1 + w, gates have GELU. From Gemma 2 on, norms are on both sides of
attention and MLP, and some layers have windows. Gemma 2 has soft caps, Gemma 3 norms on queries and keys.
"""

from collections.abc import Callable

from model.architectures.llama import HeadNorm, load_attention, load_mlp, norm_eps
from model.blocks import Norm, PreNorm, Sandwich, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.families import SLIDING, every_sixth, layer_types
from model.fields import Fields
from model.forward import Layer
from model.layers import gelu, gelu_tanh, read_activation
from model.rope import Rope, read_rope, ropes_by_type
from model.tensors import Tensors


def load_gemma(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GemmaForCausalLM."""
    activation = read_activation(config.fields, "hidden_act", "gelu_pytorch_tanh")
    # The first checkpoints say "gelu" and mean its approximation.
    activation = gelu_tanh if activation is gelu else activation
    rope = _rope(config, tensors, config.fields)

    def layer(at: Tensors, number: int) -> PreNorm:
        return PreNorm(
            _norm(config, at, "input_layernorm"),
            _attention(config, at, number, rope),
            _norm(config, at, "post_attention_layernorm"),
            load_mlp(config, at, activation=activation),
        )

    return _decoder(config, tensors, layer)


def load_gemma2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Gemma2ForCausalLM."""
    rope = _rope(config, tensors, config.fields)
    cap = config.fields.values.get("final_logit_softcapping", 30.0)
    cap = None if cap is None else config.fields.positive_float("final_logit_softcapping", 30.0)
    return _decoder(config, tensors, lambda at, number: _sandwich(config, at, number, rope), cap)


def load_gemma3(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Gemma3ForCausalLM. Layers with a window rotate faster than the others."""
    fields = config.fields
    full, sliding = ropes_by_type(fields, fields.positive_float("rope_local_base_freq", 1e4))
    everything, window = _rope(config, tensors, full, 1e6), _rope(config, tensors, sliding)
    kinds = layer_types(fields, config.layers, every_sixth)

    def head_norm(at: Tensors, name: str) -> Norm:
        return _norm(config, at, name, config.head_dim)

    def layer(at: Tensors, number: int) -> Sandwich:
        return _sandwich(config, at, number, window if kinds[number] == SLIDING else everything, head_norm)

    cap = fields.positive_float("final_logit_softcapping") if "final_logit_softcapping" in fields else None
    return _decoder(config, tensors, layer, cap)


def _decoder(
    config: ModelConfig, tensors: Tensors, layer: Callable[[Tensors, int], Layer], soft_cap: float | None = None
) -> Decoder:
    c = config
    tensors.ignore(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    layers = [layer(tensors.under(f"model.layers.{number}."), number) for number in range(c.layers)]
    head = tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None)
    scaled = Embedding(embedding, scale=c.hidden**0.5)
    return Decoder(scaled, layers, _norm(c, tensors, "model.norm"), head, soft_cap)


def _sandwich(config: ModelConfig, at: Tensors, number: int, rope: Rope, head_norm: HeadNorm | None = None) -> Sandwich:
    return Sandwich(
        attention=_attention(config, at, number, rope, head_norm),
        attention_norm=_norm(config, at, "post_attention_layernorm"),
        mlp=load_mlp(config, at, activation=read_activation(config.fields, "hidden_activation", "gelu_pytorch_tanh")),
        mlp_norm=_norm(config, at, "post_feedforward_layernorm"),
        before_attention=_norm(config, at, "input_layernorm"),
        before_mlp=_norm(config, at, "pre_feedforward_layernorm"),
    )


def _norm(config: ModelConfig, at: Tensors, name: str, width: int | None = None) -> Norm:
    return at.rms_norm(name, width or config.hidden, norm_eps(config), offset=1.0)


def _rope(config: ModelConfig, tensors: Tensors, fields: Fields, theta: float = 1e4) -> Rope:
    frequencies, scale = read_rope(fields, config.head_dim, theta)
    return Rope(frequencies, config.context, tensors.dtype, tensors.device, scale, config.first_position)


def _attention(
    config: ModelConfig, at: Tensors, number: int, rope: Rope, head_norm: HeadNorm | None = None
) -> SelfAttention:
    bias = config.fields.flag("attention_bias")
    return load_attention(config, at, number, rope, bias, bias, head_norm)
