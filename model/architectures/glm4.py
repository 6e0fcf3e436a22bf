"""GLM-4 0414 (Zhipu AI, 2025): Llama with norms after attention and MLP too, and neighbours rotated in half a head."""

from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps
from model.blocks import Sandwich
from model.config import ModelConfig
from model.decoder import Decoder
from model.tensors import Tensors


def load_glm4(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Glm4ForCausalLM."""
    c, rope, bias = config, load_rope(config, tensors, partial=0.5), config.fields.flag("attention_bias", True)

    def layer(number: int) -> Sandwich:
        at = tensors.under(f"model.layers.{number}.")
        return Sandwich(
            load_attention(c, at, number, rope, bias, neighbours=True),
            at.rms_norm("post_self_attn_layernorm", c.hidden, norm_eps(c)),
            load_mlp(c, at, fused=True),
            at.rms_norm("post_mlp_layernorm", c.hidden, norm_eps(c)),
            before_attention=at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            before_mlp=at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])
