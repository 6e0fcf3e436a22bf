"""ERNIE 4.5 with a mixture of experts (Baidu, 2025): chosen by softmax and bias, beside shared ones."""

from dataclasses import replace

from model.architectures.experts import load_experts, load_with_shared, read_used
from model.architectures.llama import load_attention, load_mlp, load_rope, norm_eps
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.routing import Routing
from model.tensors import Tensors


def load_ernie4_5_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Ernie4_5_MoeForCausalLM. One flag is for all biases, also that of the logits; experts have none."""
    fields, rope, bias = config.fields, load_rope(config, tensors, 5e5), config.fields.flag("use_bias")
    c, sparse = replace(config, fields=fields.having({"mlp_bias": bias})), _sparse_layers(config)
    tensors.ignore(r".*mtp.*")  # predicts further tokens

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope, bias, bias, neighbours=True),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            _mixture(c, at.under("mlp."), bias) if number in sparse else load_mlp(c, at),
        )

    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.rms_norm("model.norm", c.hidden, norm_eps(c)),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None, bias),
    )


def _sparse_layers(config: ModelConfig) -> set[int]:
    """Returns the layers that have experts."""
    fields = config.fields
    first, last = fields.get("moe_layer_start_index", int, 1), fields.get("moe_layer_end_index", int, -1)
    last, every = config.layers - 1 if last == -1 else last, fields.positive("moe_layer_interval", 1)
    return {number for number in range(config.layers) if first <= number <= last and (number + 1) % every == 0}


def _mixture(config: ModelConfig, at: Tensors, bias: bool) -> FeedForward:
    fields = config.fields
    experts, width = fields.positive("moe_num_experts", 64), fields.positive("moe_intermediate_size", 1536)
    shared = fields.get("moe_num_shared_experts", int, 2)
    statics = at.under_any(("moe_statics.", "gate.moe_statics."), "e_score_correction_bias")
    routing = Routing(
        read_used(config, experts, 6, "moe_k"),
        normalised=True,
        bias=statics.floats("e_score_correction_bias", 1, experts)[0],
        least=fields.positive_float("moe_norm_min", 1e-12),
    )
    routed = load_experts(config, at, experts, width, routing)
    if shared <= 0:
        return at.ranks.summed(routed)
    return at.ranks.summed(load_with_shared(config, at, routed, "shared_experts", shared * width, bias=bias))
