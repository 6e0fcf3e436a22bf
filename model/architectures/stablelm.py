"""StableLM (Stability AI, 2023): LayerNorm, rotary positions for a part of each head, SwiGLU.

StableLM 2 may have norms with weights for each head, and attention and MLP side by side.
"""

import torch

from model.architectures.llama import load_attention, load_mlp
from model.blocks import OwnNorms, Parallel, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.rope import Rope, read_rope
from model.tensors import Tensors


def load_stablelm(config: ModelConfig, tensors: Tensors) -> Decoder:
    """StableLmForCausalLM."""
    c, fields, eps = config, config.fields, config.fields.positive_float("layer_norm_eps", 1e-5)
    frequencies, scale = read_rope(fields, c.head_dim, partial=0.25)
    rope = Rope(frequencies, c.context, tensors.dtype, tensors.device, scale)
    bias, side_by_side = fields.flag("use_qkv_bias"), fields.flag("use_parallel_residual")

    def head_norm(at: Tensors, name: str) -> OwnNorms:
        queries = name.endswith("q_norm")
        mine = at.shard.queries(c) if queries else at.shard.keys(c)
        each = at.under(f"self_attn.{'q' if queries else 'k'}_layernorm.norms.")
        weights = [each(f"{head}.weight", c.head_dim) for head in range(c.heads if queries else c.kv_heads)]
        return OwnNorms(torch.stack(weights[mine.start // c.head_dim : mine.stop // c.head_dim]), eps)

    def layer(number: int) -> PreNorm | Parallel:
        at = tensors.under(f"model.layers.{number}.")
        norms = head_norm if fields.flag("qk_layernorm") else None
        norm = at.layer_norm("input_layernorm", c.hidden, eps)
        attention = load_attention(c, at, number, rope, bias, head_norm=norms)
        if side_by_side:
            return Parallel(norm, attention, None, load_mlp(c, at))
        return PreNorm(norm, attention, at.layer_norm("post_attention_layernorm", c.hidden, eps), load_mlp(c, at))

    tensors.ignore(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("model.norm", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None),
    )
