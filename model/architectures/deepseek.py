"""DeepSeek-V2 and V3 and their kin (DeepSeek-AI, 2024): latent attention, experts beside shared ones.

Kimi K2 is DeepSeek-V3. GLM-4 MoE lite (GLM-4.7 Flash) has its parts in other numbers. Mistral 4 (Small 4, 2026) chooses
experts by softmax and scales queries by position.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from model.architectures.experts import load_experts, load_with_shared, read_groups, read_used
from model.architectures.glm4_moe import ignore_predictors, load_deepseek_experts
from model.architectures.llama import load_decoder, load_mlp, norm_eps
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import CheckpointError
from model.fields import Fields
from model.latent import LatentShape, with_mistral_rope
from model.latent_attention import HeadProducts, LatentAttention, LowRankProduct
from model.layers import Product
from model.rope import Rope, read_rope
from model.routing import Routing
from model.tensors import Tensors

NORM_EPS = 1e-6  # of the norms within attention, whatever config.json says
DENSE, SPARSE = "dense", "sparse"


def load_deepseek_v3(config: ModelConfig, tensors: Tensors) -> Decoder:
    """DeepseekV3ForCausalLM."""
    fields = config.fields
    dense = fields.get("first_k_dense_replace", int, 3)
    ignore_predictors(config, tensors)

    def mixture(at: Tensors) -> FeedForward:
        return load_deepseek_experts(config, at, (256, 8), (8, 4), 2048, 2.5)

    kinds = [number >= dense for number in range(config.layers)]
    return _load(config, tensors, kinds, mixture, fields.flag("rope_interleave", True))


def load_glm4_moe_lite(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Glm4MoeLiteForCausalLM."""
    ignore_predictors(config, tensors)

    def mixture(at: Tensors) -> FeedForward:
        return load_deepseek_experts(config, at, (64, 4), (1, 1), 1536, 1.8)

    neighbours = config.fields.flag("rope_interleave", True)
    return _load(config, tensors, read_sparse_layers(config, 1), mixture, neighbours)


def read_sparse_layers(config: ModelConfig, dense: int) -> list[bool]:
    """Returns which layers have experts.

    Args:
        config: Configuration of the model.
        dense: The number of first layers that have none, where config.json does not name each layer's kind.

    Raises:
        CheckpointError: 'mlp_layer_types' does not name a known kind for each layer.
    """
    fields, layers = config.fields, config.layers
    kinds = fields.get("mlp_layer_types", list, [DENSE if layer < dense else SPARSE for layer in range(layers)])
    if len(kinds) != layers or not all(kind in (DENSE, SPARSE) for kind in kinds):
        raise fields.refuse("mlp_layer_types", f"must name {DENSE!r} or {SPARSE!r} for each of {layers} layers")
    return [kind == SPARSE for kind in kinds]


