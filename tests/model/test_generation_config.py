"""generation_config.json: the defaults that it sets, and how it is refused when wrong."""

from pathlib import Path
from typing import Any

import pytest

from model.config import read_config, read_defaults
from model.errors import CheckpointError
from scheduler.limits import ModelDefaults
from tests.model.config_files import CLASSIC, write


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
        ({"top_k": -1}, ModelDefaults(top_k=0, eos_token_ids=(128001,))),  # as vLLM writes it
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
        ({"top_k": -2}, "top_k"),
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
