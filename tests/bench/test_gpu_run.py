"""The GPU's bench from its first line to its last, on the CPU; and what has to be installed for it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench import shapes
from bench.gpu import remove, run
from bench.on_gpu import models
from bench.on_gpu.engine import TimedEngine
from bench.on_gpu.loads import EngineRequest
from bench.on_gpu.models import Costs, write_checkpoint
from bench.on_gpu.sizes import Mixed, RunSizes
from model.config import read_config
from model.loading import load
from model.settings import ModelSettings
from scheduler.settings import RequestLimits

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = shapes.MODELS["llama-135m"] | {
    "vocab_size": 500, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip
SIZES = RunSizes(
    copied=2**16, products=((32, 32, 32),), models=("tiny",), batches=(1, 3), context=40, steps=5, prefills=(24,),
    step_tokens=64, mixed=Mixed(5, 2, (4, 8), (2, 4)), peers=Mixed(3, 3, (4, 8), (2, 4)), rounds=2,
)  # fmt: skip
INSTALLED = "torch,triton,numpy,safetensors,transformers,grpcio,protobuf,prometheus-client"
"""What a machine for GPUs is sure to have."""
CHECKSUMS = "xxhash"
"""What pages in host memory have checksums by."""
NEEDED_BY_MODELS = f"psutil,{CHECKSUMS}"
"""What an engine needs beside; on the CPU it asks how much memory is free."""


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "tiny", TINY)


@pytest.fixture
def places() -> Iterator[list[Path]]:
    """Returns the directories that a run has written models to."""
    noted: list[Path] = []
    yield noted
    remove(noted)
    assert not any(place.exists() for place in noted)


@pytest.mark.usefixtures("tiny")
def test_a_model_is_measured(tmp_path: Path, places: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert run(CPU, SIZES, ["ceilings", "engine"], 100.0, path, places) == 0
    told, found = capsys.readouterr().out, json.loads(path.read_text())
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    assert set(tables) == {
        "ceilings", "launches", "engine, decode", "engine, prefill of one prompt", "engine, mixed load",
    }  # fmt: skip
    assert all(f"### {title}\n" in told for title in [*tables, "goals"])
    decodes = tables["engine, decode"]
    assert [row["model, batch"] for row in decodes] == ["tiny, 1", "tiny, 3"]
    ceilings = {row["of"]: row["rate"] for row in tables["ceilings"]}
    costs, reading = Costs.of(TINY), max(ceilings["copy, read + written"], ceilings["read"]) * 1e9
    for row, batch in zip(decodes, (1, 3), strict=True):
        assert 40 < row["context"] <= 40 + SIZES.steps + 8
        floor = max(
            (costs.weights + batch * row["context"] * costs.token) / reading,
            (batch * (costs.layers + costs.head) + batch * row["context"] * costs.attention)
            / (ceilings["bfloat16 product"] * 1e12),
        )
        assert row["floor ms"] == pytest.approx(1e3 * floor)
        assert row["of the floor"] == pytest.approx(row["floor ms"] / row["ms a step"])
        assert row["tokens/s"] == pytest.approx(1e3 * batch / row["ms a step"])
    assert [row["model"] for row in tables["engine, mixed load"]] == ["tiny"]
    (place,) = places
    assert (place / "config.json").exists(), "the caller removes it"


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_beside_transformers(tmp_path: Path, places: list[Path]) -> None:
    path = tmp_path / "found.json"
    assert run(CPU, SIZES, ["peers"], 200.0, path, places) == 0
    (table,) = json.loads(path.read_text())["tables"]
    (row,) = table["rows"]
    assert row["times"] == pytest.approx(row["Quire tokens/s"] / row["transformers tokens/s"])
    assert row["first tokens alike"] == 1.0, "they compute different models"


@pytest.mark.usefixtures("tiny")
def test_without_time_all_is_named(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    assert run(CPU, SIZES, ["ceilings", "engine"], 22.0, path, []) == 0
    tables = {table["title"]: table["rows"] for table in json.loads(path.read_text())["tables"]}
    (row,) = tables["engine, decode"]
    assert row["model, batch"] == "tiny"
    assert row["skipped"].startswith("takes about 25 s")


def test_a_checkpoint_loads(tmp_path: Path) -> None:
    shape = TINY | {"tie_word_embeddings": False}
    directory = write_checkpoint(tmp_path / "model", shape, CPU)
    assert len(list(directory.glob("*.safetensors"))) == 3
    config = read_config(directory)
    assert (config.context, config.tied_embeddings, config.dtype) == (models.CONTEXT, False, "bfloat16")
    loaded = load(directory, ModelSettings(str(directory), kv_cache_memory=2**20), 1, 16, RequestLimits())
    assert loaded.layout.token_bytes == Costs.of(shape).token
    assert sum(path.stat().st_size for path in directory.glob("*.safetensors")) == pytest.approx(
        Costs.of(shape).file, rel=0.1
    )


def test_requests_come_when_others_end(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", TINY, CPU)
    asked = [EngineRequest([i + 1] * 5, 3 + i) for i in range(4)]
    with TimedEngine(directory, "cpu", "reference", 2**20, 4, 64) as engine:
        found = engine.run(asked, together=2)
        assert [len(times) for times in found.times] == [3, 4, 5, 6]
        assert found.sent[0] == found.sent[1]
        assert found.sent[2] >= found.times[0][-1]
        assert found.began <= found.sent[0] <= found.times[0][0] <= found.ended
        again = engine.run(asked)
        assert again.firsts == found.firsts
        with pytest.raises(RuntimeError, match="request 0 ended"):
            engine.run([EngineRequest([9999] * 3, 2), EngineRequest([1] * 3, 300)])
        after = engine.run(asked)
        assert after.firsts == found.firsts
        # Tokens of before may come until the engine has taken in that they are given up: as it takes in the new ones.
        first = engine.attempts - len(asked)
        steps = [moment.attempts for moment in after.moments if len(moment.attempts)]
        assert not any(step.min() < first <= step.max() for step in steps), "what was given up goes on"


@pytest.mark.slow
def test_what_has_to_be_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.blocked", f"{INSTALLED},{NEEDED_BY_MODELS}", "bench.gpu", "--device", "cpu",
         "--sections", "ceilings,engine"],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| llama-135m, 4 |" in done.stdout
    assert "| bfloat16 product |" in done.stdout


@pytest.mark.slow
def test_sections_that_need_no_model_import_nothing_else() -> None:
    sections = (
        "bench.on_gpu.correctness,bench.on_gpu.attention_speed,bench.on_gpu.parts_speed,bench.on_gpu.transformers_side,"
        "bench.on_gpu.quantized,bench.on_gpu.draws_speed,bench.on_gpu.page_moves"
    )
    code = f"import importlib; [importlib.import_module(name) for name in {sections.split(',')!r}]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; from tests.bench.blocked import Blocked, wanted_by; "
         f"sys.meta_path.insert(0, Blocked(wanted_by({[*INSTALLED.split(','), CHECKSUMS]!r}))); {code}"],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
