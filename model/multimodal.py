"""Reads config.json of vision-language models: their text model, their defaults and the shape of their image encoder.

Imports no torch. The defaults of transformers' classes of their 'model_type' hold for keys that 'text_config' and
'vision_config' lack.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.errors import CheckpointError
from model.families import family_of
from model.fields import Fields

MOST_PATCHES_ACROSS = 128
"""Patches in a row of a tile. The encoder's attention costs their fourth power; models of 2025 have at most 64."""

NANO = "nanoVLM"
"""The architecture of checkpoints of github.com/huggingface/nanoVLM, whose config.json names none."""

PALIGEMMA, LLAVA = "PaliGemmaForConditionalGeneration", "LlavaForConditionalGeneration"
IDEFICS3, SMOLVLM = "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Shape of an image encoder, a transformer over patches.

    Attributes:
        kind: Its 'model_type'.
        hidden: Width of its layers.
        intermediate: Width of its MLPs.
        image: Side of a tile in pixels, 0 where images have any resolution.
        patch: Side of a patch in pixels.
        eps: Epsilon of its norms.
        activation: Name of its activation.
    """

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    image: int
    patch: int
    eps: float
    activation: str

    @property
    def patches(self) -> int:
        """The number of patches in a tile of `image` x `image` pixels."""
        return (self.image // self.patch) ** 2


@dataclass(frozen=True, slots=True)
class Vision:
    """The vision part of a vision-language model.

    Attributes:
        text: Architecture of the text model.
        image_token_id: Id of the placeholder that stands in a prompt for a feature of an image.
        prefix_lm: Whether a prompt is a bidirectional prefix.
        tower: Shape of the image encoder.
        fields: All of config.json.
        rotary_axes: Axes of its rotary positions. With one, a token's position is that in the sequence. With several,
            features stand where their images say (`PromptImage.positions`), and text goes on after them.
        deepstack: As in `model.decoder.Decoder`.
        pair_axes: Axis that each rotated pair of the text model's heads turns by: 0 time, 1 row, 2 column. Empty for a
            model with one axis.
        unserved: Why the model's images are not served; empty where they are.
    """

    text: str
    image_token_id: int
    prefix_lm: bool
    tower: TowerShape
    fields: Fields = field(repr=False, compare=False)
    rotary_axes: int = 1
    deepstack: tuple[int, ...] = ()
    pair_axes: tuple[int, ...] = ()
    unserved: str = ""


def _text(
    vocabulary: int, hidden: int, width: int, layers: int, heads: int, context: int, **more: object
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        **more,
    }


QWEN2_VL_TEXT = _text(
    152064, 8192, 29568, 80, 64, 32768, num_key_value_heads=8, rope_theta=1e6, rms_norm_eps=1e-5, max_window_layers=80,
    sliding_window=4096, bos_token_id=151643, eos_token_id=151645,
)  # fmt: skip
TEXTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _text(32000, 4096, 11008, 32, 32, 2048, eos_token_id=2)),
    "mistral": (
        "MistralForCausalLM", _text(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, eos_token_id=2),
    ),
    "qwen2": ("Qwen2ForCausalLM", _text(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)),
    "gemma": ("GemmaForCausalLM", _text(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16, eos_token_id=1)),
    "gemma2": ("Gemma2ForCausalLM", _text(256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4, eos_token_id=1)),
    "gemma4_text": (
        "Gemma4ForCausalLM", _text(262144, 2304, 9216, 30, 8, 131072, num_key_value_heads=4, eos_token_id=1),
    ),
    "qwen2_vl_text": ("Qwen2ForCausalLM", QWEN2_VL_TEXT),
    "qwen2_5_vl_text": ("Qwen2ForCausalLM", QWEN2_VL_TEXT),
    "qwen3_vl_text": ("Qwen3ForCausalLM",
        _text(151936, 4096, 22016, 32, 32, 128000, num_key_value_heads=32, rope_theta=5e5)),
    "qwen3_vl_moe_text": ("Qwen3MoeForCausalLM",
        _text(151936, 2048, 5632, 24, 16, 128000, num_key_value_heads=16, rope_theta=5e5, moe_intermediate_size=1408,
              num_experts_per_tok=4, num_local_experts=60, norm_topk_prob=True)),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", _text(248320, 4096, 12288, 32, 16, 32768, num_key_value_heads=4)),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", _text(248320, 2048, 0, 40, 16, 32768, num_key_value_heads=2)),
}  # fmt: skip
"""Architecture and defaults of the config class, by 'model_type' of the text model."""


def _tower(
    hidden: int, width: int, layers: int, heads: int, patch: int, eps: float, activation: str = "gelu_pytorch_tanh"
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": 224,
        "patch_size": patch,
        "layer_norm_eps": eps,
        "hidden_act": activation,
    }


TOWERS: Mapping[str, dict[str, Any]] = {
    "siglip_vision_model": _tower(768, 3072, 12, 12, 16, 1e-6),
    "clip_vision_model": _tower(768, 3072, 12, 12, 32, 1e-5, "quick_gelu"),
    "idefics3_vision": _tower(1152, 3072, 12, 16, 32, 1e-6),
    "smolvlm_vision": _tower(1152, 3072, 12, 16, 32, 1e-6),
    "idefics3": _tower(1152, 3072, 12, 16, 32, 1e-6),
}
"""Defaults of the config class, by 'model_type' of the image encoder."""


def read_text(fields: Fields, kind: "VisionLanguageFamily") -> tuple[str, Fields]:
    """Reads the text model.

    Returns:
        Its architecture, and the fields that its own config.json would hold.

    Raises:
        CheckpointError: The text model is not supported, or a field has a wrong type.
    """
    section = fields.section("text_config")
    if kind.flat and "text_config" not in fields:
        section = fields.having({"model_type": None})
    name = section.get("model_type", str, kind.text)
    if name not in kind.texts:
        raise section.refuse("model_type", f"a text model that is none of {', '.join(kind.texts)} is not supported")
    architecture, defaults = TEXTS[name]
    tied = fields.flag("tie_word_embeddings", kind.tied)
    if kind.tied_by_text:
        tied = tied or section.flag("tie_word_embeddings", family_of(architecture).tied)
    whole: dict[str, Any] = {"tie_word_embeddings": tied}
    for key, other in (("dtype", "torch_dtype"), ("eos_token_id", "eos_token_id")):
        value = fields.values.get(key) or fields.values.get(other)
        if value is not None:
            whole[key] = value
    return architecture, Fields(fields.path, defaults | section.values | whole)


def read_tower(fields: Fields, default: str) -> TowerShape:
    """Reads the shape of the image encoder.

    Args:
        fields: The section 'vision_config'.
        default: 'model_type' where the section has none.

    Raises:
        CheckpointError: The encoder is not supported, or a field is wrong.
    """
    kind = fields.get("model_type", str, default)
    if kind not in TOWERS:
        raise fields.refuse("model_type", f"a vision encoder that is none of {', '.join(TOWERS)} is not supported")
    said = {key: value for key, value in fields.values.items() if value is not None}
    fields = Fields(fields.path, TOWERS[kind] | said)
    if fields.get("num_channels", int, 3) != 3:
        raise fields.refuse("num_channels", "must be 3")
    tower = TowerShape(
        kind,
        fields.positive("hidden_size"),
        fields.positive("intermediate_size"),
        fields.positive("num_hidden_layers"),
        fields.positive("num_attention_heads"),
        fields.positive("image_size"),
        fields.positive("patch_size"),
        fields.positive_float("layer_norm_eps"),
        fields.get("hidden_act", str),
    )
    check_tower(fields.path.name, tower)
    return tower


def check_tower(where: str, tower: TowerShape) -> None:
    """Checks that heads divide the width, and the number of patches.

    Args:
        where: File name for the message.
        tower: The shape.

    Raises:
        CheckpointError: The shape is not possible.
    """
    check_heads(where, tower)
    if not 1 <= tower.image // tower.patch <= MOST_PATCHES_ACROSS:
        raise CheckpointError(
            f"{where}: images of {tower.image} pixels hold {tower.image // tower.patch} patches of {tower.patch} in a "
            f"row, must hold 1 to {MOST_PATCHES_ACROSS}"
        )


def check_heads(where: str, tower: TowerShape) -> None:
    """Checks that heads divide the width. Raises CheckpointError, with the file name `where`."""
    if tower.hidden % tower.heads:
        raise CheckpointError(f"{where}: a vision encoder {tower.hidden} wide cannot have {tower.heads} heads")


def read_vision(fields: Fields, kind: "VisionLanguageFamily", text: str) -> Vision:
    """Reads the vision part of a model.

    Args:
        fields: All of config.json.
        kind: Defaults of the model's family.
        text: Architecture of the text model.

    Raises:
        CheckpointError: A field is wrong, or the encoder is not supported.
    """
    key = "image_token_id" if "image_token_id" in fields else "image_token_index"
    token = fields.get(key, int, kind.image_token)
    if token < 0:
        raise fields.refuse(key, "must be at least 0")
    return Vision(text, token, kind.prefix_lm, read_tower(fields.section("vision_config"), kind.tower), fields)


@dataclass(frozen=True, slots=True)
class VisionLanguageFamily:
    """Defaults of a family of vision-language models.

    Attributes:
        text: 'model_type' of the text model where config.json names none.
        tower: 'model_type' of the image encoder, likewise.
        image_token: Id of the placeholder, likewise.
        tied: Whether the output layer shares the embedding's weight, likewise.
        tied_by_text: Whether 'tie_word_embeddings' of the text model counts too.
        prefix_lm: Whether prompts are bidirectional prefixes.
        first_position: Number of a sequence's first position.
        texts: Values of 'model_type' that the text model may have.
        reader: Reads the vision part from all of config.json, the family, and the text model's architecture.
        flat: Whether config.json may hold the text model's fields beside its own, without a 'text_config'.
    """

    text: str
    tower: str
    image_token: int
    tied: bool = False
    tied_by_text: bool = False
    prefix_lm: bool = False
    first_position: int = 0
    texts: tuple[str, ...] = ("llama", "mistral", "qwen2", "gemma", "gemma2")
    reader: Callable[[Fields, "VisionLanguageFamily", str], Vision] = read_vision
    flat: bool = False
