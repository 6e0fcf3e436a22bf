"""Bounds of config.json: no number or text in it takes memory or time without end."""

from dataclasses import replace
from pathlib import Path

import pytest

from model.config import read_config
from model.errors import CheckpointError
from model.fields import Fields
from model.footprint import weight_bytes
from tests.model.config_files import CLASSIC, read_model, refusal, write

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
