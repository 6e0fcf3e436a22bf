"""Loads the image encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

import torch

from model.blocks import MLP, FeedForward, GatedMLP, Norm
from model.config import ModelConfig
from model.inputs.vision.processed import Normalisation
from model.layers import Linear, Product, gelu
from model.multimodal import TowerShape, Vision
from model.qwen_vl import QWEN2_5_VL, QWEN2_VL, GridShape, read_grid_shape
from model.rope import frequencies
from model.tensors import Tensors
from model.vision.grid_tower import GridAttention, GridEncoder, GridLayer, GridPatches, LearnedPlaces, Merger
from model.vision.towers import activation_of

PREFIXES = ("model.visual.", "visual.")
OLD_MERGER = ("ln_q", "mlp.0", "mlp.2")  # of Qwen2-VL and Qwen2.5-VL
MERGER = ("norm", "linear_fc1", "linear_fc2")


def load_qwen_encoder(
    config: ModelConfig, vision: Vision, tensors: Tensors, normalisation: Normalisation
) -> GridEncoder:
    """Loads the encoder and its mergers.

    Raises:
        CheckpointError: A tensor or a field is missing or wrong.
    """
    architecture, shape = config.architecture, vision.tower
    grid = read_grid_shape(vision.fields, architecture, shape)
    at = tensors.under_any(PREFIXES, "patch_embed.proj.weight")
    old = architecture in (QWEN2_VL, QWEN2_5_VL)

    def layer(number: int) -> GridLayer:
        of = at.under(f"blocks.{number}.")
        return GridLayer(
            _norm(architecture, shape, of, "norm1"),
            GridAttention(
                shape.heads,
                of.linear("attn.qkv", shape.hidden, 3 * shape.hidden, bias=True),
                of.linear("attn.proj", shape.hidden, shape.hidden, bias=True),
            ),
            _norm(architecture, shape, of, "norm2"),
            _mlp(architecture, shape, of),
            windowed=grid.window > 0 and number not in grid.full,
        )

    def merger(name: str, whole: bool = False) -> Merger:
        of, squares = at.under(f"{name}."), grid.merge**2
        norm, first, second = OLD_MERGER if old else MERGER
        inner = shape.hidden * squares
        return Merger(
            squares,
            of.layer_norm(norm, inner, shape.eps) if whole else _norm(architecture, shape, of, norm),
            of.linear(first, inner, inner, bias=True),
            of.linear(second, inner, config.hidden, bias=True),
            gelu,
            whole,
        )

    places = None
    if grid.places:
        places = LearnedPlaces(at("pos_embed.weight", grid.places**2, shape.hidden), grid.places)
    return GridEncoder(
        _patches(shape, grid, at, normalisation, bias=not old),
        frequencies(shape.hidden // shape.heads // 2, grid.theta).to(tensors.device),
        [layer(number) for number in range(shape.layers)],
        merger("merger"),
        grid.window,
        places,
        {tap: merger(f"deepstack_merger_list.{depth}", whole=True) for depth, tap in enumerate(grid.taps)},
    )


def _patches(shape: TowerShape, grid: GridShape, at: Tensors, normalisation: Normalisation, bias: bool) -> GridPatches:
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=at.device).view(3, 1, 1)
        for values in (normalisation.mean, normalisation.std)
    )
    weight = at("patch_embed.proj.weight", shape.hidden, 3, grid.frames, shape.patch, shape.patch).flatten(1)
    projection: Product = Linear(weight, at("patch_embed.proj.bias", shape.hidden) if bias else None)
    return GridPatches(shape.patch, grid.merge, grid.frames, normalisation.factor, mean, std, projection, at.dtype)


def _norm(architecture: str, shape: TowerShape, at: Tensors, name: str) -> Norm:
    if architecture == QWEN2_5_VL:
        return at.rms_norm(name, shape.hidden, shape.eps)
    return at.layer_norm(name, shape.hidden, shape.eps)


def _mlp(architecture: str, shape: TowerShape, at: Tensors) -> FeedForward:
    width, inner, activation = shape.hidden, shape.intermediate, activation_of(shape.activation)
    if architecture == QWEN2_5_VL:
        parts = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        gate_up = at.linear(parts, width, bias=True, gated=True)
        return GatedMLP(gate_up, at.linear("mlp.down_proj", inner, width, bias=True), activation)
    first, second = ("mlp.fc1", "mlp.fc2") if architecture == QWEN2_VL else ("mlp.linear_fc1", "mlp.linear_fc2")
    return MLP(at.linear(first, width, inner, bias=True), at.linear(second, inner, width, bias=True), activation)
