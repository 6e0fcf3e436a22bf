"""Cuts images into tiles beside the whole image, as Idefics3 and SmolVLM take them (Laurencon et al., 2024)."""

import math
from dataclasses import dataclass

from PIL import Image

from model.fields import Fields
from model.inputs.images import Pixels
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.processor import read_edge, read_filter
from model.inputs.vision.resize import grid, resized, stacked

LARGEST = 4096  # side of an image, whatever its processor says


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """Cuts images for Idefics3 and SmolVLM.

    Attributes:
        tokens: Placeholders of a tile.
        filter: Filter for resizing.
        side: Side of a tile in pixels.
        longest: Length that an image's longer side is first resized to.
        split: Whether an image larger than a tile is cut into several. The whole image is one more tile, the last.
    """

    tokens: int
    filter: Image.Resampling
    side: int
    longest: int
    split: bool = True

    def __call__(self, pixels: Pixels) -> ProcessedImage:
        """Cuts an image [height, width, 3] uint8."""
        height, width = bounded(*scaled(pixels.shape[0], pixels.shape[1], self.longest), LARGEST)
        pixels = resized(pixels, height, width, self.filter)
        if not self.split:
            whole_image = stacked([resized(pixels, self.side, self.side, self.filter)])
            return ProcessedImage(whole_image, (1, self.tokens))
        height, width = whole(height, width, self.side)
        pixels = resized(pixels, height, width, self.filter)
        if height <= self.side and width <= self.side:
            return ProcessedImage(stacked([pixels]), (1, self.tokens))
        tiles = [*grid(pixels, self.side), resized(pixels, self.side, self.side, self.filter)]
        rows, columns = height // self.side, width // self.side
        return ProcessedImage(stacked(tiles), (len(tiles), self.tokens), rows, columns)


def scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """Scales the longer side to `longest`; the other follows in proportion, to an even number."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


def bounded(height: int, width: int, most: int) -> tuple[int, int]:
    """Scales height and width in proportion, so that no side is longer than `most`."""
    ratio = width / height
    if width >= height and width > most:
        return max(int(most / ratio), 1), most
    if height > width and height > most:
        return most, max(int(most * ratio), 1)
    return height, width


def whole(height: int, width: int, side: int) -> tuple[int, int]:
    """Rounds both sides up to whole tiles, the shorter one after it has followed the longer."""
    ratio = width / height
    if width >= height:
        width = _up(width, side)
        return _up(int(width / ratio), side), width
    height = _up(height, side)
    return height, _up(int(height * ratio), side)


def _up(length: int, side: int) -> int:
    return math.ceil(length / side) * side


def read_split_tiles(fields: Fields, tokens: int) -> SplitTiles:
    """Reads the settings of Idefics3's and SmolVLM's image processors.

    Raises:
        CheckpointError: A field is wrong or not supported.
    """
    if not fields.flag("do_resize", True):
        raise fields.refuse("do_resize", "but tiles of any size are not supported")
    return SplitTiles(
        tokens,
        read_filter(fields, Image.Resampling.LANCZOS),
        side=tile_side(fields),
        longest=_edge(fields, "size", 4 * 364),
        split=fields.flag("do_image_splitting", True),
    )


def tile_side(fields: Fields) -> int:
    """Reads the side of a tile in pixels.

    Raises:
        CheckpointError: The field is wrong.
    """
    return _edge(fields, "max_image_size", 364)


def _edge(fields: Fields, key: str, default: int) -> int:
    if key not in fields:
        return default
    edge = read_edge(fields, key, "longest_edge")
    if edge is None:
        raise fields.refuse(key, "must hold 'longest_edge'")
    return edge
