"""GLM-4.5 and later (Zhipu AI, 2025): DeepSeek-V3's mixtures under attention with heads in groups."""

from model.architectures.experts import (
    PLAIN_NAMES,
    ExpertNames,
    load_experts,
    load_with_shared,
    read_groups,
    read_used,
)
from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps, rms_norm_of_heads
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.routing import Routing
from model.tensors import Tensors

MOST_PREDICTORS = 8  # layers; published models have 1


def load_glm4_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Glm4MoeForCausalLM."""
    c, fields, rope = config, config.fields, load_rope(config, tensors, partial=0.5)
    bias = fields.flag("attention_bias")
    head_norm = rms_norm_of_heads(c) if fields.flag("use_qk_norm") else None
    dense = fields.get("first_k_dense_replace", int, 1)
    ignore_predictors(c, tensors)

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope, bias, False, head_norm),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            load_mlp(c, at) if number < dense else load_deepseek_experts(c, at.under("mlp."), (128, 8), (1, 1), 1408),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def load_deepseek_experts(
    config: ModelConfig,
    at: Tensors,
    default: tuple[int, int],
    groups: tuple[int, int],
    width: int,
    factor: float = 1.0,
    names: ExpertNames = PLAIN_NAMES,
) -> FeedForward:
    """Loads a mixture of DeepSeek-V3's kind: sigmoids, a bias for the choice, and shared experts as one MLP.

    Args:
        config: Configuration of the model.
        at: Tensors of the layer's experts.
        default: Experts, and those of a token, where config.json says nothing.
        groups: Groups of experts, and those of a token, likewise.
        width: Width of an expert, likewise.
        factor: Factor of experts' weights, likewise.
        names: Names of its tensors.
    """
    routing, experts = read_sigmoid_routing(config, at, default, groups, factor)
    width = config.fields.positive("moe_intermediate_size", width)
    shared = config.fields.positive("n_shared_experts", 1) * width
    routed = load_experts(config, at, experts, width, routing, names)
    return at.ranks.summed(load_with_shared(config, at, routed, "shared_experts", shared))


def read_sigmoid_routing(
    config: ModelConfig, at: Tensors, default: tuple[int, int], groups: tuple[int, int], factor: float
) -> tuple[Routing, int]:
    """Reads how experts are chosen, and their number; arguments as `load_deepseek_experts`."""
    fields = config.fields
    experts = fields.positive("n_routed_experts", default[0])
    used = read_used(config, experts, default[1])
    routing = Routing(
        used,
        normalised=fields.flag("norm_topk_prob", True),
        by_sigmoid=True,
        bias=at.floats("gate.e_score_correction_bias", experts),
        groups=read_groups(config, experts, used, 2, groups),
        factor=fields.positive_float("routed_scaling_factor", factor),
    )
    return routing, experts


def ignore_predictors(
    config: ModelConfig, tensors: Tensors, key: str = "num_nextn_predict_layers", default: int = 1
) -> None:
    """Passes over the layers after the last that predict further tokens (MTP), of which `key` has the number."""
    for number in range(min(config.fields.get(key, int, default), MOST_PREDICTORS)):
        tensors.ignore(rf"model\.layers\.{config.layers + number}\..*")
