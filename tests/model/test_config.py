"""config.json: the values that are read from it, and how it is refused when wrong."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model.architectures.registry import ARCHITECTURES
from model.config import ModelConfig, read_config
from model.errors import CheckpointError
from model.families import FAMILIES
from model.fields import Fields, read_json
from model.rope import frequencies, read_rope
from tests.model.config_files import CLASSIC, NEW, read_model, refusal, without, write

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
"""As instructions of published models have it, beside a max_position_embeddings that stays."""


@pytest.mark.parametrize("values", [CLASSIC, NEW], ids=["classic", "transformers 5"])
def test_both_styles_say_the_same(tmp_path: Path, values: dict[str, Any]) -> None:
    assert read_config(write(tmp_path, values)) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocabulary=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        context=8192,
        windows=(None,) * 32,
        scale=128**-0.5,
        soft_cap=None,
        tied_embeddings=False,
        dtype="bfloat16",
        eos_token_ids=(128001,),
        fields=Fields(tmp_path, {}),
    )


def test_what_is_left_out_has_the_defaults_of_transformers(tmp_path: Path) -> None:
    silent = without(
        "num_key_value_heads", "rope_theta", "rope_scaling", "rms_norm_eps", "hidden_act", "attention_bias",
        "tie_word_embeddings", "torch_dtype", "eos_token_id",
    )  # fmt: skip
    config = read_config(write(tmp_path, silent))
    assert (config.kv_heads, config.dtype, config.tied_embeddings) == (32, "float32", False)
    assert torch.equal(read_rope(config.fields, 128)[0], frequencies(128, 10000.0))
    read_model(tmp_path)
    assert config.eos_token_ids == ()


def test_null_is_left_out(tmp_path: Path) -> None:
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_scaling", "torch_dtype", "eos_token_id"))
    config = read_config(write(tmp_path, CLASSIC | nulls))
    assert (config.kv_heads, config.head_dim, config.dtype, config.eos_token_ids) == (32, 128, "float32", ())


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"head_dim": 64}, "head_dim", 64),
        ({"eos_token_id": [128001, 128009]}, "eos_token_ids", (128001, 128009)),
        ({"eos_token_id": 0}, "eos_token_ids", (0,)),
        ({"torch_dtype": "float16"}, "dtype", "float16"),
        ({"dtype": "float32"}, "dtype", "float32"),  # the newer key wins
        ({"tie_word_embeddings": True}, "tied_embeddings", True),
        ({"rope_scaling": YARN}, "context", 4 * 32768),
        ({"rope_parameters": YARN | {"rope_theta": 1e6}}, "context", 4 * 32768),
        ({"rope_scaling": YARN, "max_position_embeddings": 2**20}, "context", 2**20),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "context", 2 * 8192),
    ],
)
def test_values(tmp_path: Path, changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read_config(write(tmp_path, CLASSIC | changes)), field) == value


REQUIRED = [
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(tmp_path: Path, key: str) -> None:
    message = refusal(write(tmp_path, without(key)))
    assert repr(key) in message
    assert "missing" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "128256"),
        ("vocab_size", 0),
        ("vocab_size", 1.5),
        ("vocab_size", True),
        ("hidden_size", -1),
        ("num_hidden_layers", []),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 0),
        ("head_dim", 0),
        ("head_dim", "128"),
        ("max_position_embeddings", 8192.0),
        ("rope_theta", "500000"),
        ("rope_theta", True),
        ("rms_norm_eps", []),
        ("attention_bias", 1),
        ("mlp_bias", "yes"),
        ("tie_word_embeddings", 0),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", []),
        ("architectures", ["LlamaForCausalLM", "Other"]),
        ("architectures", [7]),
        ("architectures", [None]),
        ("architectures", {"LlamaForCausalLM": 1}),
        ("architectures", [["LlamaForCausalLM"]]),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, "2"]),
        ("eos_token_id", True),
        ("rope_scaling", "linear"),
        ("hidden_act", "swiglu"),
        ("hidden_act", 3),
    ],
)
def test_wrong_value(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(write(tmp_path, CLASSIC | {key: value}))
    assert key in message
    assert repr(value) in message


@pytest.mark.parametrize("value", ["float64", "int8", "float8_e4m3fn", "torch.bfloat16", ["bfloat16"], 16])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_bad_dtype(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(write(tmp_path, without("torch_dtype") | {key: value}))
    assert "dtype" in message
    assert "bfloat16" in message, "what is supported"


def test_heads_that_cannot_be_shared(tmp_path: Path) -> None:
    message = refusal(write(tmp_path, CLASSIC | {"num_key_value_heads": 5}))
    assert "32" in message
    assert "5" in message


def test_odd_head_dim(tmp_path: Path) -> None:
    """Rotary positions turn pairs; an odd head_dim would make every request fault instead of the start."""
    assert "head_dim" in refusal(write(tmp_path, CLASSIC | {"head_dim": 127}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", 0.0),
        ("rope_theta", -10000.0),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rms_norm_eps", -1e-5),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_numbers_that_mean_nothing(tmp_path: Path, key: str, value: float) -> None:
    """Else logits are NaN or wrong, and the start says nothing of it. json.loads takes NaN and Infinity."""
    assert key in refusal(write(tmp_path, CLASSIC | {key: value}))


@pytest.mark.parametrize("layers", [["0"], [[]], 7, [-1], [10**400]])
def test_layers_without_experts(tmp_path: Path, layers: object) -> None:
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": layers, "num_experts": 8}
    assert "mlp_only_layers" in refusal(write(tmp_path, CLASSIC | changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "exl2", "bits": 4}),
        ("quantization_config", {}),
    ],
)
def test_unsupported(tmp_path: Path, key: str, value: object) -> None:
    assert key in refusal(write(tmp_path, CLASSIC | {key: value}))


def test_code_that_a_checkpoint_brings_is_not_asked_for(tmp_path: Path) -> None:
    """Many that need none name some."""
    plain = read_model(write(tmp_path, CLASSIC))
    assert read_model(write(tmp_path, CLASSIC | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}})) == plain


@pytest.mark.parametrize(
    ("name", "own", "near"),
    [
        ("CTRLLMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "LMHeadModel"),
        ("MambaForCausalLM", {"d_model": 64, "n_layer": 2, "state_size": 16}, "Mamba2ForCausalLM"),
        ("Gemma3ForConditionalGeneration", {"text_config": {}}, "PaliGemmaForConditionalGeneration"),
        ("LLaMAForCausalLM", {}, "LlamaForCausalLM"),
        ("T5ForConditionalGeneration", {"d_model": 64}, "LlavaForConditionalGeneration"),
        ("x" * 3_000_000, {}, "ForCausalLM"),
        ("\x1b[2J\ud800", {}, "ForCausalLM"),
        ("nanoVLM", {}, "ForCausalLM"),  # which no config.json names
    ],
    ids=["ctrl", "mamba", "gemma 3 with images", "case", "t5", "3 MB", "escapes", "nanoVLM"],
)
def test_architecture_that_is_not_served(tmp_path: Path, name: str, own: dict[str, Any], near: str) -> None:
    """It is named before a field is missed that it calls otherwise, with the nearest ones that are served."""
    message = refusal(write(tmp_path, {"architectures": [name], "quantization_config": {}} | own))
    assert "which is not served" in message
    assert near in message
    assert len(message) < 1000
    assert message.isprintable()


def test_architectures_are_known_before_torch_is() -> None:
    assert FAMILIES.keys() == ARCHITECTURES.keys()


def test_missing_config(tmp_path: Path) -> None:
    assert "missing" in refusal(tmp_path)


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'"text"', b"null", b"\xff\xfe", b'{"a": 1,}'])
def test_broken_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert "JSON" in refusal(tmp_path)


def test_config_that_is_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    assert "config.json" in refusal(tmp_path)


def test_json_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")
