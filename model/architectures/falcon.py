"""Falcon (Almazrouei et al., 2023): attention and MLP side by side.

It has one KV head (7B), or groups of query heads with one each (40B and later).
"""

from model.blocks import MLP, Parallel, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import Product, read_activation
from model.rope import Rope, read_rope
from model.tensors import Tensors, head_by_head


def load_falcon(config: ModelConfig, tensors: Tensors) -> Decoder:
    """FalconForCausalLM."""
    c, fields = config, config.fields
    if fields.flag("alibi"):
        raise fields.refuse("alibi", "which is not supported yet: only rotary positions are")
    eps = fields.positive_float("layer_norm_epsilon", 1e-5)
    frequencies, scale = read_rope(fields, c.head_dim)
    rope = Rope(frequencies, c.context, tensors.dtype, tensors.device, scale)
    new, bias = fields.flag("new_decoder_architecture"), fields.flag("bias")
    two_norms = new and fields.positive("num_ln_in_parallel_attn", 2) == 2
    parallel = new or fields.flag("parallel_attn", True)

    def layer(number: int) -> Parallel | PreNorm:
        at = tensors.under(f"transformer.h.{number}.")
        output = at.summed("self_attention.dense", c.hidden, c.hidden, bias, at.shard.queries(c))
        mine, qkv = at.shard.of(c), _qkv(c, at, new, bias)
        attention = SelfAttention(number, mine.heads, mine.kv_heads, c.head_dim, qkv, output, rope)
        mlp = _mlp(c, at, bias)
        if two_norms:
            norm, other = at.layer_norm("ln_attn", c.hidden, eps), at.layer_norm("ln_mlp", c.hidden, eps)
            return Parallel(norm, attention, other, mlp)
        norm = at.layer_norm("input_layernorm", c.hidden, eps)
        if parallel:
            return Parallel(norm, attention, None, mlp)
        return PreNorm(norm, attention, at.layer_norm("post_attention_layernorm", c.hidden, eps), mlp)

    embedding = tensors.table("transformer.word_embeddings", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("transformer.ln_f", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None),
    )


def _qkv(config: ModelConfig, at: Tensors, new: bool, bias: bool) -> Product:
    c, name, rows = config, "self_attention.query_key_value", at.shard.qkv(config)
    if new:
        return head_by_head(at, name, c.hidden, (c.kv_heads, c.heads // c.kv_heads + 2, c.head_dim), bias, rows)
    if c.kv_heads == 1:
        return at.linear(name, c.hidden, (c.heads + 2) * c.head_dim, bias, rows=rows)
    return head_by_head(at, name, c.hidden, (c.heads, 3, c.head_dim), bias, rows)


def _mlp(config: ModelConfig, at: Tensors, bias: bool) -> MLP:
    width = config.fields.positive("ffn_hidden_size", 4 * config.hidden)
    return MLP(
        at.linear("mlp.dense_h_to_4h", config.hidden, width, bias, rows=[at.shard.part(width)]),
        at.summed("mlp.dense_4h_to_h", width, config.hidden, bias, at.shard.part(width)),
        read_activation(config.fields, "activation", "gelu"),
    )
