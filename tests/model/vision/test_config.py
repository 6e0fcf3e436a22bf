"""config.json of models that see: what it says, what it leaves unsaid, and how it is refused when wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from model.config import ModelConfig, read_config
from model.errors import CheckpointError
from model.multimodal import IDEFICS3, LLAVA, PALIGEMMA, SMOLVLM, TEXTS, TOWERS, TowerShape
from model.vision_families import KINDS

pytestmark = pytest.mark.sample(3)

CLASSES = {
    PALIGEMMA: hf.PaliGemmaConfig, LLAVA: hf.LlavaConfig, IDEFICS3: hf.Idefics3Config, SMOLVLM: hf.SmolVLMConfig,
}  # fmt: skip
TOWER_CLASSES = {
    "siglip_vision_model": hf.SiglipVisionConfig,
    "clip_vision_model": hf.CLIPVisionConfig,
    "idefics3_vision": hf.Idefics3VisionConfig,
    "smolvlm_vision": hf.SmolVLMVisionConfig,
}


def read(directory: Path, values: dict[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(values))
    return read_config(directory)


def silent(architecture: str, text: dict[str, Any], tower: dict[str, Any], **top: Any) -> dict[str, Any]:
    """As little as a file may say."""
    return {"architectures": [architecture], "text_config": text, "vision_config": tower, **top}


@pytest.mark.parametrize(("architecture", "text"), [(name, text) for name in CLASSES for text in KINDS[name].texts])
def test_the_defaults_are_those_of_transformers(architecture: str, text: str, tmp_path: Path) -> None:
    theirs = CLASSES[architecture](text_config={"model_type": text}, vision_config={})
    config = read(tmp_path, silent(architecture, {"model_type": text}, {}))
    t = theirs.text_config
    assert (config.vocabulary, config.hidden, config.layers) == (t.vocab_size, t.hidden_size, t.num_hidden_layers)
    assert (config.heads, config.kv_heads) == (t.num_attention_heads, t.num_key_value_heads)
    assert config.head_dim == (getattr(t, "head_dim", None) or t.hidden_size // t.num_attention_heads)
    assert config.context == t.max_position_embeddings
    assert config.fields.positive("intermediate_size") == t.intermediate_size
    assert config.eos_token_ids == (() if t.eos_token_id is None else (t.eos_token_id,))
    assert config.tied_embeddings == theirs.tie_word_embeddings
    assert config.vision is not None
    assert config.vision.image_token_id == theirs.image_token_id
    assert (config.architecture, config.vision.text) == (architecture, TEXTS[text][0])


@pytest.mark.parametrize("kind", TOWER_CLASSES)
def test_the_defaults_of_towers_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = TOWER_CLASSES[kind]()
    config = read(tmp_path, silent(LLAVA, {}, {"model_type": kind}))
    assert config.vision is not None
    assert config.vision.tower == TowerShape(
        kind,
        theirs.hidden_size,
        theirs.intermediate_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.image_size,
        theirs.patch_size,
        theirs.layer_norm_eps,
        theirs.hidden_act,
    )
    assert kind in TOWERS


def test_llava_1_5_as_the_hub_has_it(tmp_path: Path) -> None:
    """Its text_config says next to nothing."""
    text = {
        "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
        "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064,
    }  # fmt: skip
    tower = {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    }  # fmt: skip
    more = {"image_token_index": 32000, "ignore_index": -100, "torch_dtype": "float16", "vision_feature_layer": -2}
    config = read(tmp_path, silent(LLAVA, text, tower, **more))
    assert (config.vocabulary, config.hidden, config.heads, config.kv_heads) == (32064, 4096, 32, 32)
    assert (config.context, config.dtype, config.tied_embeddings) == (4096, "float16", False)
    assert config.vision is not None
    assert (config.vision.tower.patches, config.vision.image_token_id) == (576, 32000)
    assert (config.first_position, config.vision.prefix_lm) == (0, False)


def test_paligemma_as_the_hub_has_it(tmp_path: Path) -> None:
    text = {
        "hidden_size": 2048, "intermediate_size": 16384, "model_type": "gemma", "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_image_tokens": 256, "num_key_value_heads": 1, "torch_dtype": "float32",
        "vocab_size": 257216, "pad_token_id": 0,
    }  # fmt: skip
    tower = {
        "hidden_size": 1152, "intermediate_size": 4304, "model_type": "siglip_vision_model", "num_attention_heads": 16,
        "num_hidden_layers": 27, "num_image_tokens": 256, "patch_size": 14, "projection_dim": 2048,
        "vision_use_head": False,
    }  # fmt: skip
    more = {"image_token_index": 257152, "eos_token_id": 1, "bos_token_id": 2, "pad_token_id": 0, "hidden_size": 2048}
    config = read(tmp_path, silent(PALIGEMMA, text, tower, **more))
    assert (config.vocabulary, config.heads, config.kv_heads, config.head_dim) == (257216, 8, 1, 256)
    assert (config.context, config.tied_embeddings, config.eos_token_ids) == (8192, True, (1,))
    assert (config.first_position, config.architecture) == (1, PALIGEMMA)
    assert config.vision is not None
    assert (config.vision.tower.patches, config.vision.image_token_id) == (256, 257152)
    assert config.vision.prefix_lm


@pytest.mark.parametrize(("top", "text", "tied"), [
    (None, None, False), (True, None, True), (None, True, True), (False, True, True), (False, False, False),
])  # fmt: skip
def test_llava_is_tied_if_either_says_so(top: bool | None, text: bool | None, tied: bool, tmp_path: Path) -> None:
    values = silent(LLAVA, {"tie_word_embeddings": text}, {}, tie_word_embeddings=top)
    assert read(tmp_path, values).tied_embeddings is tied


def test_the_whole_config_goes_before_the_texts(tmp_path: Path) -> None:
    text = {"dtype": "float32", "eos_token_id": 7}
    assert read(tmp_path, silent(LLAVA, text, {})).eos_token_ids == (7,)
    config = read(tmp_path, silent(LLAVA, text, {}, dtype="bfloat16", eos_token_id=[3, 0]))
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (3, 0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (silent(LLAVA, {"model_type": "gpt2"}, {}), "text model that is none of"),
        (silent(PALIGEMMA, {"model_type": "llama"}, {}), "text model that is none of"),
        (silent(LLAVA, {}, {"model_type": "pixtral"}), "vision encoder that is none of"),
        (silent(LLAVA, {}, {"num_attention_heads": 7}), "cannot have 7 heads"),
        (silent(LLAVA, {}, {"num_channels": 1}), "'num_channels'"),
        (silent(LLAVA, {}, {"image_size": 8}), "hold 0 patches"),
        (silent(LLAVA, {}, {"image_size": 8192, "patch_size": 8}), "must hold 1 to 128"),
        (silent(LLAVA, {}, {}, image_token_index=-1), "'image_token_index'"),
        (silent(LLAVA, {"hidden_size": 0}, {}), "'hidden_size'"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, values)
