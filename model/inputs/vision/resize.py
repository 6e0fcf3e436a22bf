"""Resizes and cuts images with Pillow, rounded to whole pixel values after each step.

transformers' processors that use Pillow do the same, so pixels are equal to theirs. Those that use torchvision differ a
little.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.inputs.images import Pixels
from scheduler.invalid import InvalidRequest

MOST_PIXELS = 100_000_000  # pixels of an image between its steps: padding a long one to a square multiplies them


def check_size(pixels: Pixels, height: int, width: int) -> None:
    """Checks the size that an image is about to get.

    Raises:
        InvalidRequest: It has more than MOST_PIXELS pixels.
    """
    if height * width > MOST_PIXELS:
        old = f"{pixels.shape[1]} x {pixels.shape[0]} pixels"
        raise InvalidRequest("images", old, f"would become {width} x {height} for the model, at most {MOST_PIXELS}")


def resized(pixels: Pixels, height: int, width: int, filter_: Image.Resampling) -> Pixels:
    """Resizes an image.

    Raises:
        InvalidRequest: The size is too large.
    """
    check_size(pixels, height, width)
    return np.asarray(Image.fromarray(pixels).resize((width, height), filter_))


def smoothly_resized(pixels: Pixels, height: int, width: int) -> Pixels:
    """Resizes bilinearly in float32 with one rounding at the end, as torch resizes tensors."""
    channels = [
        np.asarray(Image.fromarray(channel.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR))
        for channel in np.moveaxis(pixels, -1, 0)
    ]
    return np.clip(np.rint(np.stack(channels, -1)), 0, 255).astype(np.uint8)


def shortest_edge(pixels: Pixels, edge: int) -> tuple[int, int]:
    """Returns height and width with the shorter of them scaled to `edge`."""
    height, width = pixels.shape[:2]
    long = int(edge * max(height, width) / min(height, width))
    return (long, edge) if width <= height else (edge, long)


def squared(pixels: Pixels, colour: Sequence[int]) -> Pixels:
    """Centres an image in a square of this colour.

    Raises:
        InvalidRequest: The square is too large.
    """
    height, width = pixels.shape[:2]
    side = max(height, width)
    check_size(pixels, side, side)
    square = np.empty((side, side, 3), np.uint8)
    square[:] = colour
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def centred(pixels: Pixels, height: int, width: int) -> Pixels:
    """Returns the middle of an image, with black around it where it is too small."""
    here, there = pixels.shape[:2], (height, width)
    # An odd pixel is cut off at the lower right of a crop, and is black at the upper left of a frame.
    cut = [(old - new) // 2 if old > new else 0 for old, new in zip(here, there, strict=True)]
    put = [-((old - new) // 2) if old < new else 0 for old, new in zip(here, there, strict=True)]
    part = pixels[cut[0] : cut[0] + height, cut[1] : cut[1] + width]
    frame = np.zeros((height, width, 3), np.uint8)
    frame[put[0] : put[0] + part.shape[0], put[1] : put[1] + part.shape[1]] = part
    return frame


def grid(pixels: Pixels, side: int) -> list[Pixels]:
    """Cuts an image into squares, row by row; its sides are multiples of theirs."""
    height, width = pixels.shape[:2]
    return [
        pixels[top : top + side, left : left + side] for top in range(0, height, side) for left in range(0, width, side)
    ]


def stacked(tiles: Sequence[Pixels]) -> NDArray[np.uint8]:
    """Returns [tiles, 3, height, width] of tiles [height, width, 3]."""
    return np.ascontiguousarray(np.stack([tile.transpose(2, 0, 1) for tile in tiles]))
