"""The benchmark of loading: all forms of a tiny model load, in processes of their own."""

import json
import sys
from pathlib import Path

import pytest

import bench.load_weights
from bench.load_weights import FORMS, measure, repeated, write
from bench.loaded import load
from bench.quantized.forms import Form

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64,
}  # fmt: skip


def test_all_layers_have_the_first_ones_tensors() -> None:
    made = repeated({"model.layers.0.a": 1, "blk.0.b": 2, "model.norm.weight": 3}, 2)
    assert made == {"model.layers.0.a": 1, "model.layers.1.a": 1, "blk.0.b": 2, "blk.1.b": 2, "model.norm.weight": 3}


@pytest.mark.parametrize(("form", "quantization"), FORMS, ids=lambda value: getattr(value, "name", str(value)))
def test_each_form_loads(form: Form, quantization: str | None, tmp_path: Path) -> None:
    loaded = load(write(form, TINY, tmp_path), quantization=quantization)
    assert (loaded.config.layers, loaded.dtype) == (2, "bfloat16")
    assert loaded.weight_bytes > 0


@pytest.mark.slow
def test_figures_of_one_load(tmp_path: Path) -> None:
    location = write(FORMS[0][0], TINY, tmp_path)
    figures = measure(location, "int8", 1)
    assert 0 < figures["seconds_least"] == figures["seconds"] == figures["seconds_most"]
    assert figures["held"] == round(load(location, quantization="int8").weight_bytes / 2**20)
    assert figures["own_peak"] >= figures["kept"]


@pytest.mark.slow
def test_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(bench.load_weights.MODELS, "qwen3-0.6b", TINY)
    flags = ["--directory", str(tmp_path), "--only", "Q4_K", "--json"]
    for rounds in ("0", "1"):
        monkeypatch.setattr(sys, "argv", ["load_weights", "--rounds", rounds, *flags])
        bench.load_weights.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["weights"] == "GGUF Q4_K"
    assert len(list(tmp_path.glob("*/model.gguf"))) == 1
