"""A directory's identity differs where its weights or its configuration do, and only there."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from model.identity import checkpoint_identity
from model.loading import load
from model.settings import ModelSettings
from scheduler.settings import RequestLimits
from tests.support.checkpoints import write_llama


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def change_weights(directory: Path, change) -> None:  # type: ignore[no-untyped-def]
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})


def test_a_copy_is_the_same_model(tiny: Path, copy: Path) -> None:
    assert len(checkpoint_identity(tiny)) == 32
    assert checkpoint_identity(copy) == checkpoint_identity(tiny)


def test_what_is_no_part_of_the_numbers_makes_no_other_model(tiny: Path, copy: Path) -> None:
    (copy / "README.md").write_text("about it")
    (copy / "tokenizer.json").unlink()
    assert checkpoint_identity(copy) == checkpoint_identity(tiny)


def test_a_tensor_that_was_trained_further_makes_another_model(tiny: Path, copy: Path) -> None:
    def train(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"] += 1e-3

    change_weights(copy, train)
    assert checkpoint_identity(copy) != checkpoint_identity(tiny)


def test_a_tensor_under_another_name_makes_another_model(tiny: Path, copy: Path) -> None:
    def swap(tensors: dict[str, np.ndarray]) -> None:
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
        tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]

    change_weights(copy, swap)
    assert checkpoint_identity(copy) != checkpoint_identity(tiny)


def test_another_configuration_makes_another_model(tiny: Path, copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["rms_norm_eps"] = 1e-4
    (copy / "config.json").write_text(json.dumps(config))
    assert checkpoint_identity(copy) != checkpoint_identity(tiny)


def test_a_directory_that_lacks_a_shard_is_another_model(tmp_path: Path) -> None:
    directory = write_llama(tmp_path, shards=True)
    before = checkpoint_identity(directory)
    last = max(directory.glob("model-*.safetensors"))
    last.rename(directory / "other.safetensors")
    assert checkpoint_identity(directory) != before


SETTINGS = {
    "dtype": {"dtype": "bfloat16"},
    "page size": {"page_size": 8},
    "KV dtype": {"kv_cache_dtype": "bfloat16"},
    "int8": {"kv_cache_dtype": "int8"},
    "fp8": {"kv_cache_dtype": "fp8"},
    "int8 weights": {"quantization": "int8"},
}


def test_numbers_of_other_settings_are_others(tiny: Path) -> None:
    """Block hashes depend on the numerics: two engines with the same may share pages."""

    def numerics(**values: object) -> bytes:
        settings = ModelSettings(**({"model": str(tiny), "kv_cache_memory": 2**20} | values))
        return load(tiny, settings, rows=2, ahead=512, request_limits=RequestLimits()).numerics

    plain = numerics()
    assert numerics(kv_cache_memory=2**21) == plain
    assert len({plain, *(numerics(**values) for values in SETTINGS.values())}) == 1 + len(SETTINGS)
