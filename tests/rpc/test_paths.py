"""The directory that --model leads to."""

from pathlib import Path

import huggingface_hub
import pytest

from model.errors import CheckpointError
from rpc.paths import FILES, demo_directory, model_directory, model_name


def test_directories_and_the_demo_model(tmp_path: Path) -> None:
    assert model_directory(str(tmp_path)) == tmp_path
    assert model_directory("demo") == demo_directory()
    assert (demo_directory() / "model.safetensors").stat().st_size < 16 * 2**20
    assert model_name(str(tmp_path / "llama-3"), tmp_path) == "llama-3"
    assert model_name("demo", demo_directory()) == "quire-demo"


@pytest.mark.parametrize("name", ["/no/where", "./nowhere", "../nowhere", "~/nowhere-at-all", "a/b/c"])
def test_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(CheckpointError, match="no such directory"):
        model_directory(name)


def test_file_in_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="no such directory"):
        model_directory(str(tmp_path / "model.safetensors"))


def test_hub_name_downloads_what_is_needed_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **k: asked.append((name, k)) or str(tmp_path)
    )
    assert model_directory("meta-llama/Llama-3.2-1B") == tmp_path
    assert asked == [("meta-llama/Llama-3.2-1B", {"allow_patterns": FILES})]
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in FILES)


def test_hub_that_does_not_answer_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"--model some/model.*hub did not give it: ConnectionError: no network"):
        model_directory("some/model")
