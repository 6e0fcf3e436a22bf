"""OLMo 2 (Team OLMo, 2024): Llama with norms after attention and MLP in place of those before.

Queries are normalised over all heads of a token together, and so are keys. OLMo 3 has windows in three of four layers,
whose rotary positions are not scaled.
"""

from collections.abc import Sequence

from model.architectures.llama import (
    load_attention,
    load_decoder,
    load_mlp,
    load_rope,
    norm_eps,
    rms_norm_of_all_heads,
)
from model.blocks import Sandwich
from model.config import ModelConfig
from model.decoder import Decoder
from model.families import SLIDING, every_fourth, layer_types
from model.rope import Rope, ropes_by_type
from model.tensors import Tensors


def load_olmo2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Olmo2ForCausalLM."""
    return _load(config, tensors, [load_rope(config, tensors)] * config.layers)


def load_olmo3(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Olmo3ForCausalLM."""
    fields, theta = config.fields, 5e5
    full, sliding = ropes_by_type(fields, fields.positive_float("rope_theta", theta))
    everything, window = (load_rope(config, tensors, theta, fields=which) for which in (full, sliding))
    kinds = layer_types(fields, config.layers, every_fourth)
    return _load(config, tensors, [window if kind == SLIDING else everything for kind in kinds])


def _load(config: ModelConfig, tensors: Tensors, ropes: Sequence[Rope]) -> Decoder:
    c, bias = config, config.fields.flag("attention_bias")
    over_all_heads = rms_norm_of_all_heads(config, tensors)

    def layer(number: int) -> Sandwich:
        at = tensors.under(f"model.layers.{number}.")
        return Sandwich(
            attention=load_attention(c, at, number, ropes[number], bias, bias, over_all_heads),
            attention_norm=at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            mlp=load_mlp(c, at),
            mlp_norm=at.rms_norm("post_feedforward_layernorm", c.hidden, norm_eps(c)),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])
