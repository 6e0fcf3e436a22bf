"""A transformer over the patches of an image of any resolution (Wang et al., Qwen2-VL, 2024).

Patches turn by their row and column. Each square of merge x merge patches becomes one feature, and patches stand square
by square: those of a feature follow each other, so that features need no reordering.
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


@dataclass(frozen=True, slots=True, eq=False)
class GridPatches:
    """Normalises an image, cuts it into patches and projects these.

    A pixel p of channel c enters as (p x factor - mean[c]) / std[c].

    Attributes:
        size: Side of a patch in pixels.
        merge: Patches in a row of a feature's square.
        frames: Pictures of a patch, all of which are the image.
        factor: Factor of pixels.
        mean: [3, 1, 1] float32.
        std: [3, 1, 1] float32.
        projection: Product from the pixels of a patch's pictures to the width.
        dtype: Dtype of the tower.
    """

    size: int
    merge: int
    frames: int
    factor: float
    mean: Tensor
    std: Tensor
    projection: Product
    dtype: torch.dtype

    def __call__(self, pixels: Tensor) -> Tensor:
        """Maps [3, height, width] uint8 to [patches, width], square by square."""
        values = (pixels.to(self.mean.device).float() * self.factor - self.mean) / self.std
        side, merge = self.size, self.merge
        rows, columns = (length // side // merge for length in values.shape[1:])
        cut = values.view(3, rows, merge, side, columns, merge, side).permute(1, 4, 2, 5, 0, 3, 6)
        cut = cut.reshape(-1, 3, 1, side * side).expand(-1, -1, self.frames, -1)
        return self.projection(cut.reshape(len(cut), -1).to(self.dtype))


def patch_places(rows: int, columns: int, merge: int) -> Tensor:
    """Returns the row and column of each patch of rows x columns features, [2, patches] int64, square by square."""
    places = torch.stack(
        torch.meshgrid(torch.arange(rows * merge), torch.arange(columns * merge), indexing="ij")
    )  # [2, rows of patches, columns of patches]
    return places.view(2, rows, merge, columns, merge).transpose(2, 3).reshape(2, -1)


@dataclass(frozen=True, slots=True, eq=False)
class LearnedPlaces:
    """A square table of learned positions, from which those of an image are interpolated bilinearly (Qwen3-VL).

    Attributes:
        table: [side x side, width].
        side: Positions in a row of the table.
    """

    table: Tensor
    side: int

    def __call__(self, places: Tensor, size: tuple[int, int]) -> Tensor:
        """Returns the positions of patches, [patches, width] float32.

        Args:
            places: [2, patches] int64. Row and column of each patch.
            size: Rows and columns of patches in the image. Its corners have those of the table.
        """
        (top, row_part), (left, column_part) = (
            self._taps(place, length) for place, length in zip(places, size, strict=True)
        )
        total = torch.zeros(1, device=self.table.device)
        for row, row_weight in ((top, 1 - row_part), ((top + 1).clamp(max=self.side - 1), row_part)):
            for column, weight in ((left, 1 - column_part), ((left + 1).clamp(max=self.side - 1), column_part)):
                chosen = self.table[(row * self.side + column).to(self.table.device)]
                total = total + chosen * (row_weight * weight).to(self.table.device)[:, None]
        return total

    def _taps(self, place: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Returns the position before each place, int64, and the part of the way from it to the next, float32."""
        there = place.float() * (self.side - 1) / max(length - 1, 1)
        before = there.floor()
        return before.long(), there - before


def windows_of(rows: int, columns: int, merge: int, across: int) -> list[Tensor]:
    """Cuts an image into windows of at most across x across features; those at its ends are smaller.

    Returns:
        [windows, patches] int64 for each size of windows: the patches of each.
    """
    features = torch.arange(rows * columns).view(rows, columns)
    by_size: dict[int, list[Tensor]] = {}
    for top in range(0, rows, across):
        for left in range(0, columns, across):
            window = features[top : top + across, left : left + across].flatten()
            by_size.setdefault(len(window), []).append(window)
    inside = torch.arange(merge * merge)
    return [(torch.stack(windows)[..., None] * merge * merge + inside).flatten(1) for windows in by_size.values()]


