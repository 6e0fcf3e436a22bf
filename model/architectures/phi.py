"""Phi 1 to 2 (Gunasekar et al., 2023): attention and MLP side by side behind one norm.

It has biases everywhere, and rotary positions for a part of each head.
"""

from model.blocks import MLP, Norm, Parallel, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import read_activation
from model.rope import Rope, read_rope
from model.tensors import Tensors


def load_phi(config: ModelConfig, tensors: Tensors) -> Decoder:
    """PhiForCausalLM."""
    c, fields = config, config.fields
    width, eps = fields.positive("intermediate_size"), fields.positive_float("layer_norm_eps", 1e-5)
    queries, keys, shard = c.heads * c.head_dim, c.kv_heads * c.head_dim, tensors.shard
    parts = [("self_attn.q_proj", queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    activation = read_activation(fields, "hidden_act", "gelu_new")
    frequencies, scale = read_rope(fields, c.head_dim, partial=0.5)
    rope = Rope(frequencies, c.context, tensors.dtype, tensors.device, scale)

    def head_norm(at: Tensors, name: str) -> Norm | None:
        return at.layer_norm(f"self_attn.{name}", c.head_dim, eps) if fields.flag("qk_layernorm") else None

    def layer(number: int) -> Parallel:
        at = tensors.under(f"model.layers.{number}.")
        attention = SelfAttention(
            number,
            shard.of(c).heads,
            shard.of(c).kv_heads,
            c.head_dim,
            at.linear(parts, c.hidden, bias=True, rows=shard.qkv(c)),
            at.summed("self_attn.dense", queries, c.hidden, True, shard.queries(c)),
            rope,
            head_norm(at, "q_layernorm"),
            head_norm(at, "k_layernorm"),
        )
        up = at.linear("mlp.fc1", c.hidden, width, True, rows=[shard.part(width)])
        down = at.summed("mlp.fc2", width, c.hidden, True, shard.part(width))
        norm = at.layer_norm("input_layernorm", c.hidden, eps)
        return Parallel(norm, attention, None, MLP(up, down, activation))

    tensors.ignore(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("model.final_layernorm", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None, bias=True),
    )
