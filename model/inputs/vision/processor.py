"""Reads the settings of a model's image processor.

They are 'image_processor' in processor_config.json (transformers 5), or preprocessor_config.json.
"""

from pathlib import Path

from PIL import Image

from model.errors import CheckpointError
from model.fields import LEAST_FLOAT, MOST_FLOAT, Fields, read_json
from model.inputs.vision.processed import Normalisation

NESTED, CLASSIC = "processor_config.json", "preprocessor_config.json"
CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALF = [0.5, 0.5, 0.5]


def read_processor(directory: Path) -> Fields:
    """Reads the settings.

    Raises:
        CheckpointError: Neither file has them.
    """
    nested, classic = directory / NESTED, directory / CLASSIC
    if nested.exists():
        section = Fields(nested, read_json(nested)).section("image_processor")
        if section.values:
            return section
    if not classic.exists():
        raise CheckpointError(f"{classic} is missing: nothing says how the model wants its images")
    return Fields(classic, read_json(classic))


def read_normalisation(fields: Fields, mean: list[float], std: list[float]) -> Normalisation:
    """Reads the normalisation of pixels.

    Args:
        fields: Settings of the processor.
        mean: Mean of each channel where the settings have none.
        std: Standard deviation, likewise.

    Raises:
        CheckpointError: A field is wrong.
    """
    factor = fields.positive_float("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else 1.0
    if not fields.flag("do_normalize", True):
        return Normalisation(factor, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    return Normalisation(
        factor, read_colour(fields, "image_mean", mean), read_colour(fields, "image_std", std, LEAST_FLOAT)
    )


def read_colour(
    fields: Fields, key: str, default: list[float], least: float = -MOST_FLOAT
) -> tuple[float, float, float]:
    """Reads a number for each of three channels, none below `least`.

    Raises:
        CheckpointError: The field is wrong.
    """
    values = fields.numbers(key, least, MOST_FLOAT, default)
    if len(values) != 3:
        raise fields.refuse(key, "must be a number for each of 3 channels")
    return values[0], values[1], values[2]


def read_filter(fields: Fields, default: Image.Resampling) -> Image.Resampling:
    """Reads the filter for resizing.

    Raises:
        CheckpointError: The field names none of Pillow's filters.
    """
    try:
        return Image.Resampling(fields.get("resample", int, int(default)))
    except ValueError:
        raise fields.refuse("resample", "must be a number of one of Pillow's filters") from None


def read_sides(fields: Fields, key: str) -> tuple[int, int] | None:
    """Returns the height and width under a key, one number or an object of both. None where it holds neither."""
    value = fields.values.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        side = fields.positive(key)
        return side, side
    section = fields.section(key)
    if "height" not in section and "width" not in section:
        return None
    return section.positive("height"), section.positive("width")


def read_edge(fields: Fields, key: str, name: str) -> int | None:
    """Returns the edge ('shortest_edge', 'longest_edge') in the object under a key. None where it has none."""
    section = fields.section(key)
    return section.positive(name) if name in section else None
