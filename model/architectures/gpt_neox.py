"""GPT-NeoX (Black et al., 2022), Pythia: rotary positions for a part of each head, attention and MLP side by side."""

from model.blocks import MLP, Parallel, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import read_activation
from model.rope import Rope, read_rope
from model.tensors import Tensors, head_by_head


def load_gpt_neox(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GPTNeoXForCausalLM."""
    c, fields = config, config.fields
    width, bias = fields.positive("intermediate_size"), fields.flag("attention_bias", True)
    eps = fields.positive_float("layer_norm_eps", 1e-5)
    activation = read_activation(fields, "hidden_act", "gelu")
    theta, part = fields.positive_float("rotary_emb_base", 10000.0), fields.positive_float("rotary_pct", 0.25)
    frequencies, scale = read_rope(fields, c.head_dim, theta, part)
    rope = Rope(frequencies, c.context, tensors.dtype, tensors.device, scale)
    shard = tensors.shard
    kind = Parallel if fields.flag("use_parallel_residual", True) else PreNorm
    tensors.ignore(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")  # buffers

    def layer(number: int) -> Parallel | PreNorm:
        at = tensors.under(f"gpt_neox.layers.{number}.")
        qkv = head_by_head(at, "attention.query_key_value", c.hidden, (c.heads, 3, c.head_dim), bias, shard.qkv(c))
        return kind(
            at.layer_norm("input_layernorm", c.hidden, eps),
            SelfAttention(
                number,
                shard.of(c).heads,
                shard.of(c).kv_heads,
                c.head_dim,
                qkv,
                at.summed("attention.dense", c.hidden, c.hidden, bias, shard.queries(c)),
                rope,
            ),
            at.layer_norm("post_attention_layernorm", c.hidden, eps),
            MLP(
                at.linear("mlp.dense_h_to_4h", c.hidden, width, True, rows=[shard.part(width)]),
                at.summed("mlp.dense_4h_to_h", width, c.hidden, True, shard.part(width)),
                activation,
            ),
        )

    head = "lm_head" if "lm_head.weight" in tensors else "embed_out"
    embedding = tensors.table("gpt_neox.embed_in", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("gpt_neox.final_layer_norm", c.hidden, eps),
        tensors.head(head, c.vocabulary, c.hidden, embedding if c.tied_embeddings else None),
    )
