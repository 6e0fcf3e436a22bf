"""Granite 4 (IBM, 2025): Granite 3 with state-space mixers in most layers, and an MLP beside the experts.

Its smallest models have attention in all layers and no experts.
"""

from model.architectures.experts import load_experts, read_used
from model.architectures.granite import AS_IN_TRANSFORMERS_5, STACKED, with_factors
from model.architectures.llama import load_attention, load_rope, norm_eps
from model.architectures.mixers import load_state_space
from model.blocks import FeedForward, GatedMLP, Mixer, Multiplied, Sandwich, SharedExperts
from model.config import ModelConfig
from model.decoder import Decoder
from model.layers import read_activation
from model.recurrent import ScanShape
from model.routing import Routing
from model.tensors import Tensors


def load_granite_hybrid(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GraniteMoeHybridForCausalLM."""
    c, fields, eps = config, config.fields, norm_eps(config)
    rotated = fields.get("position_embedding_type", str, "") == "rope"
    rope = load_rope(c, tensors) if rotated else None
    residual = Multiplied(fields.positive_float("residual_multiplier", 1.0))
    bias, of_mixer = fields.flag("attention_bias"), fields.flag("mamba_proj_bias")

    def mixer(at: Tensors, number: int) -> Mixer:
        shape = c.recurrent[number] if c.recurrent else None
        if isinstance(shape, ScanShape):
            return load_state_space(c, at.under("mamba."), number, shape, eps, of_mixer, of_mixer)
        return load_attention(c, at, number, rope, bias, bias)

    def layer(number: int) -> Sandwich:
        at = tensors.under(f"model.layers.{number}.")
        return Sandwich(
            mixer(at, number),
            residual,
            _feed_forward(c, at),
            residual,
            before_attention=at.rms_norm("input_layernorm", c.hidden, eps),
            before_mlp=at.rms_norm("post_attention_layernorm", c.hidden, eps),
        )

    return with_factors(c, tensors, [layer(number) for number in range(c.layers)])


def _feed_forward(config: ModelConfig, at: Tensors) -> FeedForward:
    """Loads the MLP of a layer, and the experts beside it if there are some."""
    c, fields, shared = config, config.fields, at.under("shared_mlp.")
    width, experts = fields.positive("shared_intermediate_size", 1024), fields.get("num_local_experts", int, 8)
    apart = "gate_proj.weight" in shared  # as llama.cpp saves it
    both = [("gate_proj", width), ("up_proj", width)] if apart else [("input_linear", 2 * width)]
    mlp = GatedMLP(
        shared.linear(both, c.hidden, gated=True, rows=at.shard.gated(width)),
        shared.linear("output_linear", width, c.hidden, columns=at.shard.part(width)),
        read_activation(fields, "hidden_act", "silu"),
    )
    if experts <= 0:
        return at.ranks.summed(mlp)
    moe, routing = at.under("block_sparse_moe."), Routing(read_used(c, experts, 2), normalised=True)
    names = AS_IN_TRANSFORMERS_5 if "router.weight" in moe else STACKED
    routed = load_experts(c, moe, experts, fields.positive("intermediate_size"), routing, names)
    return at.ranks.summed(SharedExperts(routed, mlp))
