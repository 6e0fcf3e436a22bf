"""The parts of an image encoder from a checkpoint's tensors. What a checkpoint has of an encoder beyond what the model
uses (later layers, a pooling head) is left out, by name.
"""

import re

import torch

from model.blocks import MLP, Norm
from model.errors import CheckpointError
from model.inputs.vision.tiles import Normalisation
from model.layers import ACTIVATIONS, Activation, Linear, Product
from model.multimodal import TowerShape
from model.tensors import Tensors
from model.vision.tower import Attention, EncoderLayer, Patches, Tower


def load_tower(
    shape: TowerShape,
    at: Tensors,
    normalisation: Normalisation,
    taps: tuple[int, ...] | None = None,
    across: int | None = None,
) -> Tower:
    """SigLIP's, CLIP's, Idefics3's and SmolVLM's, which differ in what stands before the first layer. taps: None is
    after all layers and the last norm. across: patches in a row of a tile of any size, which then share the positions
    that there are.
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
            Attention(
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
    """Which of trained x trained positions each of across x across patches has: the one at the same fraction of the
    side (Dehghani et al., NaViT, 2023). int64 [across x across]. In float32, whose rounding decides where fractions
    meet: the models were trained with that.
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
    """A convolution whose steps are as wide as what it sees is one product over patches."""
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
