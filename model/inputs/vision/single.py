"""One tile an image, as PaliGemma, LLaVA and the first nanoVLM take it."""

from dataclasses import dataclass

from PIL import Image

from model.fields import Fields
from model.inputs.images import Pixels
from model.inputs.vision.processor import CLIP_MEAN, read_colour, read_edge, read_filter, read_sides
from model.inputs.vision.resize import centred, resized, shortest_edge, squared, stacked
from model.inputs.vision.tiles import Tiles

Sides = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SingleTile:
    """tokens: placeholders of an image. background: an image is first put into a square of this colour; None leaves it
    as it is. sides: height and width that it is resized to; or edge: what its shorter side is resized to, the other in
    proportion; neither leaves its size. crop: height and width that are then cut from its middle.
    """

    tokens: int
    filter: Image.Resampling
    sides: Sides | None = None
    edge: int | None = None
    crop: Sides | None = None
    background: tuple[int, int, int] | None = None

    def __call__(self, pixels: Pixels) -> Tiles:
        """pixels: uint8 [height, width, 3]."""
        if self.background is not None:
            pixels = squared(pixels, self.background)
        height, width = self.sides or (shortest_edge(pixels, self.edge) if self.edge else pixels.shape[:2])
        pixels = resized(pixels, height, width, self.filter)
        if self.crop is not None:
            pixels = centred(pixels, *self.crop)
        return Tiles(stacked([pixels]), 0, 0, self.tokens)


def _kind(fields: Fields) -> str:
    return fields.get("image_processor_type", str, fields.get("feature_extractor_type", str, ""))


def is_siglip(fields: Fields) -> bool:
    """Else the defaults are CLIP's."""
    return _kind(fields).startswith("Siglip")


def read_single_tile(fields: Fields, image_size: int, tokens: int) -> SingleTile:
    """Of CLIP's, SigLIP's and LLaVA's image processors. fields: of the processor. image_size: what the encoder takes.

    Raises CheckpointError where tiles would not have that size.
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
    """Sides or shorter edge after resizing, one of them None. A number alone is the edge. Raises CheckpointError."""
    if "size" not in fields:
        return ((224, 224), None) if is_siglip(fields) else (None, 224)
    if isinstance(fields.values["size"], int):
        return None, fields.positive("size")
    edge = read_edge(fields, "size", "shortest_edge")
    sides = read_sides(fields, "size") if edge is None else None
    if edge is None and sides is None:
        raise fields.refuse("size", "must hold 'height' and 'width', or 'shortest_edge'")
    return sides, edge
