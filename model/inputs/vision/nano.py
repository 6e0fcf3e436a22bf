"""Cuts images as nanoVLM takes them (github.com/huggingface/nanoVLM). Pixels go in as 0 to 1.

Early models take one square. Since the middle of 2025 they take the whole image and the tiles of a larger one.
"""

import math
from dataclasses import dataclass

from PIL import Image

from model.inputs.images import Pixels
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.resize import grid, resized, smoothly_resized, stacked


@dataclass(frozen=True, slots=True)
class NanoTiles:
    """Cuts images for nanoVLM.

    The original keeps the whole image in float32. Here it is rounded to whole pixel values, so it differs by at most
    half of one.

    Attributes:
        tokens: Placeholders of a tile.
        side: Side of a tile in pixels.
        longest: Most pixels of an image's longer side. None: an image is one tile, whatever its size.
        stretched: Whether smaller images are stretched to that length too.
        overview: Whether the whole image stands before its tiles, where it has several.
    """

    tokens: int
    side: int
    longest: int | None = None
    stretched: bool = False
    overview: bool = True

    def __call__(self, pixels: Pixels) -> ProcessedImage:
        """Cuts an image [height, width, 3] uint8."""
        if self.longest is None:
            square = resized(pixels, self.side, self.side, Image.Resampling.BILINEAR)
            return ProcessedImage(stacked([square]), (1, self.tokens))
        height, width = self.size(*pixels.shape[:2])
        pixels = resized(pixels, height, width, Image.Resampling.BICUBIC)
        tiles = grid(pixels, self.side)
        rows, columns = height // self.side, width // self.side
        if self.overview and len(tiles) > 1:
            tiles = [smoothly_resized(pixels, self.side, self.side), *tiles]
        return ProcessedImage(stacked(tiles), (len(tiles), self.tokens), rows, columns)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Returns height and width in whole tiles.

        The longer side is rounded up, but not above `longest`. The other follows in proportion and is rounded up.
        """
        long, short = max(height, width), min(height, width)
        most = self.longest or self.side
        target = most if self.stretched else min(most, math.ceil(long / self.side) * self.side)
        other = max(math.ceil(short * (target / long) / self.side) * self.side, self.side)
        return (other, target) if width >= height else (target, other)
