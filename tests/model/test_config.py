"""config.json, generation_config.json and tokenizer.json: what they say, and how they are refused when wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.architectures.registry import ARCHITECTURES, load_model
from model.config import ModelConfig, read_config, read_defaults
from model.errors import CheckpointError
from model.families import FAMILIES
from model.fields import Fields, read_json
from model.footprint import weight_bytes
from model.inputs.tokenizer_files import load_tokenizer
from model.rope import frequencies, read_rope
from scheduler.limits import ModelDefaults
from tests.support.checkpoints import byte_tokenizer

CLASSIC = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
NEW = {key: value for key, value in CLASSIC.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")} | {
    "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}


def write(directory: Path, values: object, name: str = "config.json") -> Path:
    (directory / name).write_text(json.dumps(values))
    return directory


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in CLASSIC.items() if key not in keys}


class AnyCheckpoint:
    """Has every tensor, but no numbers."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, **_: bool) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def __contains__(self, name: str) -> bool:
        return False

    def ignore(self, pattern: str) -> None:
        """Nothing is left over."""

    def finish(self) -> None:
        """Nothing is left over."""


def read_model(directory: Path) -> ModelConfig:
    """Reads all that an architecture wants to know."""
    config = read_config(directory)
    load_model(config, AnyCheckpoint(), torch.float32, torch.device("meta"))  # type: ignore[arg-type]
    return config


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_model(directory)
    assert str(directory / "config.json") in str(caught.value)
    return str(caught.value)


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


@pytest.mark.parametrize("values", [CLASSIC, NEW], ids=["classic", "transformers 5"])
def test_theta_stands_in_either_style(tmp_path: Path, values: dict[str, Any]) -> None:
    found, scale = read_rope(Fields(tmp_path, values), 128)
    assert torch.equal(found, frequencies(128, 500000.0))
    assert scale == 1.0


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


COUNTS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
]  # fmt: skip


@pytest.mark.parametrize("value", [2**31 - 1, 2**31, 2**63, 2**64, 10**400, -(2**63)])
@pytest.mark.parametrize("key", COUNTS)
def test_counts_are_bounded_before_anything_is_made_of_them(tmp_path: Path, key: str, value: int) -> None:
    """A loop over 2^31 heads or layers would not end; what does not fit 64 bits raised OverflowError."""
    message = refusal(write(tmp_path, CLASSIC | {"num_key_value_heads": 1} | {key: value}))
    assert key in message
    assert len(message) < 500


@pytest.mark.parametrize("value", [10**400, -(10**400), 1e-320, 1e300, -1e300])
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps", "partial_rotary_factor"])
def test_numbers_whose_quotients_are_none(tmp_path: Path, key: str, value: float) -> None:
    assert key in refusal(write(tmp_path, CLASSIC | {key: value}))


@pytest.mark.parametrize(
    "rope",
    [
        {"type": "yarn", "factor": 1e-320},
        {"type": "yarn", "factor": 4.0, "beta_fast": 1e-320},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**400},
        {"type": "linear", "factor": 10**400},
        {"type": "longrope", "short_factor": [10**400] * 64},
        {"type": "longrope", "short_factor": [float("inf")] * 64},
        {"type": "longrope", "short_factor": [True] * 64},
        {"type": "longrope", "short_factor": [[1.0]] * 64},
    ],
)
def test_extreme_ropes(tmp_path: Path, rope: dict[str, Any]) -> None:
    refusal(write(tmp_path, CLASSIC | {"rope_scaling": rope}))


def test_longrope_that_was_trained_for_one_token(tmp_path: Path) -> None:
    """The logarithm of 1 divides nothing."""
    rope = {"type": "longrope", "short_factor": [1.0] * 64, "original_max_position_embeddings": 1}
    assert read_model(write(tmp_path, CLASSIC | {"rope_scaling": rope})).context == 1


def test_tables_of_positions_have_a_bound(tmp_path: Path) -> None:
    """Each number is allowed, their product would take 12 GiB."""
    changes = {"max_position_embeddings": 2**22, "head_dim": 4096, "num_attention_heads": 1, "num_key_value_heads": 1}
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        read_model(write(tmp_path, CLASSIC | changes))


def test_models_of_too_many_parts_are_refused_before_their_weights_are_looked_at(tmp_path: Path) -> None:
    """Each number is allowed; a million experts took minutes and gigabytes, without a tensor in any file."""
    changes = {"architectures": ["MixtralForCausalLM"], "num_hidden_layers": 1024, "num_local_experts": 1024}
    config = read_config(write(tmp_path, CLASSIC | changes | {"hidden_size": 64, "intermediate_size": 64}))
    with pytest.raises(CheckpointError, match="1048576 of them, may be 32768"):
        weight_bytes(config, "float32")


