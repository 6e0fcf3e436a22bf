"""The language model of nanoVLM: a Llama under names of its own (github.com/huggingface/nanoVLM)."""

from model.blocks import GatedMLP, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import silu
from model.rope import Rope, read_rope
from model.tensors import Tensors


def load_nano(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Loads nanoVLM's language model. 'lm_attn_scaling' scales cos and sin."""
    c, at, shard = config, tensors.under("decoder."), tensors.shard
    fields = c.fields if c.vision is None else c.vision.fields
    queries, keys, eps = c.heads * c.head_dim, c.kv_heads * c.head_dim, c.fields.positive_float("rms_norm_eps")
    width = c.fields.positive("intermediate_size")
    parts = [("attn.q_proj", queries), ("attn.k_proj", keys), ("attn.v_proj", keys)]
    gate_up = [("mlp.gate_proj", width), ("mlp.up_proj", width)]
    frequencies, _ = read_rope(c.fields, c.head_dim)
    scale = fields.positive_float("lm_attn_scaling", 1.0)
    rope = Rope(frequencies, c.context, tensors.dtype, tensors.device, scale)
    tensors.ignore(r"decoder\.rotary_embd\.inv_freq")

    def layer(number: int) -> PreNorm:
        of = at.under(f"blocks.{number}.")
        return PreNorm(
            of.rms_norm("norm1", c.hidden, eps),
            SelfAttention(
                number,
                shard.of(c).heads,
                shard.of(c).kv_heads,
                c.head_dim,
                qkv=of.linear(parts, c.hidden, rows=shard.qkv(c)),
                output=of.summed("attn.out_proj", queries, c.hidden, False, shard.queries(c)),
                rope=rope,
            ),
            of.rms_norm("norm2", c.hidden, eps),
            GatedMLP(
                of.linear(gate_up, c.hidden, gated=True, rows=shard.gated(width)),
                of.summed("mlp.down_proj", width, c.hidden, False, shard.part(width)),
                silu,
            ),
        )

    # Tied weights are saved once, under either name.
    name = "token_embedding" if not c.tied_embeddings or "token_embedding.weight" in at else "head"
    embedding = at.table(name, c.vocabulary, c.hidden)
    head = at.head("head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        at.rms_norm("norm", c.hidden, eps),
        head,
    )
