"""A config.json as checkpoints have it, and how a changed one is read or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.architectures.registry import load_model
from model.config import ModelConfig, read_config
from model.errors import CheckpointError

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
