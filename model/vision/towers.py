"""Loads the parts of an image encoder from a checkpoint's tensors.

Tensors of parts that the model does not use (later layers, a pooling head) are ignored, by name.
"""

import re

import torch

from model.blocks import MLP, Norm
from model.errors import CheckpointError
from model.inputs.vision.processed import Normalisation
from model.layers import ACTIVATIONS, Activation, Linear, Product
from model.multimodal import TowerShape
from model.tensors import Tensors
from model.vision.tower import EncoderLayer, Patches, Tower, TowerAttention


def load_tower(
    shape: TowerShape,
    at: Tensors,
    normalisation: Normalisation,
    taps: tuple[int, ...] | None = None,
    across: int | None = None,
) -> Tower:
    """Loads the tower of SigLIP, CLIP, Idefics3 and SmolVLM. They differ before the first layer.

    Args:
        shape: Shape of the tower.
        at: The tower's tensors.
        normalisation: Normalisation of pixels.
        taps: Numbers of layers after which the output is read. None: after all layers and the last norm.
        across: Patches in a row of a tile of another size than the tower's own, which then share its positions.
    """
    clip, first_unused = shape.kind == "clip_vision_model", shape.layers if taps is None else max(taps)
    at.ignore(re.escape(at.prefix) + r"(embeddings\.position_ids|head\..*)")
    for number in range(first_unused, shape.layers):
        at.ignore(re.escape(f"{at.prefix}encoder.layers.{number}.") + ".*")
    if taps is not None:
        at.ignore(re.escape(at.prefix) + r"post_layernorm\..*")
    activation = activation_of(shape.activation)

    def layer(number: int) -> EncoderLayer:
        of = at.under(f"encoder.layers.{number}.")
        parts = [(f"self_attn.{name}_proj", shape.hidden) for name in "qkv"]
        return EncoderLayer(
            norm(shape, of, "layer_norm1"),
            TowerAttention(
                shape.heads,
                of.linear(parts, shape.hidden, bias=True),
                of.linear("self_attn.out_proj", shape.hidden, shape.hidden, bias=True),
            ),
            norm(shape, of, "layer_norm2"),
            load_mlp(shape, of, activation),
        )

    return Tower(
        load_patches(shape, at, normalisation, clip, across),
        [layer(number) for number in range(first_unused)],
        taps or (shape.layers,),
        before=norm(shape, at, "pre_layrnorm") if clip else None,  # the name is CLIP's own
        after=norm(shape, at, "post_layernorm") if taps is None else None,
    )


def load_patches(
    shape: TowerShape, at: Tensors, normalisation: Normalisation, clip: bool, across: int | None
) -> Patches:
    count = shape.patches + (1 if clip else 0)
    positions = at("embeddings.position_embedding.weight", count, shape.hidden)
    if across is not None:
        positions = positions[spread_positions(shape.image // shape.patch, across).to(positions.device)]
    return make_patches(
        shape,
        normalisation,
        patch_projection(shape, at, "embeddings.patch_embedding", bias=not clip),
        positions,
        at("embeddings.class_embedding", shape.hidden) if clip else None,
    )


def spread_positions(trained: int, across: int) -> torch.Tensor:
    """Spreads trained positions over a tile with more or fewer patches.

    Each patch gets the position at the same fraction of the side (Dehghani et al., NaViT, 2023). Fractions are float32,
    whose rounding decides where they meet: the models were trained with that.

    Args:
        trained: Positions in a row.
        across: Patches in a row.

    Returns:
        [across x across] int64. Index of each patch's position.
    """
    boundaries = torch.arange(1 / trained, 1.0, 1 / trained)
    fractions = torch.arange(across, dtype=torch.float32) * (1.0 / torch.tensor(across))
    places = torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)
    return (places[:, None] * trained + places).flatten()


def make_patches(
    shape: TowerShape,
    normalisation: Normalisation,
    projection: Product,
    positions: torch.Tensor,
    first: torch.Tensor | None = None,
) -> Patches:
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=positions.device).view(3, 1, 1)
        for values in (normalisation.mean, normalisation.std)
    )
    return Patches(shape.patch, normalisation.factor, mean, std, projection, positions, first)


def patch_projection(shape: TowerShape, at: Tensors, name: str, bias: bool) -> Product:
    """Loads the projection of patches: a convolution whose stride is its kernel's size, as one product."""
    weight = at(f"{name}.weight", shape.hidden, 3, shape.patch, shape.patch).flatten(1)
    return Linear(weight, at(f"{name}.bias", shape.hidden) if bias else None)


def norm(shape: TowerShape, at: Tensors, name: str) -> Norm:
    return at.layer_norm(name, shape.hidden, shape.eps)


def load_mlp(shape: TowerShape, at: Tensors, activation: Activation) -> MLP:
    return MLP(
        at.linear("mlp.fc1", shape.hidden, shape.intermediate, bias=True),
        at.linear("mlp.fc2", shape.intermediate, shape.hidden, bias=True),
        activation,
    )


def activation_of(name: str) -> Activation:
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(f"activation {name!r} of the vision encoder is not supported; supported: {known}")
    return ACTIVATIONS[name]
