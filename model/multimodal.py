"""What config.json says of models that see: which text model they have, what it leaves unsaid, and the shape of the
encoder of their images. Imports no torch.

Where 'text_config' and 'vision_config' are silent, the defaults of transformers' classes of their 'model_type' hold.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from model.errors import CheckpointError
from model.families import family_of
from model.fields import Fields

MOST_PATCHES_ACROSS = 128
"""In a row of a tile. The encoder's attention grows with the fourth power of this; 64 is the most of today's models."""

NANO = "nanoVLM"
"""The architecture of checkpoints of github.com/huggingface/nanoVLM, whose config.json names none."""

PALIGEMMA, LLAVA = "PaliGemmaForConditionalGeneration", "LlavaForConditionalGeneration"
IDEFICS3, SMOLVLM = "Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration"


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Shape of an image encoder, a transformer over patches. kind: the 'model_type'. image, patch: sides in pixels.
    activation: its name.
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
        """Of an image of `image` x `image` pixels."""
        return (self.image // self.patch) ** 2


@dataclass(frozen=True, slots=True)
class Vision:
    """What a model has beside its text. text: architecture of that. image_token_id: what stands in a prompt for a
    feature of an image. prefix_lm: tokens of a prompt see each other in both directions. fields: all of config.json.
    """

    text: str
    image_token_id: int
    prefix_lm: bool
    tower: TowerShape
    fields: Fields = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Kind:
    """text, tower: their 'model_type' where config.json says none. image_token: id, likewise. tied: likewise.
    tied_by_text: the text's word on that counts too. first_position: of a sequence. texts: which it may have.
    """

    text: str
    tower: str
    image_token: int
    tied: bool = False
    tied_by_text: bool = False
    prefix_lm: bool = False
    first_position: int = 0
    texts: tuple[str, ...] = ("llama", "mistral", "qwen2", "gemma", "gemma2")


KINDS = {
    PALIGEMMA: Kind("gemma", "siglip_vision_model", 256000, tied=True, prefix_lm=True, first_position=1,
                    texts=("gemma", "gemma2")),
    LLAVA: Kind("llama", "clip_vision_model", 32000, tied_by_text=True),
    IDEFICS3: Kind("llama", "idefics3_vision", 128257),
    SMOLVLM: Kind("llama", "smolvlm_vision", 128257),
}  # fmt: skip


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


TEXTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _text(32000, 4096, 11008, 32, 32, 2048, eos_token_id=2)),
    "mistral": (
        "MistralForCausalLM", _text(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8, eos_token_id=2),
    ),
    "qwen2": ("Qwen2ForCausalLM", _text(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)),
    "gemma": ("GemmaForCausalLM", _text(256000, 3072, 24576, 28, 16, 8192, num_key_value_heads=16, eos_token_id=1)),
    "gemma2": ("Gemma2ForCausalLM", _text(256000, 2304, 9216, 26, 8, 8192, num_key_value_heads=4, eos_token_id=1)),
}  # fmt: skip
"""By 'model_type': architecture, and what its config class says where text_config is silent."""


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
"""By 'model_type', likewise."""


def read_text(fields: Fields, kind: Kind) -> tuple[str, Fields]:
    """Architecture of the text model, and what its own config.json would hold. Raises CheckpointError."""
    section = fields.section("text_config")
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
    """fields: of 'vision_config'. default: its model_type, where it has none. Raises CheckpointError."""
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
    """Raises CheckpointError."""
    if tower.hidden % tower.heads:
        raise CheckpointError(f"{where}: a vision encoder {tower.hidden} wide cannot have {tower.heads} heads")
    if not 1 <= tower.image // tower.patch <= MOST_PATCHES_ACROSS:
        raise CheckpointError(
            f"{where}: images of {tower.image} pixels hold {tower.image // tower.patch} patches of {tower.patch} in a "
            f"row, must hold 1 to {MOST_PATCHES_ACROSS}"
        )


def read_vision(fields: Fields, kind: Kind, text: str) -> Vision:
    """text: its architecture. Raises CheckpointError."""
    key = "image_token_id" if "image_token_id" in fields else "image_token_index"
    token = fields.get(key, int, kind.image_token)
    if token < 0:
        raise fields.refuse(key, "must be at least 0")
    return Vision(text, token, kind.prefix_lm, read_tower(fields.section("vision_config"), kind.tower), fields)
