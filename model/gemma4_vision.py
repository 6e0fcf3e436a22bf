"""Reads config.json of Gemma 4 with images, whose encoder takes any resolution. Imports no torch."""

from dataclasses import dataclass

from model.fields import Fields
from model.multimodal import TowerShape, Vision, VisionLanguageFamily, check_heads, read_text

GEMMA4 = "Gemma4ForConditionalGeneration"
BEGIN, END, IMAGE = 255999, 258882, 258880  # ids of tokens, where config.json says nothing
MOST_SIDE, MOST_PATCH, MOST_PLACES = 8, 64, 2**16
DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "pooling_kernel_size": 3, "patch_size": 16,
    "position_embedding_size": 10240,
}  # fmt: skip
"""Defaults of the config class of transformers for 'vision_config'."""


@dataclass(frozen=True, slots=True)
class PooledShape:
    """Shape of the encoder beside its `TowerShape`.

    Attributes:
        head_dim: Elements of a head.
        side: Patches in a row of the square that becomes a feature.
        places: Rows, and columns, that have learned positions.
        theta: Base of the rotary frequencies.
        clipped: Whether inputs and outputs of products have bounds.
        standardized: Whether features have a bias and a scale.
    """

    head_dim: int
    side: int
    places: int
    theta: float
    clipped: bool
    standardized: bool


def vision_fields(fields: Fields) -> Fields:
    """Returns 'vision_config', with defaults for what it lacks."""
    section = fields.section("vision_config")
    return Fields(section.path, DEFAULTS | {key: value for key, value in section.values.items() if value is not None})


def read_pooled_shape(fields: Fields) -> PooledShape:
    """Reads what the encoder has beside its shape, from all of config.json.

    Raises:
        CheckpointError: A field is wrong or not supported.
    """
    f = vision_fields(fields)
    dim, side, places = f.positive("head_dim"), f.positive("pooling_kernel_size"), f.positive("position_embedding_size")
    if dim % 4:
        raise f.refuse("head_dim", "must be a multiple of 4: a half turns by rows, a half by columns")
    for key, number, most in (
        ("pooling_kernel_size", side, MOST_SIDE),
        ("position_embedding_size", places, MOST_PLACES),
    ):
        if number > most:
            raise f.refuse(key, f"must be at most {most}")
    rope = f.section("rope_parameters")
    if rope.get("rope_type", str, "axial") != "axial":
        raise rope.refuse("rope_type", "must be 'axial'")
    theta = rope.positive_float("rope_theta", 100.0)
    return PooledShape(dim, side, places, theta, f.flag("use_clipped_linears"), f.flag("standardize"))


def read_gemma4_vision(fields: Fields, family: VisionLanguageFamily, text: str) -> Vision:
    """Reads the vision part. See `VisionLanguageFamily.reader`.

    Raises:
        CheckpointError: A field is wrong or not supported.
    """
    f = vision_fields(fields)
    if f.flag("attention_bias"):
        raise f.refuse("attention_bias", "must be false")
    tower = TowerShape(
        kind=GEMMA4,
        hidden=f.positive("hidden_size"),
        intermediate=f.positive("intermediate_size"),
        layers=f.positive("num_hidden_layers"),
        heads=f.positive("num_attention_heads"),
        image=0,
        patch=f.positive("patch_size"),
        eps=f.positive_float("rms_norm_eps"),
        activation=f.get("hidden_activation", str),
    )
    check_heads(fields.path.name, tower)
    if tower.patch > MOST_PATCH:
        raise f.refuse("patch_size", f"must be at most {MOST_PATCH}")
    if f.positive("num_key_value_heads", tower.heads) != tower.heads:
        raise f.refuse("num_key_value_heads", f"must be that of all heads, {tower.heads}")
    read_pooled_shape(fields)
    _, of_text = read_text(fields, family)
    if of_text.get("pad_token_id", int, 0) != 0:
        raise of_text.refuse("pad_token_id", "must be 0, whose inputs of layers images have")
    token = fields.get("image_token_id", int, family.image_token)
    if token < 0:
        raise fields.refuse("image_token_id", "must be at least 0")
    both_ways = of_text.values.get("use_bidirectional_attention") == "vision"
    why = "features of an image see each other in both directions" if both_ways else ""
    return Vision(text, token, False, tower, fields, unserved=why)
