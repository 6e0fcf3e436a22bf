"""gpt-oss: its published config.json, what a silent one means, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.architectures.gpt_oss import THETA, rope_fields
from model.config import read_config
from model.fields import Fields
from model.footprint import weight_bytes
from model.rope import read_rope
from tests.model.config_files import refusal, write

PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""Of the model of 20 billion parameters."""


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in PUBLISHED.items() if key not in keys}


def test_the_published_model(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, PUBLISHED))
    experts = 24 * 32 * (2 * 2880 + 2880) * (2880 // 32) * 17  # blocks of 16 bytes and a scale
    others = 2 * 201088 * 2880 + 24 * (2 * 2880 * 4096 + 2 * 2880 * 512 + 4096 + 1024 + 2880 + 2 * 2880)
    others += 2880 + 24 * (32 * 2880 + 32 + 32 * (2 * 2880 + 2880))
    sinks = 24 * 64 * 4
    found = weight_bytes(config, "bfloat16")
    # Scales of experts are held as bfloat16, which they fit in exactly.
    assert found - 2 * others - sinks == experts + 24 * 32 * 3 * 2880 * (2880 // 32)
    assert [group.window for group in config.kv_layout(16, "bfloat16").groups] == [None, 128]


@pytest.mark.parametrize("silent", [("rope_scaling",), ("rope_scaling", "rope_theta")])
def test_without_rope_scaling_it_is_the_published_one(tmp_path: Path, silent: tuple[str, ...]) -> None:
    found, scale = read_rope(rope_fields(Fields(tmp_path, without(*silent))), 64, THETA)
    expected, warmth = ROPE_INIT_FUNCTIONS["yarn"](GptOssConfig(), "cpu")
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    assert scale == pytest.approx(warmth)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"swiglu_alpha": 1.5}, "'swiglu_alpha' is 1.5, must be 1.702"),
        ({"swiglu_limit": 0.0}, "'swiglu_limit' is 0.0"),
        ({"num_experts_per_tok": 33}, "'num_experts_per_tok' is 33, there are 32 experts"),
        ({"num_local_experts": 2000}, "'num_local_experts' is 2000, may be at most 1024"),
        ({"sliding_window": 0}, "'sliding_window' is 0"),
        ({"layer_types": ["full_attention"]}, "must name 'sliding_attention' or 'full_attention' for each of 24"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    assert why in refusal(write(tmp_path, without("quantization_config") | changes))