def test_models_of_more_tensors_than_a_checkpoint_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.footprint.MOST_TENSORS", 21)
    config = read_config(
        write(tmp_path, CLASSIC | {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8})
    )
    assert weight_bytes(config, "float32") > 0
    with pytest.raises(CheckpointError, match="more than 21 tensors"):
        weight_bytes(replace(config, layers=3), "float32")


@pytest.mark.parametrize("layers", [["0"], [[]], 7, [-1], [10**400]])
def test_layers_without_experts(tmp_path: Path, layers: object) -> None:
    changes = {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": layers, "num_experts": 8}
    assert "mlp_only_layers" in refusal(write(tmp_path, CLASSIC | changes))


@pytest.mark.parametrize("key", ["dtype", "rope_scaling", "layer_types", "hidden_act", "eos_token_id"])
@pytest.mark.parametrize("value", ["x" * 3_000_000, ["x" * 1_000_000] * 3, {"x" * 3_000_000: [["y"]]}])
def test_long_values_are_cut(tmp_path: Path, key: str, value: object) -> None:
    changes = {"architectures": ["MinistralForCausalLM"], key: value, "rope_parameters": {"rope_type": value}}
    message = refusal(write(tmp_path, CLASSIC | changes))
    assert len(message) < 1000


def test_counts_may_have_just_their_bound(tmp_path: Path) -> None:
    fields = Fields(tmp_path, {"num_hidden_layers": 1024, "ffn_dim": 2**20})
    assert (fields.positive("num_hidden_layers"), fields.positive("ffn_dim")) == (1024, 2**20)
    for key in fields.values:
        with pytest.raises(CheckpointError, match="may be at most"):
            fields.having({key: fields.positive(key) + 1}).positive(key)


def test_escaped_messages_have_a_bound() -> None:
    assert len(str(CheckpointError("\x1b" * 2000))) == 2000


def test_too_many_end_tokens(tmp_path: Path) -> None:
    assert "'eos_token_id' has 257 ids, may have 256" in refusal(write(tmp_path, CLASSIC | {"eos_token_id": [1] * 257}))


def test_end_token_that_is_no_token(tmp_path: Path) -> None:
    """Ids that do not fit an int32 would raise in the scheduler, which ends the engine at the first request."""
    assert "eos_token_id" in refusal(write(tmp_path, CLASSIC | {"eos_token_id": 2**31}))


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),  # keys would have to turn again
        ({"type": "linear"}, "'factor' is missing"),
        ({"type": "linear", "factor": 0}, "'factor' is 0"),
        (LLAMA3, "'original_max_position_embeddings' is missing"),
        (LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 4.0}, "must be below 'high_freq_factor'"),
        ({"type": "yarn", "factor": "4"}, "'factor' is '4'"),
        ({"type": "yarn", "factor": 4.0, "rope_theta": 1.0}, "must be above 1"),
        ({"type": "longrope", "short_factor": [1.0]}, "must be 64 numbers"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.01}, "1 of the 128 elements"),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rope_that_says_nonsense(tmp_path: Path, rope: dict[str, Any], why: str, key: str) -> None:
    assert why in refusal(write(tmp_path, CLASSIC | {key: rope}))


@pytest.mark.parametrize(
    ("theta", "trained", "betas"),
    [
        (10.0, 4096, {"beta_fast": 500.0}),  # slow turns end behind the last pair
        (10.0, 4096, {"beta_fast": 500.0, "truncate": False}),
        (10000.0, 64, {}),  # fast turns begin before the first one
        (10000.0, 4096, {"beta_fast": 32.0, "beta_slow": 1.0}),
    ],
)
def test_yarn_at_the_ends_of_its_range(tmp_path: Path, theta: float, trained: int, betas: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": trained, "rope_theta": theta}
    rope = yarn | betas
    reference = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=4 * trained, rope_parameters=dict(rope)
    )
    expected, expected_scale = ROPE_INIT_FUNCTIONS["yarn"](reference, torch.device("cpu"))
    fields = Fields(tmp_path, {"max_position_embeddings": 4 * trained, "rope_parameters": rope})
    found, scale = read_rope(fields, 8)
    torch.testing.assert_close(found, expected)
    assert scale == pytest.approx(expected_scale)


def test_scaled_rope_behind_a_default_one(tmp_path: Path) -> None:
    """Where a config holds both, transformers takes rope_scaling; serving it unscaled would be silently wrong."""
    both = NEW | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert torch.equal(read_rope(Fields(tmp_path, both), 128)[0], frequencies(128, 10000.0) / 2)


