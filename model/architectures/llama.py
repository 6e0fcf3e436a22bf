"""Llama and its kin: RMSNorm before, rotary positions, grouped-query attention, SwiGLU (Touvron et al., 2023).

Mistral and Ministral are Llama with windows (Jiang et al., 2023). Qwen 2 has biases on queries, keys and values (Yang
et al., 2024), Qwen 3 norms on queries and keys. Phi-3 has its products joined in the checkpoint (Abdin et al., 2024).
SmolLM3 has layers without rotary positions (Yang et al., RoPE to NoPE and Back Again, 2025).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from model.blocks import GatedMLP, Norm, PreNorm, SelfAttention, Together
from model.config import ModelConfig
from model.decoder import Decoder, Embedding
from model.families import family_of, rotated_layers
from model.fields import Fields
from model.forward import Layer
from model.layers import Activation, read_activation
from model.parallel.norms import TogetherOnRanks
from model.rope import Rope, read_rope
from model.tensors import Tensors, in_halves

HeadNorm = Callable[[Tensors, str], Norm]


@dataclass(frozen=True, slots=True)
class AttentionNames:
    """Names of the tensors of attention."""

    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    together: str = "self_attn.qkv_proj"
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"


ATTENTION_NAMES = AttentionNames()


def load_llama(config: ModelConfig, tensors: Tensors) -> Decoder:
    """LlamaForCausalLM, MistralForCausalLM, MinistralForCausalLM."""
    bias = config.fields.flag("attention_bias")
    return _load(config, tensors, qkv_bias=bias, output_bias=bias)


def load_qwen2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen2ForCausalLM."""
    return _load(config, tensors, qkv_bias=True)