@dataclass(frozen=True, slots=True, eq=False)
class GridAttention:
    """Bidirectional attention among patches.

    Attributes:
        qkv: One product for queries, keys and values, in this order.
    """

    heads: int
    qkv: Product
    output: Product

    def __call__(self, x: Tensor, angles: CosSin, windows: Sequence[Tensor]) -> Tensor:
        """Maps [patches, width] to the same shape.

        Args:
            x: [patches, width].
            angles: Cosines and sines of the patches, float32.
            windows: [windows, patches of each] int64 for each size of windows. Empty: all patches see each other.
        """
        qkv = self.qkv(x).view(len(x), 3, self.heads, -1)
        queries, keys = (rotate(part.float(), *angles).to(x.dtype) for part in (qkv[:, 0], qkv[:, 1]))
        values = qkv[:, 2]
        if not windows:
            return self.output(_attend(queries[None], keys[None], values[None])[0].flatten(1))
        mixed = torch.empty_like(values)
        for window in windows:
            mixed[window] = _attend(queries[window], keys[window], values[window])
        return self.output(mixed.flatten(1))


def _attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Computes attention of [windows, patches, heads, head_dim]."""
    by_head = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    return F.scaled_dot_product_attention(*by_head).transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class GridLayer:
    """A layer that normalises before attention and before its MLP.

    Attributes:
        windowed: Whether its attention is within windows.
    """

    attention_norm: Norm
    attention: GridAttention
    mlp_norm: Norm
    mlp: FeedForward
    windowed: bool

    def __call__(self, x: Tensor, angles: CosSin, windows: Sequence[Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles, windows if self.windowed else ())
        return x + self.mlp(self.mlp_norm(x))


@dataclass(frozen=True, slots=True, eq=False)
class Merger:
    """Makes a feature of each square of patches.

    Attributes:
        norm: Norm of a patch, or of a whole square.
        whole: Whether `norm` is of a whole square.
    """

    patches: int
    norm: Norm
    first: Product
    second: Product
    activation: Activation
    whole: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Maps [patches, width], square by square, to [features, width of the text model]."""
        joined = len(x) // self.patches, -1
        x = self.norm(x.view(joined)) if self.whole else self.norm(x).view(joined)
        return self.second(activated(self.first(x), self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class GridEncoder:
    """Encoder of images of any resolution. See `model.forward.ImageEncoder`.

    It computes one image at a time, so that an image's features have the same bits whatever else is encoded.

    Attributes:
        frequencies: [pairs / 2] float32. Radians a row or column.
        across: Features in a row of a window, 0 without windows.
        places: Learned positions. None without some.
        merger: Makes the features that enter the text model.
        taps: By layer, what makes the features of a further depth after it.
    """

    patches: GridPatches
    frequencies: Tensor
    layers: Sequence[GridLayer]
    merger: Merger
    across: int
    places: LearnedPlaces | None
    taps: dict[int, Merger]

    def __call__(self, images: Sequence[EncoderInput]) -> list[Tensor]:
        """Encodes images. Returns [depths, features, hidden] for each, in the text model's dtype."""
        return [self._encode(image) for image in images]

    def _encode(self, image: EncoderInput) -> Tensor:
        _, rows, columns = image.grid
        merge, x = self.patches.merge, self.patches(image.pixels[0])
        places = patch_places(rows, columns, merge)
        if self.places is not None:
            x = x + self.places(places, (rows * merge, columns * merge)).to(x.dtype)
        angles = self._angles(places.to(x.device))
        windows = windows_of(rows, columns, merge, self.across) if self.across else []
        depths = []
        for number, layer in enumerate(self.layers):
            x = layer(x, angles, windows)
            if number in self.taps:
                depths.append(self.taps[number](x))
        return torch.stack([self.merger(x), *depths])

    def _angles(self, places: Tensor) -> CosSin:
        """Returns cosines and sines, [patches, 1, pairs]: half of the pairs turn by rows, half by columns."""
        turned = (places[:, :, None] * self.frequencies).transpose(0, 1).flatten(1)
        return turned.cos()[:, None], turned.sin()[:, None]
