"""What a model's encoder is given of one image."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """One image, cut as its model wants it, in the order of its placeholders.

    pixels: uint8 [tiles, 3, height, width]. rows, columns: how the tiles lie, 0 and 0 where the image was not split;
    where the whole image is there beside them, it is the last or the first of the tiles, as the model has it. tokens:
    how many placeholders it takes.
    """

    pixels: NDArray[np.uint8]
    rows: int
    columns: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Normalisation:
    """A pixel p of channel c enters the encoder as (p x factor - mean[c]) / std[c]."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


UNIT = Normalisation(1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
"""0 to 1."""
