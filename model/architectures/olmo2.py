"""OLMo 2 (Team OLMo, 2024): Llama with norms after attention and MLP in place of those before.

Queries are normalised over all heads of a token together, and so are keys.
"""

from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps
from model.blocks import Norm, Sandwich, Together
from model.config import ModelConfig
from model.decoder import Decoder
from model.tensors import Tensors


def load_olmo2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Olmo2ForCausalLM."""
    c, rope = config, load_rope(config, tensors)
    if tensors.shard.size > 1:
        raise ValueError(
            f"--tensor-parallel is {tensors.shard.size}: {c.architecture} normalises all heads of a token together, "
            "which no rank has; it runs with 1"
        )
    bias = c.fields.flag("attention_bias")

    def over_all_heads(at: Tensors, name: str) -> Norm:
        heads = c.heads if name.endswith("q_norm") else c.kv_heads
        return Together(at.rms_norm(name, heads * c.head_dim, norm_eps(c)))

    def layer(number: int) -> Sandwich:
        at = tensors.under(f"model.layers.{number}.")
        return Sandwich(
            attention=load_attention(c, at, number, rope, bias, bias, over_all_heads),
            attention_norm=at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            mlp=load_mlp(c, at),
            mlp_norm=at.rms_norm("post_feedforward_layernorm", c.hidden, norm_eps(c)),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])