def load_deepseek_v2(config: ModelConfig, tensors: Tensors) -> Decoder:
    """DeepseekV2ForCausalLM. Experts are chosen by softmax, from groups whose best expert is best."""
    fields = config.fields
    dense, method = fields.get("first_k_dense_replace", int, 0), fields.get("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse("topk_method", "must be 'greedy' or 'group_limited_greedy'")
    experts, width = fields.positive("n_routed_experts", 64), fields.positive("moe_intermediate_size", 1407)
    used = read_used(config, experts, 6)
    routing = Routing(
        used,
        normalised=False,
        groups=None if method == "greedy" else read_groups(config, experts, used, 1, (1, 1)),
        factor=fields.positive_float("routed_scaling_factor", 1.0),
    )

    def mixture(at: Tensors) -> FeedForward:
        routed = load_experts(config, at, experts, width, routing)
        shared = fields.positive("n_shared_experts", 2) * width
        return at.ranks.summed(load_with_shared(config, at, routed, "shared_experts", shared))

    return _load(config, tensors, [number >= dense for number in range(config.layers)], mixture, neighbours=True)


def load_mistral4(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Mistral4ForCausalLM."""
    fields = with_mistral_rope(config.fields)
    config = replace(config, fields=fields)
    dense = fields.get("first_k_dense_replace", int, 0)
    experts, width = fields.positive("n_routed_experts", 128), fields.positive("moe_intermediate_size", 2048)
    used = read_used(config, experts, 4)
    routing = Routing(
        used,
        normalised=fields.flag("norm_topk_prob", True),
        groups=read_groups(config, experts, used, 2, (1, 1)),
        factor=fields.positive_float("routed_scaling_factor", 1.0),
    )

    def mixture(at: Tensors) -> FeedForward:
        routed = load_experts(config, at, experts, width, routing)
        shared = fields.positive("n_shared_experts", 1) * width
        return at.ranks.summed(load_with_shared(config, at, routed, "shared_experts", shared))

    kinds = [number >= dense for number in range(config.layers)]
    scales = read_query_scales(fields, config.context)
    scales = None if scales is None else scales.to(tensors.device)
    return _load(config, tensors, kinds, mixture, fields.flag("rope_interleave", True), scales)


def read_query_scales(fields: Fields, context: int) -> Tensor | None:
    """Reads factors of queries that grow each time a position passes the length of the training (Llama 4).

    Returns:
        [context] float32. None where config.json has none.
    """
    rope = fields.rope
    if rope.values.get("llama_4_scaling_beta") is None:
        return None
    beta, trained = rope.positive_float("llama_4_scaling_beta"), rope.positive("original_max_position_embeddings")
    return 1 + beta * torch.log(1 + torch.floor(torch.arange(context) / trained))


def _load(
    config: ModelConfig,
    tensors: Tensors,
    sparse: list[bool],
    mixture: Callable[[Tensors], FeedForward],
    neighbours: bool,
    query_scales: Tensor | None = None,
) -> Decoder:
    """Loads a model.

    Args:
        config: The model.
        tensors: Its tensors.
        sparse: By layer, whether it has experts.
        mixture: Loads the experts of a layer.
        neighbours: See `LatentAttention`.
        query_scales: See `LatentAttention`.
    """
    c = config
    frequencies, scale = read_rope(c.fields, shape_of(c).rotated)
    rope = Rope(frequencies, c.context, tensors.dtype, tensors.device, scale, c.first_position)

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_latent_attention(c, at.under("self_attn."), number, rope, neighbours, query_scales),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            mixture(at.under("mlp.")) if sparse[number] else load_mlp(c, at),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def shape_of(config: ModelConfig) -> LatentShape:
    """Returns the shape of a model's latent attention. Raises CheckpointError where it has none."""
    if config.latent is None:
        raise CheckpointError(f"{config.fields.path}: {config.architecture} has no shape of latent attention")
    return config.latent


def load_latent_attention(
    config: ModelConfig,
    at: Tensors,
    number: int,
    rope: Rope | None,
    neighbours: bool = False,
    query_scales: Tensor | None = None,
) -> LatentAttention:
    """Loads latent attention of a layer, of which each rank has some heads.

    Args:
        config: Configuration of the model.
        at: Tensors of the layer's attention.
        number: Index of the layer.
        rope: See `LatentAttention`, likewise the others.
        neighbours: Whether the elements of a rotated pair are neighbours.
        query_scales: Factors of queries by position.
    """
    shape, heads, bias = shape_of(config), config.heads, config.fields.flag("attention_bias")
    own = heads // at.shard.size
    first = at.shard.rank * own

    def rows(width: int) -> list[slice]:
        return [slice(first * width, (first + own) * width)]

    queries: Product | LowRankProduct
    if shape.query_rank is None:
        queries = at.linear("q_proj", config.hidden, heads * shape.query_dim, rows=rows(shape.query_dim))
    else:
        queries = LowRankProduct(
            at.linear("q_a_proj", config.hidden, shape.query_rank, bias),
            at.rms_norm("q_a_layernorm", shape.query_rank, NORM_EPS),
            at.linear("q_b_proj", shape.query_rank, heads * shape.query_dim, rows=rows(shape.query_dim)),
        )
    to_latent, from_latent = _expanding(config, shape, at, slice(first, first + own))
    return LatentAttention(
        number,
        shape,
        own,
        queries,
        latents=at.linear("kv_a_proj_with_mqa", config.hidden, shape.key_dim, bias),
        latent_norm=at.rms_norm("kv_a_layernorm", shape.rank, NORM_EPS),
        to_latent=to_latent,
        from_latent=from_latent,
        output=at.summed("o_proj", heads * shape.value_dim, config.hidden, bias, rows(shape.value_dim)[0]),
        rope=rope,
        neighbours=neighbours,
        query_scales=query_scales,
    )


def _expanding(config: ModelConfig, shape: LatentShape, at: Tensors, heads: slice) -> tuple[HeadProducts, HeadProducts]:
    """Loads the product that expands latents, as the products of heads with queries and with mixed latents."""
    if config.fields.flag("kv_b_proj_by_head"):  # as llama.cpp saves it
        mine = range(config.heads)[heads]
        keys = [at.dense(f"k_b_proj.{head}", shape.plain, shape.rank) for head in mine]
        values = [at.dense(f"v_b_proj.{head}", shape.rank, shape.value_dim) for head in mine]
        at.ignore(r".*\.[kv]_b_proj\.\d+\.weight")  # those of other ranks' heads
        return _by_head(at, torch.stack(keys)), _by_head(at, torch.stack(values))
    expanded = at.dense("kv_b_proj", shape.rank, config.heads * (shape.plain + shape.value_dim))
    parts = expanded.unflatten(0, (config.heads, -1))[heads].split((shape.plain, shape.value_dim), 1)
    return _by_head(at, parts[0].mT), _by_head(at, parts[1])


def _by_head(at: Tensors, weights: Tensor) -> HeadProducts:
    """Makes the product of each head from [heads, out, in]."""
    return HeadProducts([at.product_of(weight) for weight in torch.unbind(weights)])