def test_longrope_ends_where_keys_would_have_to_turn_again(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    changes = {"original_max_position_embeddings": 4096, "rope_scaling": rope}
    assert read_model(write(tmp_path, CLASSIC | changes)).context == 4096


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        ("quantization_config", {}),
    ],
)
def test_unsupported(tmp_path: Path, key: str, value: object) -> None:
    assert key in refusal(write(tmp_path, CLASSIC | {key: value}))


def test_code_that_a_checkpoint_brings_is_not_asked_for(tmp_path: Path) -> None:
    """Many that need none name some."""
    read_model(write(tmp_path, CLASSIC | {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}))


@pytest.mark.parametrize(
    ("name", "own", "near"),
    [
        ("BloomForCausalLM", {"n_embed": 64, "n_layer": 2, "num_attention_heads": 4}, "ForCausalLM"),
        ("MambaForCausalLM", {"d_model": 64, "n_layer": 2, "state_size": 16}, "GemmaForCausalLM"),
        ("Gemma3ForConditionalGeneration", {"text_config": {}}, "PaliGemmaForConditionalGeneration"),
        ("LLaMAForCausalLM", {}, "LlamaForCausalLM"),
        ("T5ForConditionalGeneration", {"d_model": 64}, "LlavaForConditionalGeneration"),
        ("x" * 3_000_000, {}, "ForCausalLM"),
        ("\x1b[2J\ud800", {}, "ForCausalLM"),
        ("nanoVLM", {}, "ForCausalLM"),  # which no config.json names
    ],
    ids=["bloom", "mamba", "gemma 3 with images", "case", "t5", "3 MB", "escapes", "nanoVLM"],
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
    refusal(tmp_path)


def test_json_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_json(tmp_path / "config.json")


# generation_config.json


def defaults_of(directory: Path, generation: object, config: dict[str, Any] = CLASSIC) -> ModelDefaults:
    write(directory, config)
    if generation is not None:
        write(directory, generation, "generation_config.json")
    return read_defaults(directory, read_config(directory))


def test_no_generation_config(tmp_path: Path) -> None:
    assert defaults_of(tmp_path, None) == ModelDefaults(eos_token_ids=(128001,))


def test_generation_config(tmp_path: Path) -> None:
    found = defaults_of(
        tmp_path,
        {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "eos_token_id": [5, 6]},
    )
    assert found == ModelDefaults(0.6, 0.9, 40, 0.05, eos_token_ids=(5, 6))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, ModelDefaults(eos_token_ids=(128001,))),
        ({"eos_token_id": 7}, ModelDefaults(eos_token_ids=(7,))),
        ({"eos_token_id": None}, ModelDefaults(eos_token_ids=(128001,))),
        ({"do_sample": False, "temperature": 0.6}, ModelDefaults(temperature=0.0, eos_token_ids=(128001,))),
        ({"temperature": None, "top_k": None}, ModelDefaults(eos_token_ids=(128001,))),
        ({"temperature": 1}, ModelDefaults(temperature=1.0, eos_token_ids=(128001,))),
        ({"transformers_version": "5.0", "pad_token_id": 3}, ModelDefaults(eos_token_ids=(128001,))),
    ],
)
def test_generation_defaults(tmp_path: Path, generation: dict[str, Any], expected: ModelDefaults) -> None:
    assert defaults_of(tmp_path, generation) == expected


@pytest.mark.parametrize(
    ("generation", "key"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"do_sample": "no"}, "do_sample"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 10**400}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"min_p": -(10**400)}, "min_p"),
        ({"top_k": 2**64}, "top_k"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
        ({"eos_token_id": 2**64}, "eos_token_id"),
        ({"eos_token_id": "7"}, "eos_token_id"),
        ([], "JSON"),
    ],
)
def test_wrong_generation_config(tmp_path: Path, generation: object, key: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        defaults_of(tmp_path, generation)
    assert str(tmp_path / "generation_config.json") in str(caught.value)
    assert key in str(caught.value)


# tokenizer.json


def test_missing_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "Nothing"}}'])
def test_broken_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_tokenizer(tmp_path: Path) -> None:
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the cat sat, né? 🐈", add_special_tokens=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the cat sat, né? 🐈"
    assert tokenizer.decode([0, ids[0]], True) == tokenizer.decode([ids[0]], True)
    assert tokenizer.decode([0], False) == "<|end|>"
    assert tokenizer.decode([10**6], False) == ""
