"""MiniMax M2 (MiniMax, 2025): Mixtral with norms over all heads, a part of each rotated, experts chosen by sigmoid."""

from model.architectures.experts import MIXTRAL_NAMES, load_experts, read_used
from model.architectures.glm4_moe import ignore_predictors
from model.architectures.llama import load_attention, load_decoder, load_rope, norm_eps, rms_norm_of_all_heads
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.routing import Routing
from model.tensors import Tensors


def load_minimax_m2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """MiniMaxM2ForCausalLM. Its published config.json has 'rotary_dim' for the rotated elements of a head."""
    c, fields = config, config.fields
    rope = load_rope(c, tensors, 5e6, fields.positive("rotary_dim", c.head_dim) / c.head_dim)
    experts, width = fields.positive("num_local_experts", 256), fields.positive("intermediate_size")
    used, over_all_heads = read_used(c, experts, 8), rms_norm_of_all_heads(c, tensors)
    ignore_predictors(c, tensors, "num_mtp_modules", 0)

    def mixture(at: Tensors) -> FeedForward:
        bias = at.floats("e_score_correction_bias", experts)
        routing = Routing(used, normalised=True, by_sigmoid=True, bias=bias)
        return at.ranks.summed(load_experts(c, at, experts, width, routing, MIXTRAL_NAMES))

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope, head_norm=over_all_heads),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            mixture(at.under_any(("block_sparse_moe.", "mlp."), "gate.weight")),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])
