"""GPT-J (Wang and Komatsuzaki, 2021): attention and MLP side by side behind one norm, biases in the MLP and the output.

A part of each head is rotated; the elements of a pair are neighbours in the checkpoint.
"""

from model.blocks import MLP, Parallel, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import read_activation
from model.rope import Rope, frequencies
from model.tensors import Tensors, in_halves


def load_gptj(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GPTJForCausalLM."""
    c, fields, shard = config, config.fields, tensors.shard
    width, eps = fields.positive("n_inner", 4 * c.hidden), fields.positive_float("layer_norm_epsilon", 1e-5)
    activation = read_activation(fields, "activation_function", "gelu_new")
    rotated = fields.positive("rotary_dim", 64)
    if rotated % 2 or rotated > c.head_dim:
        raise fields.refuse("rotary_dim", f"must be even and at most {c.head_dim}")
    rope = Rope(frequencies(rotated, 10000.0), c.context, tensors.dtype, tensors.device)
    queries, keys, values = shard.qkv(c)
    rows = [*in_halves(queries, c.head_dim, rotated), *in_halves(keys, c.head_dim, rotated), values]
    parts = [(f"attn.{part}_proj", c.hidden) for part in "qkv"]
    tensors.ignore(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")  # buffers

    def layer(number: int) -> Parallel:
        at = tensors.under(f"transformer.h.{number}.")
        attention = SelfAttention(
            number,
            shard.of(c).heads,
            shard.of(c).kv_heads,
            c.head_dim,
            at.linear(parts, c.hidden, rows=rows),
            at.summed("attn.out_proj", c.hidden, c.hidden, False, shard.queries(c)),
            rope,
        )
        up = at.linear("mlp.fc_in", c.hidden, width, True, rows=[shard.part(width)])
        down = at.summed("mlp.fc_out", width, c.hidden, True, shard.part(width))
        return Parallel(at.layer_norm("ln_1", c.hidden, eps), attention, None, MLP(up, down, activation))

    embedding = tensors.table("transformer.wte", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(embedding),
        [layer(number) for number in range(c.layers)],
        tensors.layer_norm("transformer.ln_f", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, embedding if c.tied_embeddings else None, bias=True),
    )
