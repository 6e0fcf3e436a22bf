"""Reads config.json of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose images have any resolution. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from model.families import family_of
from model.fields import Fields
from model.multimodal import TowerShape, Vision, VisionLanguageFamily, check_heads, read_text

QWEN2_VL, QWEN2_5_VL = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL, QWEN3_VL_MOE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"

QWEN3_5, QWEN3_5_MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
QWEN = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE, QWEN3_5, QWEN3_5_MOE)
"""Architectures that this file reads."""

AXES = 3  # time, row, column
IMAGE_TOKEN, QWEN3_5_IMAGE_TOKEN = 151655, 248056
SECTIONS = {QWEN2_VL: (16, 24, 24), QWEN2_5_VL: (16, 24, 24), QWEN3_VL: (24, 20, 20), QWEN3_VL_MOE: (24, 20, 20),
            QWEN3_5: (11, 11, 10), QWEN3_5_MOE: (11, 11, 10)}  # fmt: skip
"""Rotated pairs of each axis where config.json says nothing."""
MOST_MERGED, MOST_FRAMES, MOST_PATCH = 8, 8, 64
MOST_PLACES = 2**16  # learned positions of a tower


@dataclass(frozen=True, slots=True)
class GridShape:
    """Shape of a tower that takes images of any resolution, beside its `TowerShape`.

    Attributes:
        merge: Patches in a row of a feature's square.
        frames: Pictures that a patch has one behind the other; an image is repeated.
        window: Features in a row of a window of attention. 0 without windows.
        full: Layers that have no window.
        places: Learned positions in a row of the table that an image's own are interpolated from. 0 without a table.
        taps: Layers after which features for a further layer of the text model are read, in the order of their mergers
            in the checkpoint.
        theta: Base of the rotary frequencies.
    """

    merge: int
    frames: int
    window: int = 0
    full: tuple[int, ...] = ()
    places: int = 0
    taps: tuple[int, ...] = ()
    theta: float = 10000.0


VISIONS = {
    QWEN2_VL: {"depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16,
               "patch_size": 14},
    QWEN2_5_VL: {"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
                 "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    QWEN3_VL: {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304,
               "num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304,
               "deepstack_visual_indexes": [8, 16, 24]},
}  # fmt: skip
VISIONS[QWEN3_VL_MOE] = VISIONS[QWEN3_VL]
VISIONS[QWEN3_5] = VISIONS[QWEN3_5_MOE] = {**VISIONS[QWEN3_VL], "deepstack_visual_indexes": []}
"""Defaults of the config classes of transformers for 'vision_config'."""


def vision_fields(fields: Fields, architecture: str) -> Fields:
    """Returns 'vision_config', with defaults for what it lacks."""
    section = fields.section("vision_config")
    said = {key: value for key, value in section.values.items() if value is not None}
    common = {"spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    return Fields(section.path, common | VISIONS[architecture] | said)


def read_tower_shape(fields: Fields, architecture: str) -> TowerShape:
    """Reads the shape of the tower.

    Args:
        fields: All of config.json.
        architecture: The model's architecture.

    Raises:
        CheckpointError: A field is wrong or not supported.
    """
    f = vision_fields(fields, architecture)
    if f.get("in_channels", int) != 3:
        raise f.refuse("in_channels", "must be 3")
    if architecture == QWEN2_VL:
        hidden = f.positive("embed_dim")
        intermediate = int(hidden * f.positive_float("mlp_ratio"))
    else:
        hidden, intermediate = f.positive("hidden_size"), f.positive("intermediate_size")
    tower = TowerShape(
        kind=architecture,
        hidden=hidden,
        intermediate=intermediate,
        layers=f.positive("depth"),
        heads=f.positive("num_heads" if "num_heads" in f else "num_attention_heads"),
        image=0,
        patch=_at_most(f, "patch_size", MOST_PATCH),
        eps=1e-6,
        activation=f.get("hidden_act", str),
    )
    check_heads(f.path.name, tower)
    if tower.hidden // tower.heads % 4:
        raise f.refuse("num_heads", f"a head of {tower.hidden // tower.heads} elements cannot turn by rows and columns")
    return tower


def read_grid_shape(fields: Fields, architecture: str, tower: TowerShape) -> GridShape:
    """Reads what the tower has beside its shape.

    Args:
        fields: All of config.json.
        architecture: The model's architecture.
        tower: Shape of the tower.

    Raises:
        CheckpointError: A field is wrong or not supported.
    """
    f = vision_fields(fields, architecture)
    merge, frames = _at_most(f, "spatial_merge_size", MOST_MERGED), _at_most(f, "temporal_patch_size", MOST_FRAMES)
    theta = f.section("rope_parameters").positive_float("rope_theta", 10000.0)
    if architecture == QWEN2_VL:
        return GridShape(merge, frames, theta=theta)
    if architecture == QWEN2_5_VL:
        window = f.positive("window_size") // merge // tower.patch
        if window == 0:
            raise f.refuse("window_size", f"must hold {merge} patches of {tower.patch} pixels")
        return GridShape(merge, frames, window, _layers(f, "fullatt_block_indexes", tower.layers), theta=theta)
    places = f.positive("num_position_embeddings")
    side = round(places**0.5)
    if side**2 != places or places > MOST_PLACES:
        raise f.refuse("num_position_embeddings", f"must be a square, at most {MOST_PLACES}")
    taps = _layers(f, "deepstack_visual_indexes", tower.layers)
    return GridShape(merge, frames, places=side, taps=taps, theta=theta)


def _at_most(fields: Fields, key: str, most: int) -> int:
    """Reads a number, or a list of equal numbers, as of the sides of a patch."""
    value = fields.values[key]
    if isinstance(value, list) and len(set(map(str, value))) == 1:
        fields = fields.having({key: value[0]})
    number = fields.positive(key)
    if number > most:
        raise fields.refuse(key, f"must be at most {most}")
    return number


def _layers(fields: Fields, key: str, layers: int) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in fields.numbers(key, 0, layers - 1))
    if len(set(numbers)) < len(numbers):
        raise fields.refuse(key, "must name each layer once")
    return numbers


def read_qwen_vision(fields: Fields, family: VisionLanguageFamily, text: str) -> Vision:
    """Reads the vision part. See `VisionLanguageFamily.reader`.

    Raises:
        CheckpointError: A field is wrong or not supported.
    """
    (architecture,) = fields.get("architectures", list)
    tower = read_tower_shape(fields, architecture)
    grid = read_grid_shape(fields, architecture, tower)
    _, of_text = read_text(fields, family)
    token = fields.get("image_token_id", int, family.image_token)
    if token < 0:
        raise fields.refuse("image_token_id", "must be at least 0")
    axes = read_pair_axes(of_text, architecture, family_of(text).head_dim)
    layers = of_text.positive("num_hidden_layers")
    if len(grid.taps) > layers:
        raise fields.refuse("vision_config", f"names {len(grid.taps)} further features for {layers} layers of text")
    return Vision(text, token, False, tower, fields, AXES, tuple(range(len(grid.taps))), axes)


def read_pair_axes(fields: Fields, architecture: str, head_dim: int | None) -> tuple[int, ...]:
    """Reads the axis that each rotated pair of a head turns by (M-RoPE, Wang et al., Qwen2-VL, 2024).

    From Qwen3-VL on the axes take turns, as long as each has pairs left. Before, each has a run of pairs.

    Args:
        fields: The text model's config.json.
        architecture: The model's architecture.
        head_dim: Elements of a head where config.json says nothing. None: hidden size / heads.

    Raises:
        CheckpointError: The sections do not fit the pairs.
    """
    rope = fields.rope
    dim = head_dim or fields.positive("hidden_size") // fields.positive("num_attention_heads")
    partial = (rope if "partial_rotary_factor" in rope else fields).positive_float(
        "partial_rotary_factor", 0.25 if architecture in (QWEN3_5, QWEN3_5_MOE) else 1.0
    )
    pairs = int(fields.positive("head_dim", dim) * partial) // 2
    default = [float(count) for count in SECTIONS[architecture]]
    counts = [int(count) for count in rope.numbers("mrope_section", 0, max(pairs, 1), default)]
    if len(counts) < AXES or sum(counts) != pairs:
        raise rope.refuse("mrope_section", f"must be numbers of pairs for {AXES} axes, together {pairs}")
    return _in_runs(counts) if architecture in (QWEN2_VL, QWEN2_5_VL) else _in_turn(counts, pairs)


def _in_turn(counts: Sequence[int], pairs: int) -> tuple[int, ...]:
    made = [0] * pairs
    for axis in range(1, AXES):
        for pair in range(axis, min(AXES * counts[axis], pairs), AXES):
            made[pair] = axis
    return tuple(made)


def _in_runs(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(number % AXES for number, count in enumerate(counts) for _ in range(count))