def load_qwen3(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen3ForCausalLM."""
    bias = config.fields.flag("attention_bias")
    return _load(config, tensors, qkv_bias=bias, output_bias=bias, head_norm=rms_norm_of_heads(config))


def load_smollm3(config: ModelConfig, tensors: Tensors) -> Decoder:
    """SmolLM3ForCausalLM. Some layers have no rotary positions."""
    bias, rope = config.fields.flag("attention_bias"), load_rope(config, tensors, 2e6)
    ropes = [rope if rotated else None for rotated in rotated_layers(config.fields, config.layers)]
    return _load(config, tensors, qkv_bias=bias, output_bias=bias, ropes=ropes)


def load_seed_oss(config: ModelConfig, tensors: Tensors) -> Decoder:
    """SeedOssForCausalLM."""
    fields = config.fields
    return _load(config, tensors, fields.flag("attention_bias", True), fields.flag("attention_out_bias"))


def load_ernie4_5(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Ernie4_5ForCausalLM. One flag is for all biases; the elements of a rotated pair are neighbours."""
    bias, rope = config.fields.flag("use_bias"), load_rope(config, tensors, 5e5)
    said = replace(config, fields=config.fields.having({"mlp_bias": bias}))
    return _load(said, tensors, bias, bias, ropes=[rope] * config.layers, neighbours=True)


def load_phi3(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Phi3ForCausalLM."""
    return _load(config, tensors, fused=True)


def _load(
    config: ModelConfig,
    tensors: Tensors,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_norm: HeadNorm | None = None,
    fused: bool = False,
    ropes: Sequence[Rope | None] | None = None,
    neighbours: bool = False,
) -> Decoder:
    c, eps = config, norm_eps(config)
    ropes = [load_rope(config, tensors)] * c.layers if ropes is None else ropes

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, eps),
            load_attention(c, at, number, ropes[number], qkv_bias, output_bias, head_norm, fused, neighbours),
            at.rms_norm("post_attention_layernorm", c.hidden, eps),
            load_mlp(c, at, fused),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def load_decoder(
    config: ModelConfig,
    tensors: Tensors,
    layers: Sequence[Layer],
    norm_offset: float = 0.0,
    embedding: str = "model.embed_tokens",
    norm: str = "model.norm",
) -> Decoder:
    """Loads a decoder around its layers: embedding, last norm and output layer.

    Args:
        config: The model.
        tensors: Its tensors.
        layers: Its layers.
        norm_offset: What is added to the weights of the last norm.
        embedding: Name of the embedding.
        norm: Name of the last norm.
    """
    c = config
    tensors.ignore(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")  # a buffer that old checkpoints saved
    table = tensors.table(embedding, c.vocabulary, c.hidden)
    head = tensors.head("lm_head", c.vocabulary, c.hidden, table if c.tied_embeddings else None)
    last = tensors.rms_norm(norm, c.hidden, norm_eps(c), norm_offset)
    return Decoder(Embedding(table), layers, last, head)


def norm_eps(config: ModelConfig) -> float:
    return config.fields.positive_float("rms_norm_eps", family_of(config.architecture).norm_eps)


def rms_norm_of_heads(config: ModelConfig) -> HeadNorm:
    return lambda at, name: at.rms_norm(name, config.head_dim, norm_eps(config))


def rms_norm_of_all_heads(config: ModelConfig, tensors: Tensors) -> HeadNorm:
    """Returns what makes norms over all heads of a token as one vector."""
    shard, collective = tensors.shard, tensors.ranks.collective

    def norm(at: Tensors, name: str) -> Norm:
        queries = name.endswith("q_norm")
        heads = config.heads if queries else config.kv_heads
        made = at.rms_norm(name, heads * config.head_dim, norm_eps(config))
        if collective is None:
            return Together(made)
        mine = shard.queries(config) if queries else shard.keys(config)
        return TogetherOnRanks.of(made, mine, collective)

    return norm


def load_rope(
    config: ModelConfig,
    tensors: Tensors,
    theta: float = 10000.0,
    partial: float = 1.0,
    fields: Fields | None = None,
) -> Rope:
    """Loads the rotary embedding.

    Args:
        config: The model.
        tensors: Its tensors, whose dtype and device the table has.
        theta: As of `read_rope`.
        partial: As of `read_rope`.
        fields: What describes the embedding. None for config.json.
    """
    frequencies, scale = read_rope(fields or config.fields, config.head_dim, theta, partial)
    rope = Rope(frequencies, config.context, tensors.dtype, tensors.device, scale, config.first_position)
    axes = () if config.vision is None else config.vision.pair_axes
    return rope.with_axes(axes) if axes else rope


def load_attention(
    config: ModelConfig,
    at: Tensors,
    number: int,
    rope: Rope | None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    head_norm: HeadNorm | None = None,
    fused: bool = False,
    neighbours: bool = False,
    names: AttentionNames = ATTENTION_NAMES,
) -> SelfAttention:
    """Loads the attention of a layer.

    Args:
        config: The model.
        at: Tensors of the layer.
        number: Index of the layer.
        rope: Rotary embedding. None without one.
        qkv_bias: Whether queries, keys and values have biases.
        output_bias: Whether the output has a bias.
        head_norm: Makes the norm of a name, for queries and for keys. None without norms.
        fused: Whether queries, keys and values are one tensor in the checkpoint.
        neighbours: Whether the elements of a rotated pair are neighbours in the checkpoint.
        names: Names of its tensors.
    """
    c, queries, keys = config, config.heads * config.head_dim, config.kv_heads * config.head_dim
    mine = at.shard.of(c)
    rows = at.shard.qkv(c)
    if neighbours and rope is not None:
        rows = [*(one for run in rows[:2] for one in in_halves(run, c.head_dim, rope.rotated)), rows[2]]
    apart = [(names.query, queries), (names.key, keys), (names.value, keys)]
    together = [(names.together, queries + 2 * keys)]
    return SelfAttention(
        number,
        mine.heads,
        mine.kv_heads,
        c.head_dim,
        qkv=at.linear(together if fused else apart, c.hidden, bias=qkv_bias, rows=rows),
        output=at.summed(names.output, queries, c.hidden, output_bias, at.shard.queries(c)),
        rope=rope,
        query_norm=head_norm(at, names.query_norm) if head_norm else None,
        key_norm=head_norm(at, names.key_norm) if head_norm else None,
    )


def load_mlp(
    config: ModelConfig,
    of_layer: Tensors,
    fused: bool = False,
    activation: Activation | None = None,
    prefixes: Sequence[str] = ("mlp.",),
) -> GatedMLP:
    """Loads the MLP of a layer.

    Args:
        config: Configuration of the model.
        of_layer: Tensors of the layer.
        fused: Whether gates and inputs are one tensor.
        activation: Replaces the one that 'hidden_act' names.
        prefixes: Prefixes that its tensors may have.
    """
    fields, width = config.fields, config.fields.positive("intermediate_size")
    bias, at = fields.flag("mlp_bias"), of_layer.under_any(prefixes, "down_proj.weight")
    apart, together = [("gate_proj", width), ("up_proj", width)], [("gate_up_proj", 2 * width)]
    return GatedMLP(
        at.linear(together if fused else apart, config.hidden, bias=bias, gated=True, rows=at.shard.gated(width)),
        at.summed("down_proj", width, config.hidden, bias, at.shard.part(width)),
        activation or read_activation(fields, "hidden_act", "silu"),
    )
