"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm before, GELU; linear weights are saved as [in, out]."""

from model.blocks import MLP, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.errors import CheckpointError
from model.layers import read_activation
from model.tensors import Tensors


def load_gpt2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """GPT2LMHeadModel."""
    c = config
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if c.fields.flag(key):
            raise c.fields.refuse(key, "which is not supported")
    if not c.fields.flag("scale_attn_weights", True):
        raise CheckpointError(f"{c.fields.path}: 'scale_attn_weights' is False, which is not supported")
    width = c.fields.positive("n_inner", 4 * c.hidden)
    eps = c.fields.positive_float("layer_norm_epsilon", 1e-5)
    activation = read_activation(c.fields, "activation_function", "gelu_new")
    shard = tensors.shard
    root = tensors.under_any(("transformer.", ""), "wte.weight")  # the first checkpoints have no prefix
    tensors.ignore(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")  # the causal mask, a buffer

    def layer(number: int) -> PreNorm:
        at = root.under(f"h.{number}.").transposed()
        return PreNorm(
            at.layer_norm("ln_1", c.hidden, eps),
            SelfAttention(
                number,
                shard.of(c).heads,
                shard.of(c).kv_heads,
                c.head_dim,
                at.linear("attn.c_attn", c.hidden, 3 * c.hidden, True, rows=shard.qkv(c)),
                at.summed("attn.c_proj", c.hidden, c.hidden, True, shard.queries(c)),
            ),
            at.layer_norm("ln_2", c.hidden, eps),
            MLP(
                at.linear("mlp.c_fc", c.hidden, width, True, rows=[shard.part(width)]),
                at.summed("mlp.c_proj", width, c.hidden, True, shard.part(width)),
                activation,
            ),
        )

    tokens = root.table("wte", c.vocabulary, c.hidden)
    return Decoder(
        Embedding(tokens, positions=root("wpe.weight", c.context, c.hidden)),
        [layer(number) for number in range(c.layers)],
        root.layer_norm("ln_f", c.hidden, eps),
        tensors.head("lm_head", c.vocabulary, c.hidden, tokens if c.tied_embeddings else None),
    )
