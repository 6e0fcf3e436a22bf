"""Granite 3 (IBM, 2024): Llama with factors of embeddings, attention's scores, residuals and logits (muP).

It has an MLP, or a mixture of experts whose tensors hold all experts (Granite MoE, PowerMoE).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from model.architectures.experts import ExpertNames, load_experts, read_used
from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps
from model.blocks import FeedForward, Multiplied, Sandwich
from model.config import ModelConfig
from model.decoder import Decoder
from model.forward import Layer
from model.routing import Routing
from model.tensors import Tensors

STACKED = ExpertNames(together=("input_linear.weight", "output_linear.weight"), router="router.layer")
AS_IN_TRANSFORMERS_5 = ExpertNames(router="router")


def load_granite(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GraniteForCausalLM."""
    return _load(config, tensors, lambda at: load_mlp(config, at))


def load_granite_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GraniteMoeForCausalLM."""
    c, fields = config, config.fields
    experts, width = fields.positive("num_local_experts", 8), fields.positive("intermediate_size")
    routing = Routing(read_used(c, experts, 2), normalised=True)

    def mixture(at: Tensors) -> FeedForward:
        moe = at.under("block_sparse_moe.")
        names = AS_IN_TRANSFORMERS_5 if "router.weight" in moe else STACKED
        return moe.ranks.summed(load_experts(c, moe, experts, width, routing, names))

    return _load(config, tensors, mixture)


def _load(config: ModelConfig, tensors: Tensors, feed_forward: Callable[[Tensors], FeedForward]) -> Decoder:
    c, rope, bias = config, load_rope(config, tensors), config.fields.flag("attention_bias")
    residual = Multiplied(c.fields.positive_float("residual_multiplier", 1.0))

    def layer(number: int) -> Sandwich:
        at = tensors.under(f"model.layers.{number}.")
        return Sandwich(
            load_attention(c, at, number, rope, bias, bias),
            residual,
            feed_forward(at),
            residual,
            before_attention=at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            before_mlp=at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
        )

    return with_factors(c, tensors, [layer(number) for number in range(c.layers)])


def with_factors(config: ModelConfig, tensors: Tensors, layers: Sequence[Layer]) -> Decoder:
    """Loads a decoder around its layers, with the factors of its embeddings and logits."""
    c, decoder = config, load_decoder(config, tensors, layers)
    scale = c.fields.positive_float("embedding_multiplier", 1.0)
    return replace(
        decoder,
        embedding=replace(decoder.embedding, scale=scale),
        logit_scale=1.0 / c.fields.positive_float("logits_scaling", 1.0),
    )
