"""Images as nanoVLM takes them (github.com/huggingface/nanoVLM): first one square, since the middle of 2025 the whole
image and the tiles of a larger one. Pixels go in as 0 to 1.
"""

import math
from dataclasses import dataclass

from PIL import Image

from model.inputs.images import Pixels
from model.inputs.vision.resize import grid, resized, smoothly_resized, stacked
from model.inputs.vision.tiles import Tiles


@dataclass(frozen=True, slots=True)
class NanoTiles:
    """tokens: placeholders of a tile. side: of a tile. longest: edge that the longer side of an image may have; None is
    one tile, whatever the image. stretched: smaller images are made that long too. overview: the whole image stands
    before the tiles of one that has several.

    The original keeps what it makes of the whole image in float32, here it is rounded to whole pixel values: it is off
    by at most half of one.
    """

    tokens: int
    side: int
    longest: int | None = None
    stretched: bool = False
    overview: bool = True

    def __call__(self, pixels: Pixels) -> Tiles:
        """pixels: uint8 [height, width, 3]."""
        if self.longest is None:
            square = resized(pixels, self.side, self.side, Image.Resampling.BILINEAR)
            return Tiles(stacked([square]), 0, 0, self.tokens)
        height, width = self.size(*pixels.shape[:2])
        pixels = resized(pixels, height, width, Image.Resampling.BICUBIC)
        tiles = grid(pixels, self.side)
        rows, columns = height // self.side, width // self.side
        if self.overview and len(tiles) > 1:
            tiles = [smoothly_resized(pixels, self.side, self.side), *tiles]
        return Tiles(stacked(tiles), rows, columns, len(tiles) * self.tokens)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Whole tiles: the longer side rounded up, but not above `longest`, the other in proportion and rounded up."""
        long, short = max(height, width), min(height, width)
        most = self.longest or self.side
        target = most if self.stretched else min(most, math.ceil(long / self.side) * self.side)
        other = max(math.ceil(short * (target / long) / self.side) * self.side, self.side)
        return (other, target) if width >= height else (target, other)
