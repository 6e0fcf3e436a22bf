"""From the pixels of an image to what stands in the text model for it."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from model.layers import Activation, Product, activated
from model.vision.tower import Tower

Connector = Callable[[Tensor], Tensor]
"""[tiles, patches, width of the tower] -> [features, width of the text model], in order of tiles and then rows."""


@dataclass(frozen=True, slots=True, eq=False)
class VisionEncoder:
    """Called with one image at a time, so that its features have the same bits whatever else is encoded."""

    tower: Tower
    connector: Connector

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels: uint8 [tiles, 3, height, width] of one image, on any device.

        Returns [features, hidden] in order of the image's placeholders, in the text model's dtype, as they enter its
        first layer: where a model scales its embeddings, features are not scaled again.
        """
        return self.connector(self.tower(pixels))


@dataclass(frozen=True, slots=True, eq=False)
class Projector:
    """One product (PaliGemma)."""

    linear: Product

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(0, 1))


@dataclass(frozen=True, slots=True, eq=False)
class MLPProjector:
    """LLaVA 1.5. skipped: how many vectors at the beginning of each tile are left out."""

    first: Product
    second: Product
    activation: Activation
    skipped: int

    def __call__(self, x: Tensor) -> Tensor:
        return self.second(activated(self.first(x[:, self.skipped :].flatten(0, 1)), self.activation))


@dataclass(frozen=True, slots=True, eq=False)
class ShuffledProjector:
    """factor x factor neighbouring patches become one vector, their channels side by side, row by row (Idefics3;
    space to depth, Shi et al., 2016).
    """

    factor: int
    linear: Product

    def __call__(self, x: Tensor) -> Tensor:
        tiles, patches, width = x.shape
        side = round(patches**0.5)
        across = side // self.factor
        x = x.view(tiles, across, self.factor, across, self.factor, width).transpose(2, 3)
        return self.linear(x.reshape(-1, self.factor**2 * width))
