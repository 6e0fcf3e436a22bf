"""EXAONE 4 (LG AI Research, 2025): Llama with norms after attention and MLP, and norms of queries and keys.

The large one has windows in three of four layers, and no rotary positions in the fourth.
"""

from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps, rms_norm_of_heads
from model.blocks import Sandwich
from model.config import ModelConfig
from model.decoder import Decoder
from model.families import SLIDING, every_fourth, layer_types
from model.tensors import Tensors


def load_exaone4(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Exaone4ForCausalLM."""
    c, rope = config, load_rope(config, tensors)
    windowed = c.fields.values.get("sliding_window", 4096) is not None
    kinds = layer_types(c.fields, c.layers, every_fourth)

    def layer(number: int) -> Sandwich:
        at, rotated = tensors.under(f"model.layers.{number}."), not windowed or kinds[number] == SLIDING
        return Sandwich(
            attention=load_attention(c, at, number, rope if rotated else None, head_norm=rms_norm_of_heads(c)),
            attention_norm=at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            mlp=load_mlp(c, at),
            mlp_norm=at.rms_norm("post_feedforward_layernorm", c.hidden, norm_eps(c)),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])
