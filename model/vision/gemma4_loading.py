"""Loads the image encoder of Gemma 4."""

import re

import torch

from model.config import ModelConfig
from model.gemma4_vision import PooledShape, read_pooled_shape
from model.inputs.vision.processed import Normalisation
from model.layers import Linear, Product, RMSNorm
from model.multimodal import TowerShape, Vision
from model.rope import frequencies
from model.tensors import Tensors
from model.vision.gemma4 import Clipped, ClippedMLP, PooledAttention, PooledEncoder, PooledLayer
from model.vision.grid_tower import GridPatches
from model.vision.towers import activation_of

BOUNDS = ("input_min", "input_max", "output_min", "output_max")
UNUSED = r"(?:model\.)?(?:audio_tower|embed_audio)\..*"
OF_IMAGES = r"(?:model\.)?(?:vision_tower|embed_vision)\..*"


def load_gemma4_encoder(
    config: ModelConfig, vision: Vision, tensors: Tensors, normalisation: Normalisation
) -> PooledEncoder | None:
    """Loads the encoder and its projection. Those of sound are passed over. None where images are not served.

    Raises:
        CheckpointError: A tensor or a field is missing or wrong.
    """
    tensors.ignore(UNUSED)
    if vision.unserved:
        tensors.ignore(OF_IMAGES)
        return None
    shape, own = vision.tower, read_pooled_shape(vision.fields)
    at = tensors.under_any(("model.vision_tower.", "vision_tower."), "patch_embedder.input_proj.weight")
    projector = tensors.under_any(("model.embed_vision.", "embed_vision."), "embedding_projection.weight")
    standard = None
    if own.standardized:
        standard = at.floats("std_bias", shape.hidden), at.floats("std_scale", shape.hidden)
    return PooledEncoder(
        _patches(shape, own, at, normalisation),
        at("patch_embedder.position_embedding_table", 2, own.places, shape.hidden),
        frequencies(own.head_dim // 2, own.theta).to(at.device),
        [_layer(shape, own, at.under(f"encoder.layers.{number}.")) for number in range(shape.layers)],
        standard,
        _plain_norm(shape, at, shape.hidden),
        projector.linear("embedding_projection", shape.hidden, config.hidden),
    )


def _plain_norm(shape: TowerShape, at: Tensors, width: int) -> RMSNorm:
    return RMSNorm(torch.ones(width, dtype=at.dtype, device=at.device), shape.eps)


def _patches(shape: TowerShape, own: PooledShape, at: Tensors, normalisation: Normalisation) -> GridPatches:
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=at.device).view(3, 1, 1)
        for values in (normalisation.mean, normalisation.std)
    )
    # A patch of the checkpoint has its colours together; here a colour has its pixels together.
    weight = at("patch_embedder.input_proj.weight", shape.hidden, 3 * shape.patch**2)
    by_colour = weight.view(-1, shape.patch, shape.patch, 3).permute(0, 3, 1, 2).flatten(1)
    return GridPatches(shape.patch, own.side, 1, normalisation.factor, mean, std, Linear(by_colour), at.dtype)


def _layer(shape: TowerShape, own: PooledShape, at: Tensors) -> PooledLayer:
    width = shape.heads * own.head_dim

    def product(name: str, inputs: int, outputs: int) -> Product:
        made = at.linear(f"{name}.linear", inputs, outputs)
        if not own.clipped:
            at.ignore(re.escape(f"{at.prefix}{name}.") + "(?:input|output)_(?:min|max)")
            return made
        least_in, most_in, least_out, most_out = (at(f"{name}.{bound}") for bound in BOUNDS)
        return Clipped(made, (least_in, most_in, least_out, most_out))

    def norm(name: str, size: int = shape.hidden) -> RMSNorm:
        return at.rms_norm(name, size, shape.eps)

    queries, keys, values = (product(f"self_attn.{name}_proj", shape.hidden, width) for name in "qkv")
    return PooledLayer(
        norm("input_layernorm"),
        PooledAttention(
            shape.heads,
            queries,
            keys,
            values,
            product("self_attn.o_proj", width, shape.hidden),
            norm("self_attn.q_norm", own.head_dim),
            norm("self_attn.k_norm", own.head_dim),
            _plain_norm(shape, at, own.head_dim),
        ),
        norm("post_attention_layernorm"),
        norm("pre_feedforward_layernorm"),
        ClippedMLP(
            product("mlp.gate_proj", shape.hidden, shape.intermediate),
            product("mlp.up_proj", shape.hidden, shape.intermediate),
            product("mlp.down_proj", shape.intermediate, shape.hidden),
            activation_of(shape.activation),
        ),
        norm("post_feedforward_layernorm"),
    )
