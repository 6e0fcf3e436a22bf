"""The image encoder of Gemma 4: a transformer over patches of an image of any resolution, pooled to features.

Patches turn by their column and row, and have learned positions of both. The mean of each square of patches becomes one
feature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.blocks import FeedForward, Norm
from model.forward import CosSin, EncoderInput
from model.layers import Activation, Product, activated
from model.rope import rotate
from model.vision.grid_tower import GridPatches, patch_places


@dataclass(frozen=True, slots=True, eq=False)
class Clipped:
    """A product whose inputs and outputs are bounded.

    Attributes:
        bounds: Least and most of the input, then of the output.
    """

    product: Product
    bounds: tuple[Tensor, Tensor, Tensor, Tensor]

    def __call__(self, x: Tensor, _: object = None) -> Tensor:
        """Multiplies x [rows, in]."""
        least_in, most_in, least_out, most_out = self.bounds
        return self.product(x.clamp(least_in, most_in)).clamp(least_out, most_out)


@dataclass(frozen=True, slots=True, eq=False)
class PooledAttention:
    """Bidirectional attention among patches, whose queries, keys and values are normalised. Scores have no factor."""

    heads: int
    queries: Product
    keys: Product
    values: Product
    output: Product
    query_norm: Norm
    key_norm: Norm
    value_norm: Norm

    def __call__(self, x: Tensor, angles: CosSin) -> Tensor:
        """Maps [patches, width] to the same shape.

        Args:
            x: [patches, width].
            angles: Cosines and sines of the patches, [patches, 1, 2, pairs] float32: of columns, then of rows.
        """
        queries, keys, values = (
            norm(product(x).view(len(x), self.heads, -1))
            for product, norm in (
                (self.queries, self.query_norm), (self.keys, self.key_norm), (self.values, self.value_norm),
            )
        )  # fmt: skip
        queries, keys = (
            rotate(part.float().unflatten(2, (2, -1)), *angles).flatten(2).to(x.dtype) for part in (queries, keys)
        )
        queries, keys, values = (part.transpose(0, 1)[None] for part in (queries, keys, values))
        mixed = F.scaled_dot_product_attention(queries, keys, values, scale=1.0)[0].transpose(0, 1)
        return self.output(mixed.flatten(1))


@dataclass(frozen=True, slots=True, eq=False)
class ClippedMLP:
    """A gated MLP whose products stand apart, since each has bounds of its own."""

    gate: Product
    up: Product
    down: Product
    activation: Activation

    def __call__(self, x: Tensor, _: object = None) -> Tensor:
        return self.down(activated(self.gate(x), self.activation) * self.up(x))


@dataclass(frozen=True, slots=True, eq=False)
class PooledLayer:
    """A layer that normalises before and after attention and its MLP."""

    before_attention: Norm
    attention: PooledAttention
    after_attention: Norm
    before_mlp: Norm
    mlp: FeedForward
    after_mlp: Norm

    def __call__(self, x: Tensor, angles: CosSin) -> Tensor:
        x = x + self.after_attention(self.attention(self.before_attention(x), angles))
        return x + self.after_mlp(self.mlp(self.before_mlp(x)))


@dataclass(frozen=True, slots=True, eq=False)
class PooledEncoder:
    """Encoder of images of any resolution. See `model.forward.ImageEncoder`.

    It computes one image at a time, so that an image's features have the same bits whatever else is encoded.

    Attributes:
        places: [2, positions, width]. Learned positions of columns, then of rows.
        frequencies: [pairs] float32. Radians a row or column.
        standard: Bias and scale of features, [width] float32 each. None without.
        projection_norm: Norm of features before their projection.
        projection: Product to the width of the text model.
    """

    patches: GridPatches
    places: Tensor
    frequencies: Tensor
    layers: Sequence[PooledLayer]
    standard: tuple[Tensor, Tensor] | None
    projection_norm: Norm
    projection: Product

    def __call__(self, images: Sequence[EncoderInput]) -> list[Tensor]:
        """Encodes images. Returns [1, features, hidden] for each, in the text model's dtype."""
        return [self._encode(image)[None] for image in images]

    def _encode(self, image: EncoderInput) -> Tensor:
        _, rows, columns = image.grid
        x, side = self.patches(image.pixels[0]), self.patches.merge
        row, column = patch_places(rows, columns, side).to(x.device)
        x = x + (self.places[0, column] + self.places[1, row])
        turned = torch.stack((column, row), 1)[:, None, :, None] * self.frequencies
        for layer in self.layers:
            x = layer(x, (turned.cos(), turned.sin()))
        pooled = x.float().view(rows * columns, side * side, -1).mean(1).to(x.dtype)
        pooled = pooled.float() * x.shape[1] ** 0.5
        if self.standard is not None:
            bias, scale = self.standard
            pooled = (pooled - bias) * scale
        return self.projection(self.projection_norm(pooled.to(x.dtype)))
