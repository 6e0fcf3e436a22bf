"""Resizes images to the largest size of their shape that a number of features allows, as Gemma 4 takes them."""

import math
from dataclasses import dataclass

from PIL import Image

from model.fields import Fields
from model.inputs.images import Pixels
from model.inputs.vision.processed import Normalisation, ProcessedImage
from model.inputs.vision.processor import read_filter, read_normalisation
from model.inputs.vision.resize import resized, stacked
from scheduler.invalid import InvalidRequest

BUDGETS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True, slots=True)
class PatchBudget:
    """Resizes an image to whole squares, one for each feature.

    Attributes:
        filter: Filter for resizing.
        side: Side of a feature's square in pixels.
        features: Features of an image, at most.
    """

    filter: Image.Resampling
    side: int
    features: int

    def __call__(self, pixels: Pixels) -> ProcessedImage:
        """Resizes an image [height, width, 3] uint8.

        Raises:
            InvalidRequest: It is too small, or far longer than wide.
        """
        height, width = budgeted(pixels.shape[0], pixels.shape[1], self.side, self.features)
        frames = stacked([resized(pixels, height, width, self.filter)])
        return ProcessedImage(frames, (1, height // self.side, width // self.side))


def budgeted(height: int, width: int, side: int, features: int) -> tuple[int, int]:
    """Returns the height and width of an image in whole squares.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        side: Side of a square in pixels.
        features: Squares of the result, at most.

    Raises:
        InvalidRequest: No size of whole squares has nearly its shape.
    """
    factor = math.sqrt(features * side**2 / (height * width))
    rows, columns = (math.floor(factor * length / side) for length in (height, width))
    if rows == 0:
        rows, columns = 1, min(width // height, features)
    elif columns == 0:
        rows, columns = min(height // width, features), 1
    if not rows * columns or rows * columns > features:
        raise InvalidRequest(
            "images",
            f"{width} x {height} pixels",
            f"the model has no size near that shape, of at most {features} squares",
        )
    return rows * side, columns * side


def read_patch_budget(fields: Fields, patch: int, side: int) -> PatchBudget:
    """Reads the settings of Gemma 4's image processor.

    Args:
        fields: Settings of the processor.
        patch: Side of a patch in the encoder, in pixels.
        side: Patches in a row of a feature's square, likewise.

    Raises:
        CheckpointError: A field is wrong, or the encoder takes other patches.
    """
    for key, number, default in (("patch_size", patch, 16), ("pooling_kernel_size", side, 3)):
        if fields.positive(key, default) != number:
            raise fields.refuse(key, f"but the vision encoder in config.json has {number}")
    if not fields.flag("do_resize", True):
        raise fields.refuse("do_resize", "but images whose sides are no whole squares are not supported")
    features = fields.positive("max_soft_tokens", 280)
    if features not in BUDGETS:
        raise fields.refuse("max_soft_tokens", f"must be one of {', '.join(map(str, BUDGETS))}")
    return PatchBudget(read_filter(fields, Image.Resampling.BICUBIC), patch * side, features)


def read_centred(fields: Fields) -> Normalisation:
    """Reads the normalisation of pixels, of which the encoder makes -1 to 1.

    Raises:
        CheckpointError: A field is wrong.
    """
    plain = read_normalisation(fields.having({"do_normalize": fields.flag("do_normalize")}), [0.0] * 3, [1.0] * 3)
    mean = [m + 0.5 * s for m, s in zip(plain.mean, plain.std, strict=True)]
    return Normalisation(plain.factor, (mean[0], mean[1], mean[2]), tuple(0.5 * s for s in plain.std))  # type: ignore[arg-type]
