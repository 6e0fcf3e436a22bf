"""Models whose scores fall with distance (ALiBi): BLOOM (BigScience, 2022) and MPT (MosaicML, 2023)."""

from model.blocks import MLP, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import LayerNorm, gelu, gelu_tanh
from model.tensors import Tensors, head_by_head


def load_bloom(config: ModelConfig, tensors: Tensors) -> Decoder:
    """BloomForCausalLM. Embeddings are normalised. The Hub's checkpoints name the body's tensors without a prefix."""
    c, fields, shard = config, config.fields, tensors.shard
    if fields.flag("apply_residual_connection_post_layernorm"):
        raise fields.refuse("apply_residual_connection_post_layernorm", "which is not supported")
    eps, width = fields.positive_float("layer_norm_epsilon", 1e-5), 4 * c.hidden
    root = tensors.under_any(("transformer.", ""), "word_embeddings.weight")

    def layer(number: int) -> PreNorm:
        at = root.under(f"h.{number}.")
        qkv = head_by_head(at, "self_attention.query_key_value", c.hidden, (c.heads, 3, c.head_dim), True, shard.qkv(c))
        output = at.summed("self_attention.dense", c.hidden, c.hidden, True, shard.queries(c))
        mine = shard.of(c)
        return PreNorm(
            at.layer_norm("input_layernorm", c.hidden, eps),
            SelfAttention(number, mine.heads, mine.kv_heads, c.head_dim, qkv, output),
            at.layer_norm("post_attention_layernorm", c.hidden, eps),
            MLP(
                at.linear("mlp.dense_h_to_4h", c.hidden, width, True, rows=[shard.part(width)]),
                at.summed("mlp.dense_4h_to_h", width, c.hidden, True, shard.part(width)),
                gelu_tanh,
            ),
        )

    tokens = root.table("word_embeddings", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(tokens, norm=root.layer_norm("word_embeddings_layernorm", c.hidden, eps)),
        [layer(number) for number in range(c.layers)],
        root.layer_norm("ln_f", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, tokens if c.tied_embeddings else None),
    )


def load_mpt(config: ModelConfig, tensors: Tensors) -> Decoder:
    """MptForCausalLM. Nothing has a bias."""
    c, shard = config, tensors.shard
    eps = c.fields.positive_float("layer_norm_epsilon", 1e-5)
    width = c.fields.positive("expansion_ratio", 4) * c.hidden

    def norm(at: Tensors, name: str) -> LayerNorm:
        return at.layer_norm(name, c.hidden, eps, bias=False)

    def layer(number: int) -> PreNorm:
        at, mine = tensors.under(f"transformer.blocks.{number}."), shard.of(c)
        return PreNorm(
            norm(at, "norm_1"),
            SelfAttention(
                number,
                mine.heads,
                mine.kv_heads,
                c.head_dim,
                at.linear("attn.Wqkv", c.hidden, 3 * c.hidden, rows=shard.qkv(c)),
                at.summed("attn.out_proj", c.hidden, c.hidden, False, shard.queries(c)),
            ),
            norm(at, "norm_2"),
            MLP(
                at.linear("ffn.up_proj", c.hidden, width, rows=[shard.part(width)]),
                at.summed("ffn.down_proj", width, c.hidden, False, shard.part(width)),
                gelu,
            ),
        )

    tokens = tensors.table("transformer.wte", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(tokens),
        [layer(number) for number in range(c.layers)],
        norm(tensors, "transformer.norm_f"),
        tensors.head("lm_head", c.vocabulary, c.hidden, tokens if c.tied_embeddings else None),
    )
