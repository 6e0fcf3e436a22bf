"""Maps the pixels of an image to the features that stand for it in the text model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from model.forward import EncoderInput
from model.layers import Activation, Product, activated
from model.vision.tower import Tower

Connector = Callable[[Tensor], Tensor]
"""Maps [tiles, patches, width of the tower] to [features, width of the text model], by tile and then by row."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionEncoder:
    """Encoder of square tiles, with its connector. See `model.forward.ImageEncoder`.

    It computes one image at a time, so that an image's features have the same bits whatever else is encoded.
    """

    tower: Tower
    connector: Connector

    def __call__(self, images: Sequence[EncoderInput]) -> list[Tensor]:
        """Encodes images.

        Features enter the first layer as they are. Models that scale embeddings do not scale features.

        Returns:
            For each image [1, features, hidden], in the text model's dtype.
        """
        return [self.connector(self.tower(image.pixels))[None] for image in images]


@dataclass(frozen=True, slots=True, eq=False)
class Projector:
    """A connector of one product (PaliGemma)."""

    linear: Product

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class MLPProjector:
    """A connector of two products (LLaVA 1.5).

    Attributes:
        skipped: Vectors left out at the beginning of each tile.
    """

    first: Product
    second: Product
    activation: Activation
    skipped: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(activated(self.first(x[:, self.skipped :].flatten(0, 1)), self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class ShuffledProjector:
    """A connector that joins squares of patches (Idefics3; space to depth, Shi et al., 2016).

    factor x factor neighbouring patches become one vector, their channels side by side, row by row.
    """

    factor: int
    linear: Product

    def __call__(self, x: Tensor) -> Tensor:
        tiles, patches, width = x.shape
        side = round(patches**0.5)
        across = side // self.factor
        x = x.view(tiles, across, self.factor, across, self.factor, width).transpose(2, 3)
        return self.linear(x.reshape(-1, self.factor**2 * width))
