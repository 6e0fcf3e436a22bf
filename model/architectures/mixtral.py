"""Llama and Qwen with a mixture of experts in place of the MLP: Mixtral (Jiang et al., 2024), Qwen 2 and 3 MoE."""

from model.architectures.experts import MIXTRAL_NAMES, load_experts, load_with_shared, read_used
from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps, rms_norm_of_heads
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.fields import MOST
from model.routing import Routing
from model.tensors import Tensors


def load_mixtral(config: ModelConfig, tensors: Tensors) -> Decoder:
    """MixtralForCausalLM."""
    c, rope = config, load_rope(config, tensors, theta=1e6)
    experts = c.fields.positive("num_local_experts", 8)
    width = c.fields.positive("intermediate_size")

    routing = Routing(read_used(c, experts, 2), normalised=True)

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        moe = at.under_any(("block_sparse_moe.", "mlp."), "gate.weight")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            moe.ranks.summed(load_experts(c, moe, experts, width, routing, MIXTRAL_NAMES)),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def load_qwen2_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen2MoeForCausalLM. All tokens go through a shared expert too."""
    c, fields, rope = config, config.fields, load_rope(config, tensors)
    experts, bias = fields.positive("num_experts", 60), fields.flag("qkv_bias", True)
    width, shared = (fields.positive(f"{kind}_intermediate_size") for kind in ("moe", "shared_expert"))
    routing, dense = Routing(read_used(c, experts, 4), fields.flag("norm_topk_prob")), _dense_layers(c)

    def mixture(at: Tensors) -> FeedForward:
        routed = load_experts(c, at, experts, width, routing)
        return at.ranks.summed(load_with_shared(c, at, routed, "shared_expert", shared, "shared_expert_gate"))

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope, bias),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            load_mlp(c, at) if number in dense else mixture(at.under("mlp.")),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def load_qwen3_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen3MoeForCausalLM. Some of its layers may have an MLP instead."""
    c, rope = config, load_rope(config, tensors)
    experts = c.fields.positive("num_experts" if "num_experts" in c.fields else "num_local_experts", 128)
    width = c.fields.positive("moe_intermediate_size", 768)
    bias, routing = c.fields.flag("attention_bias"), Routing(read_used(c, experts, 8), c.fields.flag("norm_topk_prob"))
    dense = _dense_layers(c)

    def mixture(at: Tensors) -> FeedForward:
        return at.ranks.summed(load_experts(c, at, experts, width, routing))

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope, bias, bias, rms_norm_of_heads(c)),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            load_mlp(c, at) if number in dense else mixture(at.under("mlp.")),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def _dense_layers(config: ModelConfig) -> set[int]:
    """Returns the layers of a Qwen that have an MLP and no experts."""
    every = config.fields.positive("decoder_sparse_step", 1)
    named = {int(number) for number in config.fields.numbers("mlp_only_layers", 0, MOST, [])}
    return named | {number for number in range(config.layers) if (number + 1) % every}
