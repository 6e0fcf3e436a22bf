"""Command R (Cohere, 2024): attention and MLP side by side behind a LayerNorm without bias, and a factor of the logits.

The elements of a rotated pair are neighbours in the checkpoint. Command R+ has norms of queries and keys with weights
for each head. Cohere 2 (Command R7B, 2024) has windows in three of four layers, and no rotary positions in the fourth.
"""

from collections.abc import Sequence

import torch

from model.architectures.llama import HeadNorm, load_attention, load_mlp, load_rope
from model.blocks import OwnNorms, Parallel
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.families import SLIDING, every_fourth, layer_types
from model.rope import Rope
from model.tensors import Tensors, in_halves


def load_cohere(config: ModelConfig, tensors: Tensors) -> Decoder:
    """CohereForCausalLM."""
    norm = _own_norms(config) if config.fields.flag("use_qk_norm") else None
    return _load(config, tensors, [load_rope(config, tensors, 5e5)] * config.layers, norm)


def load_cohere2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Cohere2ForCausalLM."""
    fields, rope = config.fields, load_rope(config, tensors)
    windowed = fields.values.get("sliding_window", 4096) is not None
    kinds = layer_types(fields, config.layers, every_fourth)
    return _load(config, tensors, [rope if windowed and kind == SLIDING else None for kind in kinds])


def _load(
    config: ModelConfig, tensors: Tensors, ropes: Sequence[Rope | None], head_norm: HeadNorm | None = None
) -> Decoder:
    c, eps, bias = config, _eps(config), config.fields.flag("attention_bias")

    def layer(number: int) -> Parallel:
        at = tensors.under(f"model.layers.{number}.")
        return Parallel(
            at.layer_norm("input_layernorm", c.hidden, eps, bias=False),
            load_attention(c, at, number, ropes[number], bias, bias, head_norm, neighbours=True),
            None,
            load_mlp(c, at),
        )

    tensors.ignore(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("model.norm", c.hidden, eps, bias=False),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None),
        logit_scale=c.fields.positive_float("logit_scale", 0.0625),
    )


def _eps(config: ModelConfig) -> float:
    return config.fields.positive_float("layer_norm_eps", 1e-5)


def _own_norms(config: ModelConfig) -> HeadNorm:
    """Norms whose weights are in the order of the rotated halves, as queries and keys are."""
    c, dim = config, config.head_dim
    order = torch.cat([torch.arange(dim)[run] for run in in_halves(slice(0, dim), dim, dim)])

    def norm(at: Tensors, name: str) -> OwnNorms:
        queries = name.endswith("q_norm")
        mine = at.shard.queries(c) if queries else at.shard.keys(c)
        weight = at(f"{name}.weight", c.heads if queries else c.kv_heads, dim)
        return OwnNorms(weight[mine.start // dim : mine.stop // dim, order.to(weight.device)], _eps(c))

    return norm
