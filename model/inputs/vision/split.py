"""Tiles and the whole image beside them, as Idefics3 and SmolVLM take it (Laurencon et al., 2024)."""

import math
from dataclasses import dataclass

from PIL import Image

from model.fields import Fields
from model.inputs.images import Pixels
from model.inputs.vision.processor import read_edge, read_filter
from model.inputs.vision.resize import grid, resized, stacked
from model.inputs.vision.tiles import Tiles

LARGEST = 4096  # side of an image, whatever its processor says


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """tokens: placeholders of a tile. side: of a tile. longest: edge that an image's longer side is first resized to.
    split: whether what is larger than a tile is cut into several, with the whole image in one more, the last.
    """

    tokens: int
    filter: Image.Resampling
    side: int
    longest: int
    split: bool = True

    def __call__(self, pixels: Pixels) -> Tiles:
        """pixels: uint8 [height, width, 3]."""
        height, width = bounded(*scaled(pixels.shape[0], pixels.shape[1], self.longest), LARGEST)
        pixels = resized(pixels, height, width, self.filter)
        if not self.split:
            return Tiles(stacked([resized(pixels, self.side, self.side, self.filter)]), 0, 0, self.tokens)
        height, width = whole(height, width, self.side)
        pixels = resized(pixels, height, width, self.filter)
        if height <= self.side and width <= self.side:
            return Tiles(stacked([pixels]), 0, 0, self.tokens)
        tiles = [*grid(pixels, self.side), resized(pixels, self.side, self.side, self.filter)]
        return Tiles(stacked(tiles), height // self.side, width // self.side, len(tiles) * self.tokens)


def scaled(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer side becomes `longest`, the other follows in proportion, to an even number."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return max(short + short % 2, 1), longest
    short = int(longest * ratio)
    return longest, max(short + short % 2, 1)


def bounded(height: int, width: int, most: int) -> tuple[int, int]:
    """No side is longer than this, in proportion."""
    ratio = width / height
    if width >= height and width > most:
        return max(int(most / ratio), 1), most
    if height > width and height > most:
        return most, max(int(most * ratio), 1)
    return height, width


def whole(height: int, width: int, side: int) -> tuple[int, int]:
    """Both sides are rounded up to whole tiles, the shorter one after it has followed the longer."""
    ratio = width / height
    if width >= height:
        width = _up(width, side)
        return _up(int(width / ratio), side), width
    height = _up(height, side)
    return height, _up(int(height * ratio), side)


def _up(length: int, side: int) -> int:
    return math.ceil(length / side) * side


def read_split_tiles(fields: Fields, tokens: int) -> SplitTiles:
    """Of Idefics3's and SmolVLM's image processors. fields: of the processor. Raises CheckpointError."""
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
    """Raises CheckpointError."""
    return _edge(fields, "max_image_size", 364)


def _edge(fields: Fields, key: str, default: int) -> int:
    if key not in fields:
        return default
    edge = read_edge(fields, key, "longest_edge")
    if edge is None:
        raise fields.refuse(key, "must hold 'longest_edge'")
    return edge
