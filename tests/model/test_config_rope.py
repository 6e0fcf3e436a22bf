"""Rope in config.json: transformers' scalings, and how those that say nonsense are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.fields import Fields
from model.rope import frequencies, read_rope
from tests.model.config_files import CLASSIC, NEW, read_model, refusal, write


@pytest.mark.parametrize("values", [CLASSIC, NEW], ids=["classic", "transformers 5"])
def test_theta_stands_in_either_style(tmp_path: Path, values: dict[str, Any]) -> None:
    found, scale = read_rope(Fields(tmp_path, values), 128)
    assert torch.equal(found, frequencies(128, 500000.0))
    assert scale == 1.0


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
    assert "rope" in refusal(write(tmp_path, CLASSIC | {"rope_scaling": rope}))


def test_longrope_that_was_trained_for_one_token(tmp_path: Path) -> None:
    """The logarithm of 1 divides nothing."""
    rope = {"type": "longrope", "short_factor": [1.0] * 64, "original_max_position_embeddings": 1}
    assert read_model(write(tmp_path, CLASSIC | {"rope_scaling": rope})).context == 1


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "why"),
    [
        ({"type": "stretched", "factor": 2.0}, "'stretched' is not supported"),
        ({"type": "dynamic"}, "'factor' is missing"),
        ({"type": "linear"}, "'factor' is missing"),
        ({"type": "linear", "factor": 0}, "'factor' is 0"),
        (LLAMA3, "'original_max_position_embeddings' is missing"),
        (
            LLAMA3 | {"original_max_position_embeddings": 64, "low_freq_factor": 5.0},
            "must not be above 'high_freq_factor'",
        ),
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
    """Transformers takes rope_scaling of a config with both; serving it unscaled would be silently wrong."""
    both = NEW | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert torch.equal(read_rope(Fields(tmp_path, both), 128)[0], frequencies(128, 10000.0) / 2)


def test_longrope_ends_where_keys_would_have_to_turn_again(tmp_path: Path) -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    changes = {"original_max_position_embeddings": 4096, "rope_scaling": rope}
    assert read_model(write(tmp_path, CLASSIC | changes)).context == 4096
