"""Llama 4 (Meta, 2025): attention in chunks, layers without rotation that see everything, experts with weighed inputs.

Queries and keys of rotated layers are normalised after the rotation, without weights. Queries of the other layers grow
with their position, as softmax over more keys is flatter (Nakanishi, Scalable-Softmax, 2025).
"""

import logging
from dataclasses import replace

import torch
from torch import Tensor

from model.architectures.experts import ExpertNames, load_experts, load_with_shared, read_used
from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps
from model.blocks import FeedForward, PreNorm, SelfAttention
from model.config import ModelConfig
from model.decoder import Decoder
from model.families import rotated_layers
from model.fields import Fields
from model.layers import RMSNorm
from model.routing import Routing
from model.source import Renamed
from model.tensors import Tensors

log = logging.getLogger("quire.model")

NAMES = ExpertNames(router="router")


def load_llama4(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Llama4ForCausalLM, and the text model of Llama4ForConditionalGeneration."""
    if "language_model.model.embed_tokens.weight" in tensors:
        tensors.ignore(r"(vision_model|multi_modal_projector)\..*")
        tensors = tensors.of(Renamed(tensors.checkpoint, (("", "language_model."),)))
        log.info("The image encoder is not loaded: the text model of Llama 4 alone is served")
    c, fields, eps = config, config.fields, norm_eps(config)
    rope, rotated, sparse = load_rope(c, tensors, 5e5), rotated_layers(fields, c.layers), _sparse_layers(c)
    bias, scales = fields.flag("attention_bias"), _query_scales(fields, c.context)
    scales = None if scales is None else scales.to(tensors.device)
    norm = RMSNorm(torch.ones(c.head_dim, dtype=tensors.dtype, device=tensors.device), eps)
    head_norm = norm if fields.flag("use_qk_norm", True) else None

    def attention(at: Tensors, number: int) -> SelfAttention:
        if not rotated[number]:
            return replace(load_attention(c, at, number, None, bias, bias), query_scales=scales)
        loaded = load_attention(c, at, number, rope, bias, bias, neighbours=True)
        return replace(loaded, query_norm=head_norm, key_norm=head_norm, rotated_first=True)

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, eps),
            attention(at, number),
            at.rms_norm("post_attention_layernorm", c.hidden, eps),
            _mixture(c, at.under("feed_forward.")) if number in sparse else _dense(c, at),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def _dense(config: ModelConfig, at: Tensors) -> FeedForward:
    width = config.fields.positive("intermediate_size_mlp", 16384)
    wide = replace(config, fields=config.fields.having({"intermediate_size": width}))
    return load_mlp(wide, at, prefixes=("feed_forward.",))


def _mixture(config: ModelConfig, at: Tensors) -> FeedForward:
    experts, width = config.fields.positive("num_local_experts", 16), config.fields.positive("intermediate_size", 8192)
    routing = Routing(read_used(config, experts, 1), normalised=False, by_sigmoid=True)
    routed = load_experts(config, at, experts, width, routing, NAMES, transposed=True)
    return at.ranks.summed(load_with_shared(config, at, replace(routed, weighs_inputs=True), "shared_expert", width))


def _sparse_layers(config: ModelConfig) -> frozenset[int]:
    """Returns the layers that have experts. Raises CheckpointError for numbers of other layers."""
    fields, step = config.fields, config.fields.positive("interleave_moe_layer_step", 1)
    named = fields.get("moe_layers", list, list(range(step - 1, config.layers, step)))
    if not all(isinstance(one, int) and 0 <= one < config.layers for one in named):
        raise fields.refuse("moe_layers", f"must be numbers of layers, from 0 to {config.layers - 1}")
    return frozenset(named)


def _query_scales(fields: Fields, context: int) -> Tensor | None:
    """Reads the factors of queries by position, [context] float32. None where queries stay as they are."""
    if not fields.values.get("attn_temperature_tuning", True):  # the published ones have a 4 or a truth value
        return None
    step, factor = fields.positive("floor_scale", 8192), fields.positive_float("attn_scale", 0.1)
    return torch.log1p(torch.floor((torch.arange(context) + 1.0) / step)) * factor + 1.0
