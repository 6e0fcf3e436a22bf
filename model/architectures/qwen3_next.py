"""Qwen 3 Next and Qwen 3.5: three of four layers are recurrent, the fourth has gated attention (Qwen Team, 2025).

Norms stand for 1 + w, but for that of a recurrent layer's output. A part of a head is rotated.
"""

from collections.abc import Callable

from model.architectures.experts import load_experts, load_with_shared, read_used
from model.architectures.glm4_moe import ignore_predictors
from model.architectures.llama import load_decoder, load_mlp, load_rope, norm_eps
from model.architectures.mixers import decay_rates, rows_of
from model.blocks import FeedForward, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder
from model.delta_net import GatedDeltaNet
from model.fields import MOST
from model.layers import Product, RMSNorm
from model.parallel.shard import moved
from model.recurrent import DeltaShape
from model.rope import Rope
from model.routing import Routing
from model.tensors import Tensors

ROTATED = 0.25  # part of a head, where config.json says nothing


Products = Callable[[ModelConfig, Tensors, DeltaShape], tuple[Product, Product]]


def load_qwen3_5(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen3_5ForCausalLM."""
    return _load(config, tensors, lambda at, _: load_mlp(config, at), _apart)


def load_qwen3_5_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen3_5MoeForCausalLM."""
    return _load(config, tensors, lambda at, _: _experts(config, at, 256, 8, normalised=True), _apart)


def load_qwen3_next(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen3NextForCausalLM. Some of its layers may have an MLP instead of experts."""
    fields = config.fields
    every, without = fields.positive("decoder_sparse_step", 1), set(fields.numbers("mlp_only_layers", 0, MOST, []))
    normalised = fields.flag("norm_topk_prob", True)

    def mlp(at: Tensors, number: int) -> FeedForward:
        dense = number in without or (number + 1) % every != 0
        return load_mlp(config, at) if dense else _experts(config, at, 512, 10, normalised)

    return _load(config, tensors, mlp, _by_head)


def _experts(config: ModelConfig, at: Tensors, experts: int, used: int, normalised: bool) -> FeedForward:
    """Loads experts; `experts` and `used` hold where config.json says nothing."""
    fields = config.fields
    count = fields.positive("num_experts" if "num_experts" in fields else "num_local_experts", experts)
    width, shared = (fields.positive(f"{kind}_intermediate_size", 512) for kind in ("moe", "shared_expert"))
    mlp, routing = at.under("mlp."), Routing(read_used(config, count, used), normalised)
    routed = load_experts(config, mlp, count, width, routing)
    return at.ranks.summed(load_with_shared(config, mlp, routed, "shared_expert", shared, "shared_expert_gate"))


def _load(
    config: ModelConfig, tensors: Tensors, mlp: Callable[[Tensors, int], FeedForward], products: Products
) -> Decoder:
    """Loads a model.

    Args:
        config: The model.
        tensors: Its tensors.
        mlp: Loads the second half of a layer.
        products: Loads the first products of a recurrent layer.
    """
    c, rope = config, load_rope(config, tensors, partial=ROTATED)

    def layer(number: int) -> PreNorm:
        at, recurrence = tensors.under(f"model.layers.{number}."), c.recurrent[number]
        return PreNorm(
            _norm(c, at, "input_layernorm", c.hidden),
            _delta_net(c, at.under("linear_attn."), number, recurrence, products)
            if isinstance(recurrence, DeltaShape)
            else _attention(c, at, number, rope),
            _norm(c, at, "post_attention_layernorm", c.hidden),
            mlp(at, number),
        )

    ignore_predictors(c, tensors, default=0)
    decoder = load_decoder(c, tensors, [layer(number) for number in range(c.layers)], norm_offset=1.0)
    tensors.ignore(r"mtp\..*")  # layers that draft tokens, which transformers leaves out too
    return decoder


def _norm(config: ModelConfig, at: Tensors, name: str, width: int) -> RMSNorm:
    return at.rms_norm(name, width, norm_eps(config), offset=1.0)


def _attention(config: ModelConfig, at: Tensors, number: int, rope: Rope) -> SelfAttention:
    """Loads gated attention. A head's queries stand before its gates in one product of the checkpoint."""
    c, dim, bias = config, config.head_dim, config.fields.flag("attention_bias")
    queries, keys, mine, of_keys = c.heads * dim, c.kv_heads * dim, at.shard.of(c), at.shard.keys(c)
    first = at.shard.rank * mine.heads
    pairs = range(first, first + mine.heads)
    rows = [slice(2 * head * dim, (2 * head + 1) * dim) for head in pairs]
    rows += [moved(of_keys, 2 * queries), moved(of_keys, 2 * queries + keys)]
    parts = [("self_attn.q_proj", 2 * queries), ("self_attn.k_proj", keys), ("self_attn.v_proj", keys)]
    return SelfAttention(
        number,
        mine.heads,
        mine.kv_heads,
        dim,
        qkv=at.linear(parts, c.hidden, bias=bias, rows=rows),
        output=at.summed("self_attn.o_proj", queries, c.hidden, bias, at.shard.queries(c)),
        rope=rope,
        query_norm=_norm(c, at, "self_attn.q_norm", dim),
        key_norm=_norm(c, at, "self_attn.k_norm", dim),
        gates=at.linear(
            "self_attn.q_proj", c.hidden, 2 * queries, bias,
            rows=[slice((2 * head + 1) * dim, (2 * head + 2) * dim) for head in pairs],
        ),
    )  # fmt: skip


def _apart(config: ModelConfig, of: Tensors, shape: DeltaShape) -> tuple[Product, Product]:
    """Loads products of Qwen 3.5, in the order of `GatedDeltaNet`."""
    gates = [("in_proj_b", shape.heads), ("in_proj_a", shape.heads)]
    return _sorted_by_kind(config, of, shape), of.linear(
        gates, config.hidden, rows=of.shard.even(shape.heads, shape.heads)
    )


def _sorted_by_kind(config: ModelConfig, of: Tensors, shape: DeltaShape) -> Product:
    rows = of.shard.even(shape.keys, shape.keys, shape.values, shape.values)
    return of.linear([("in_proj_qkv", shape.channels), ("in_proj_z", shape.values)], config.hidden, rows=rows)


def _by_head(config: ModelConfig, of: Tensors, shape: DeltaShape) -> tuple[Product, Product]:
    """Loads products of Qwen 3 Next, whose outputs stand by key head: its query, key, values and output gates."""
    values = shape.values // shape.key_heads
    sizes = (shape.key_dim, shape.key_dim, values, values)
    (mine,) = of.shard.even(shape.key_heads)
    heads, gates = range(mine.start, mine.stop), (shape.heads // shape.key_heads,) * 2
    if config.fields.flag("in_proj_apart"):  # as llama.cpp saves them
        qkvz = _sorted_by_kind(config, of, shape)
    else:
        qkvz = of.linear("in_proj_qkvz", config.hidden, shape.channels + shape.values, rows=_sorted(sizes, heads))
    return qkvz, of.linear("in_proj_ba", config.hidden, 2 * shape.heads, rows=_sorted(gates, heads))


def _sorted(sizes: tuple[int, ...], heads: range) -> list[slice]:
    """Returns rows of heads that stand head by head, in an order by kind; `sizes` are those of a head's kinds."""
    rows, width, first = [], sum(sizes), 0
    for size in sizes:
        rows += [slice(head * width + first, head * width + first + size) for head in heads]
        first += size
    return rows


def _delta_net(config: ModelConfig, of: Tensors, number: int, shape: DeltaShape, products: Products) -> GatedDeltaNet:
    c, s, shard = config, shape, of.shard
    heads, values = shard.even(s.heads), shard.even(s.values)
    return GatedDeltaNet(
        number,
        shard.of_recurrence(s),
        *products(c, of, s),
        rows_of(of.floats("conv1d.weight", s.channels, 1, s.taps)[:, 0], shard.even(s.keys, s.keys, s.values)),
        rows_of(decay_rates(of, s.heads), heads),
        rows_of(of.floats("dt_bias", s.heads), heads),
        of.floats("norm.weight", s.value_dim),
        norm_eps(c),
        of.summed("out_proj", s.values, c.hidden, False, values[0]),
    )
