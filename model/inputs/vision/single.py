"""Makes one tile of an image, as PaliGemma, LLaVA and the first nanoVLM take it."""

from dataclasses import dataclass

from PIL import Image

from model.fields import Fields
from model.inputs.images import Pixels
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.processor import CLIP_MEAN, read_colour, read_edge, read_filter, read_sides
from model.inputs.vision.resize import centred, resized, shortest_edge, squared, stacked

Sides = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SingleTile:
    """Makes one tile of an image: pads, resizes, crops.

    Attributes:
        tokens: Placeholders of an image.
        filter: Filter for resizing.
        sides: Height and width to resize to.
        edge: Length to resize the shorter side to, the other in proportion. Without `sides` and `edge` the size stays.
        crop: Height and width to cut from the middle. None for no crop.
        background: Colour of the square that the image is first centred in. None for no square.
    """

    tokens: int
    filter: Image.Resampling
    sides: Sides | None = None
    edge: int | None = None
    crop: Sides | None = None
    background: tuple[int, int, int] | None = None

    def __call__(self, pixels: Pixels) -> ProcessedImage:
        """Makes the tile of an image [height, width, 3] uint8."""
        if self.background is not None:
            pixels = squared(pixels, self.background)
        height, width = self.sides or (shortest_edge(pixels, self.edge) if self.edge else pixels.shape[:2])
        pixels = resized(pixels, height, width, self.filter)
        if self.crop is not None:
            pixels = centred(pixels, *self.crop)
        return ProcessedImage(stacked([pixels]), (1, self.tokens))


def _kind(fields: Fields) -> str:
    return fields.get("image_processor_type", str, fields.get("feature_extractor_type", str, ""))


def is_siglip(fields: Fields) -> bool:
    """Returns whether the processor is SigLIP's. If not, the defaults are CLIP's."""
    return _kind(fields).startswith("Siglip")


def read_single_tile(fields: Fields, image_size: int, tokens: int) -> SingleTile:
    """Reads the settings of CLIP's, SigLIP's and LLaVA's image processors.

    Args:
        fields: Settings of the processor.
        image_size: Side of the encoder's tiles in pixels.
        tokens: Placeholders of an image.

    Raises:
        CheckpointError: A field is wrong, or tiles would not have the encoder's size.
    """
    sides, edge = _size(fields) if fields.flag("do_resize", True) else (None, None)
    crops = fields.flag("do_center_crop", not is_siglip(fields))
    pads = _kind(fields).startswith("Llava") and fields.flag("do_pad")
    red, green, blue = read_colour(fields, "image_mean", CLIP_MEAN)
    tile = SingleTile(
        tokens,
        read_filter(fields, Image.Resampling.BICUBIC),
        sides,
        edge,
        crop=(read_sides(fields, "crop_size") or (224, 224)) if crops else None,
        background=(int(red * 255), int(green * 255), int(blue * 255)) if pads else None,
    )
    if (tile.crop or tile.sides) != (image_size, image_size):
        key = "crop_size" if crops else "size"
        raise fields.refuse(key, f"but the vision encoder in config.json takes {image_size} x {image_size} pixels")
    return tile


def _size(fields: Fields) -> tuple[Sides | None, int | None]:
    """Returns the sides or the shorter edge after resizing, one of them None. A number alone is the edge.

    Raises:
        CheckpointError: The field is wrong.
    """
    if "size" not in fields:
        return ((224, 224), None) if is_siglip(fields) else (None, 224)
    if isinstance(fields.values["size"], int):
        return None, fields.positive("size")
    edge = read_edge(fields, "size", "shortest_edge")
    sides = read_sides(fields, "size") if edge is None else None
    if edge is None and sides is None:
        raise fields.refuse("size", "must hold 'height' and 'width', or 'shortest_edge'")
    return sides, edge
