"""OPT (Zhang et al., 2022): learned positions from 2 on, ReLU.

The smallest model but one normalises after attention and MLP, and has an embedding narrower than its layers.
"""

from model.blocks import MLP, Chain, FeedForward, Norm, PostNorm, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.layers import read_activation
from model.tensors import Tensors

OFFSET = 2  # rows of the position table that stood for padding
EPS = 1e-5


def load_opt(config: ModelConfig, tensors: Tensors) -> Decoder:
    """OPTForCausalLM."""
    c, fields = config, config.fields
    before, bias = fields.flag("do_layer_norm_before", True), fields.flag("enable_bias", True)
    if not fields.flag("layer_norm_elementwise_affine", True):
        raise fields.refuse("layer_norm_elementwise_affine", "which is not supported")
    width, narrow = fields.positive("ffn_dim"), fields.positive("word_embed_proj_dim", c.hidden)
    activation = read_activation(fields, "activation_function", "relu")
    shard = tensors.shard
    root = tensors.under_any(("model.decoder.", "decoder."), "embed_tokens.weight")

    def layer(number: int) -> PreNorm | PostNorm:
        at = root.under(f"layers.{number}.")
        parts = [(f"self_attn.{part}_proj", c.hidden) for part in "qkv"]
        qkv = at.linear(parts, c.hidden, bias=bias, rows=shard.qkv(c))
        output = at.summed("self_attn.out_proj", c.hidden, c.hidden, bias, shard.queries(c))
        attention = SelfAttention(number, shard.of(c).heads, shard.of(c).kv_heads, c.head_dim, qkv, output)
        up = at.linear("fc1", c.hidden, width, bias, rows=[shard.part(width)])
        mlp = MLP(up, at.summed("fc2", width, c.hidden, bias, shard.part(width)), activation)
        norms = [at.layer_norm(name, c.hidden, EPS) for name in ("self_attn_layer_norm", "final_layer_norm")]
        return PreNorm(norms[0], attention, norms[1], mlp) if before else PostNorm(attention, norms[0], mlp, norms[1])

    tokens = root.table("embed_tokens", c.vocabulary, narrow)
    embedding = Embedding(
        tokens,
        positions=root("embed_positions.weight", c.context + OFFSET, c.hidden),
        offset=OFFSET,
        projection=root.linear("project_in", narrow, c.hidden) if narrow != c.hidden else None,
    )
    layers = [layer(number) for number in range(c.layers)]
    head = tensors.head("lm_head", c.vocabulary, narrow, tokens if c.tied_embeddings else None)
    return Decoder(embedding, layers, _last_norm(config, root, before, narrow), head)


def _last_norm(config: ModelConfig, root: Tensors, before: bool, narrow: int) -> Chain:
    """Loads the step between the layers and the output: a norm, a projection, both or nothing."""
    parts: list[Norm | FeedForward] = []
    if before and not config.fields.flag("_remove_final_layer_norm"):
        parts.append(root.layer_norm("final_layer_norm", config.hidden, EPS))
    if narrow != config.hidden:
        parts.append(root.linear("project_out", config.hidden, narrow))
    return Chain(parts)
