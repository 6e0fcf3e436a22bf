"""gpt-oss (OpenAI, 2025): attention sinks, alternating windows, and experts with biases and clamped gates."""

from dataclasses import replace

from model.architectures.experts import read_used
from model.architectures.llama import load_attention, load_decoder, load_rope, norm_eps
from model.blocks import Experts, FeedForward, GatedMLP, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder
from model.fields import Fields
from model.layers import quick_gelu
from model.rope import Rope
from model.routing import Routing
from model.tensors import Tensors

SLOPE = 1.702  # of the gates' sigmoid: that of `quick_gelu`
THETA = 150000.0
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": False, "original_max_position_embeddings": 4096,
}  # fmt: skip
"""'rope_parameters' where config.json has none, but for 'rope_theta'."""


def load_gpt_oss(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GptOssForCausalLM."""
    c = config
    if c.fields.positive_float("swiglu_alpha", SLOPE) != SLOPE:
        raise c.fields.refuse("swiglu_alpha", f"must be {SLOPE}")
    rope = load_rope(c, tensors, THETA, fields=rope_fields(c.fields))

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            _attention(c, at, number, rope),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            _experts(c, at.under("mlp.")),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def rope_fields(fields: Fields) -> Fields:
    """Returns the fields that `read_rope` reads: with `ROPE` where config.json is silent."""
    said = any(fields.values.get(key) is not None for key in ("rope_parameters", "rope_scaling"))
    return fields if said else fields.having({"rope_parameters": ROPE})


def _attention(config: ModelConfig, at: Tensors, number: int, rope: Rope) -> SelfAttention:
    bias = config.fields.flag("attention_bias", True)
    attention = load_attention(config, at, number, rope, bias, bias)
    first = at.shard.rank * attention.heads
    return replace(attention, sinks=at.floats("self_attn.sinks", config.heads)[first : first + attention.heads])


def _experts(config: ModelConfig, at: Tensors) -> FeedForward:
    fields, width = config.fields, config.fields.positive("intermediate_size", 2880)
    experts = fields.positive("num_local_experts", 128)
    used = read_used(config, experts, 4)
    limit, mine = fields.positive_float("swiglu_limit", 7.0), at.shard.part(width)
    router = at.unquantized().linear("router", config.hidden, experts, bias=True)
    routing = Routing(used, normalised=True)
    if fields.flag("experts_apart"):  # as llama.cpp saves them

        def load(own: Tensors) -> GatedMLP:
            gate_up, rows = [("gate_proj", width), ("up_proj", width)], own.shard.gated(width)
            gates = own.linear(gate_up, config.hidden, bias=True, gated=True, rows=rows)
            down = own.linear("down_proj", width, config.hidden, bias=True, columns=mine)
            return GatedMLP(gates, down, quick_gelu, limit)

        apart = at.each("experts.", experts, ("gate_proj", "up_proj", "down_proj"), load)
        return at.ranks.summed(Experts(router, apart, routing))
    # Gates and what they multiply are neighbours in the file.
    rows = [slice(2 * mine.start + which, 2 * mine.stop, 2) for which in range(2)]
    own = at.transposed()
    gates = own.stacked("experts.gate_up_proj", experts, config.hidden, 2 * width, gated=True, rows=rows, bias=True)
    downs = own.stacked("experts.down_proj", experts, width, config.hidden, columns=mine, bias=True)
    parts = [GatedMLP(gate_up, down, quick_gelu, limit) for gate_up, down in zip(gates, downs, strict=True)]
    return at.ranks.summed(Experts(router, parts, routing))
