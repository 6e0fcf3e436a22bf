"""A transformer over the patches of an image (Dosovitskiy et al., 2020).

CLIP (Radford et al., 2021), SigLIP (Zhai et al., 2023) and the models made of them have it. The tiles of one image go
through it together, and nothing else: its output for an image does not depend on others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.blocks import MLP, Norm
from model.layers import Product


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Normalises tiles, cuts them into patches and projects these.

    A pixel p of channel c enters as (p x factor - mean[c]) / std[c].

    Attributes:
        size: Side of a patch in pixels.
        factor: Factor of pixels.
        mean: [3, 1, 1] float32.
        std: [3, 1, 1] float32.
        projection: Product from a patch's pixels to the width.
        positions: [patches of a tile, width]. One more in front where a `first` exists.
        first: [width]. A vector in front of the patches (CLIP's class embedding). None without one.
    """

    size: int
    factor: float
    mean: Tensor
    std: Tensor
    projection: Product
    positions: Tensor
    first: Tensor | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Maps [tiles, 3, height, width] uint8 to [tiles, patches, width], row by row."""
        values = (pixels.to(self.mean.device).float() * self.factor - self.mean) / self.std
        tiles, side = len(pixels), self.size
        cut = values.unfold(2, side, side).unfold(3, side, side)  # [tiles, 3, rows, columns, side, side]
        cut = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * side * side)
        x = self.projection(cut.to(self.positions.dtype)).view(tiles, -1, self.positions.shape[1])
        if self.first is not None:
            x = F.pad(x, (0, 0, 1, 0))
            x[:, 0] = self.first
        return x + self.positions


@dataclass(frozen=True, slots=True, eq=False)
class TowerAttention:
    """Bidirectional attention among all patches of a tile.

    Attributes:
        qkv: One product for queries, keys and values, in this order.
    """

    heads: int
    qkv: Product
    output: Product

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [tiles, patches, width] to the same shape."""
        tiles, patches, width = x.shape
        qkv = self.qkv(x.flatten(0, 1)).view(tiles, patches, 3, self.heads, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        return self.output(mixed.transpose(1, 2).reshape(-1, width)).view(tiles, patches, width)


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    """A layer that normalises before attention and before its MLP."""

    attention_norm: Norm
    attention: TowerAttention
    mlp_norm: Norm
    mlp: MLP

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [tiles, patches, width] to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x).flatten(0, 1)).view(x.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Tower:
    """The encoder: patches, layers and norms.

    Attributes:
        taps: Numbers of layers after which the output is read, in this order. Several stand side by side.
        before: Norm before the layers. None without one.
        after: Norm of each output. None without one.
    """

    patches: Patches
    layers: Sequence[EncoderLayer]
    taps: Sequence[int]
    before: Norm | None = None
    after: Norm | None = None

    def __call__(self, pixels: Tensor) -> Tensor:
        """Maps [tiles, 3, height, width] uint8 to [tiles, patches, width x taps]."""
        x = self.patches(pixels)
        x = x if self.before is None else self.before(x)
        states = {0: x}  # outputs by number of layers, of the taps alone
        for number, layer in enumerate(self.layers, 1):
            x = layer(x)
            if number in self.taps:
                states[number] = x
        read = [states[tap] if self.after is None else self.after(states[tap]) for tap in self.taps]
        return read[0] if len(read) == 1 else torch.cat(read, -1)
