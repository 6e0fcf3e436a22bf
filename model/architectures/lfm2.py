"""LFM2 (Liquid AI, 2025): most layers mix tokens by a short convolution, some have attention with normed heads."""

from collections.abc import Callable

from model.architectures.experts import MIXTRAL_NAMES, load_experts, read_used
from model.architectures.llama import (
    AttentionNames,
    load_attention,
    load_decoder,
    load_rope,
    norm_eps,
    rms_norm_of_heads,
)
from model.architectures.mixers import load_short_convolution
from model.blocks import FeedForward, GatedMLP, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.layers import silu
from model.recurrent import ConvolutionShape
from model.routing import Routing
from model.tensors import Tensors

NAMES = AttentionNames(
    output="self_attn.out_proj", query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm"
)


def load_lfm2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Lfm2ForCausalLM."""
    return _load(config, tensors, lambda at, _: _mlp(config, at, config.fields.positive("intermediate_size")))


def load_lfm2_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Lfm2MoeForCausalLM. Its first layers have MLPs.

    transformers adds 1e-6 to the sum that weights are divided by, which changes them by about a rounding of float32.
    """
    c, fields = config, config.fields
    dense, experts = fields.get("num_dense_layers", int, 2), fields.positive("num_experts", 32)
    width, used = fields.positive("moe_intermediate_size", 1792), read_used(c, experts, 4)
    biased, normalised = fields.flag("use_expert_bias", True), fields.flag("norm_topk_prob", True)
    factor = fields.positive_float("routed_scaling_factor", 1.0)

    def mlp(at: Tensors, number: int) -> FeedForward:
        if number < dense:
            return _mlp(c, at, fields.positive("intermediate_size"))
        bias = at.floats("feed_forward.expert_bias", experts) if biased else None
        routing = Routing(used, normalised, by_sigmoid=True, bias=bias, factor=factor)
        mixture = at.under("feed_forward.")
        return mixture.ranks.summed(load_experts(c, mixture, experts, width, routing, MIXTRAL_NAMES))

    return _load(config, tensors, mlp)


def _load(config: ModelConfig, tensors: Tensors, mlp: Callable[[Tensors, int], FeedForward]) -> Decoder:
    c, eps, rope = config, norm_eps(config), load_rope(config, tensors, 1e6)

    def layer(number: int) -> PreNorm:
        at, shape = tensors.under(f"model.layers.{number}."), c.recurrent[number] if c.recurrent else None
        return PreNorm(
            at.rms_norm("operator_norm", c.hidden, eps),
            load_short_convolution(c, at.under("conv."), number, shape)
            if isinstance(shape, ConvolutionShape)
            else load_attention(c, at, number, rope, head_norm=rms_norm_of_heads(c), names=NAMES),
            at.rms_norm("ffn_norm", c.hidden, eps),
            mlp(at, number),
        )

    layers = [layer(number) for number in range(c.layers)]
    return load_decoder(c, tensors, layers, norm="model.embedding_norm")


def _mlp(config: ModelConfig, at: Tensors, width: int) -> GatedMLP:
    return GatedMLP(
        at.linear(
            [("feed_forward.w1", width), ("feed_forward.w3", width)],
            config.hidden,
            gated=True,
            rows=at.shard.gated(width),
        ),
        at.summed("feed_forward.w2", width, config.hidden, False, at.shard.part(width)),
        silu,
    )
