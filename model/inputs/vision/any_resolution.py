"""Resizes images to whole squares of patches, in a resolution of their own, as Qwen's models take them."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from model.fields import Fields
from model.inputs.images import Pixels
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.processor import read_filter
from model.inputs.vision.resize import resized, stacked
from model.qwen_vl import AXES
from scheduler.invalid import InvalidRequest

LARGEST_RATIO = 200  # of an image's sides; transformers' processors refuse larger ones too
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280  # where a processor says nothing


@dataclass(frozen=True, slots=True)
class AnyResolution:
    """Resizes an image to whole squares, one for each feature (smart resize, Wang et al., Qwen2-VL, 2024).

    Attributes:
        filter: Filter for resizing.
        side: Side of a feature's square in pixels.
        least: Pixels that an image gets at least.
        most: Pixels that an image gets at most.
    """

    filter: Image.Resampling
    side: int
    least: int
    most: int

    def __call__(self, pixels: Pixels) -> ProcessedImage:
        """Resizes an image [height, width, 3] uint8.

        Raises:
            InvalidRequest: One of its sides is far longer than the other, or its new size is too large.
        """
        height, width = fitted(pixels.shape[0], pixels.shape[1], self.side, self.least, self.most)
        rows, columns = height // self.side, width // self.side
        positions = np.stack((np.zeros((rows, columns), np.int32), *np.indices((rows, columns), np.int32)))
        frames = stacked([resized(pixels, height, width, self.filter)])
        return ProcessedImage(frames, (1, rows, columns), positions=positions.reshape(AXES, -1))


def fitted(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Returns the height and width of an image in whole squares.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        side: Side of a square in pixels.
        least: Pixels of the result, at least.
        most: Pixels of the result, at most, unless each side has one square alone.

    Raises:
        InvalidRequest: One side is more than LARGEST_RATIO times the other.
    """
    if max(height, width) > LARGEST_RATIO * min(height, width):
        raise InvalidRequest(
            "images", f"{width} x {height} pixels", f"one side may be at most {LARGEST_RATIO} times the other"
        )
    new = round(height / side) * side, round(width / side) * side
    if new[0] * new[1] > most:
        shrink = math.sqrt(height * width / most)
        return tuple(max(side, math.floor(length / shrink / side) * side) for length in (height, width))  # type: ignore[return-value]
    if new[0] * new[1] < least:
        grow = math.sqrt(least / (height * width))
        return math.ceil(height * grow / side) * side, math.ceil(width * grow / side) * side
    return new


def read_any_resolution(fields: Fields, patch: int, merge: int, frames: int) -> AnyResolution:
    """Reads the settings of Qwen's image processors.

    Args:
        fields: Settings of the processor.
        patch: Side of a patch in the tower, in pixels.
        merge: Patches in a row of a feature's square, likewise.
        frames: Pictures of a patch, likewise.

    Raises:
        CheckpointError: A field is wrong, or the tower takes other patches.
    """
    for key, number, default in (
        ("patch_size", patch, 14), ("merge_size", merge, 2), ("temporal_patch_size", frames, 2),
    ):  # fmt: skip
        if fields.positive(key, default) != number:
            raise fields.refuse(key, f"but the vision encoder in config.json has {number}")
    if not fields.flag("do_resize", True):
        raise fields.refuse("do_resize", "but images whose sides are no whole squares are not supported")
    size = fields.section("size")
    least, most = (
        fields.positive(old) if old in fields else size.positive(key, default)
        for old, key, default in (
            ("min_pixels", "shortest_edge", LEAST_PIXELS), ("max_pixels", "longest_edge", MOST_PIXELS),
        )
    )  # fmt: skip
    if least > most:
        raise fields.refuse("size", f"at least {least} pixels are more than at most {most}")
    return AnyResolution(read_filter(fields, Image.Resampling.BICUBIC), patch * merge, least, most)
