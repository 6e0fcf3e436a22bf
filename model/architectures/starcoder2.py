"""StarCoder 2 (Lozhkov et al., 2024): grouped-query attention with a window, LayerNorm, MLPs without a gate, biases."""

from model.architectures.llama import load_attention, load_rope
from model.blocks import MLP, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import read_activation
from model.tensors import Tensors


def load_starcoder2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Starcoder2ForCausalLM."""
    c, fields, rope = config, config.fields, load_rope(config, tensors)
    width, bias = fields.positive("intermediate_size"), fields.flag("use_bias", True)
    eps = fields.positive_float("norm_epsilon", 1e-5)
    activation = read_activation(fields, "hidden_act", "gelu_pytorch_tanh")

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        up = at.linear("mlp.c_fc", c.hidden, width, bias, rows=[at.shard.part(width)])
        down = at.summed("mlp.c_proj", width, c.hidden, bias, at.shard.part(width))
        return PreNorm(
            at.layer_norm("input_layernorm", c.hidden, eps),
            load_attention(c, at, number, rope, bias, bias),
            at.layer_norm("post_attention_layernorm", c.hidden, eps),
            MLP(up, down, activation),
        )

    embedding = tensors.table("model.embed_tokens", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("model.norm", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None),
    )
