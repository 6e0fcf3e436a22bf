"""generation_config.json: the defaults that it sets, and how it is refused when wrong."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.config import read_config
from model.errors import CheckpointError
from model.generation_config import read_defaults
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
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 10**400}, "top_p"),
        ({"top_p": float("inf")}, "top_p"),
        ({"min_p": -(10**400)}, "min_p"),
        ({"top_k": 2**64}, "top_k"),
        ({"repetition_penalty": 10**400}, "repetition_penalty"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty"),
    ],
)
def test_a_default_that_no_request_could_ask_for_is_left_out(
    tmp_path: Path, generation: dict[str, Any], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = defaults_of(tmp_path, {"min_p": 0.25, "top_p": 0.5} | generation)
    expected = ModelDefaults(min_p=0.25, top_p=0.5, eos_token_ids=(128001,))
    assert found == replace(expected, **{key: getattr(ModelDefaults(), key)})
    (line,) = caplog.messages
    assert str(tmp_path / "generation_config.json") in line
    assert key in line


def test_a_do_sample_of_another_type_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert defaults_of(tmp_path, {"do_sample": "no", "top_k": 3}).top_k == 3
    assert "do_sample" in caplog.text


END = "<|im_end|>"
LISTED = {"128002": {"content": "<other>"}, "128009": {"content": END, "special": True}}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": LISTED}},
        {"tokenizer_config.json": {"eos_token": {"content": END}, "added_tokens_decoder": LISTED}},
        {
            "tokenizer_config.json": {"eos_token": END},
            "tokenizer.json": {"added_tokens": [{"id": 3, "content": "<other>"}, {"id": 128009, "content": END}]},
        },
        {"special_tokens_map.json": {"eos_token": END}, "added_tokens.json": {"<other>": 3, END: 128009}},
    ],
    ids=["listed", "as an object", "tokenizer.json", "added_tokens.json"],
)
def test_the_tokenizers_end_token_ends_an_output_too(tmp_path: Path, files: dict[str, Any]) -> None:
    for name, values in files.items():
        write(tmp_path, values, name)
    assert defaults_of(tmp_path, None).eos_token_ids == (128001, 128009)
    assert defaults_of(tmp_path, {"eos_token_id": [5, 128009]}).eos_token_ids == (5, 128009)


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": END},
        {"eos_token": None},
        {"eos_token": 7},
        {"eos_token": END, "added_tokens_decoder": []},
        {"eos_token": END, "added_tokens_decoder": {"x": {"content": END}}},
        {"eos_token": END, "added_tokens_decoder": {"3": END}},
        {"eos_token": END, "added_tokens_decoder": {"9" * 5000: {"content": END}}},
        {"eos_token": END, "added_tokens_decoder": {str(10**9): {"content": END}}},
    ],
)
def test_an_end_token_without_an_id_of_the_model_is_none(tmp_path: Path, config: dict[str, Any]) -> None:
    write(tmp_path, config, "tokenizer_config.json")
    write(tmp_path, {"added_tokens": 5}, "tokenizer.json")
    (tmp_path / "added_tokens.json").write_text("{")
    assert defaults_of(tmp_path, None).eos_token_ids == (128001,)


@pytest.mark.parametrize(
    ("generation", "key"),
    [
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
