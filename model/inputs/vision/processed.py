"""An image as a model's encoder takes it: pixels, the grid of its features, and the normalisation of pixels."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """One image, resized and cut as its model takes it.

    Attributes:
        pixels: [frames, 3, height, width] uint8. Frames are the tiles of an image, with the whole image as the first or
            the last one where the model has it so, or one image in a resolution of its own.
        grid: Shape of its features, which stand in row-major order: (tiles, features of a tile), or (frames, rows,
            columns) of a model that takes any resolution.
        rows: Rows of tiles, 0 where the image was not split.
        columns: Columns of tiles, likewise.
        positions: [axes, tokens] int32, 0 to tokens - 1. Position of each feature on each rotary axis, counted from the
            first one's. None for a model with one axis.
    """

    pixels: NDArray[np.uint8]
    grid: tuple[int, ...]
    rows: int = 0
    columns: int = 0
    positions: NDArray[np.int32] | None = None

    @property
    def tokens(self) -> int:
        """The number of its placeholders, one for each feature."""
        return math.prod(self.grid)


@dataclass(frozen=True, slots=True)
class Normalisation:
    """Normalisation of pixels: a pixel p of channel c enters the encoder as (p x factor - mean[c]) / std[c]."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


UNIT = Normalisation(1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""Normalisation of pixels to 0 to 1."""
