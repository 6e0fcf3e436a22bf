"""The loss of quality by weight formats: checkpoints stand for the weights that their writers say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import rms_norm

from bench.kv_precision import divergence, log_probabilities
from bench.loaded import load
from bench.quantized.calibration import largest_inputs
from bench.quantized.forms import FORMS, Form, PlainForm, is_linear
from model.reference.backend import TorchBackend
from rpc.paths import demo_directory

ROOT = Path(__file__).parents[2]
WINDOWS = [list(range(100, 164))]
ROUNDED = ("W8A8 int8 dynamic", "FP8 dynamic", "FP8 static")
"""Forms whose activations are rounded too."""
QUICK = ("GPTQ 4 bits g128 sym desc_act", "W4A16 g128", "FP8 blocks 128x128", "GGUF Q4_K")
ROUNDING = 1e-9
"""KL divergence of two orders of sums in float32."""


def distance(form: Form, root: Path, lie: float = 1.0) -> float:
    """The KL divergence of the demo model in a form from the plain weights that this stands for, times `lie`."""
    source = demo_directory()
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    places = [root / name for name in ("stored", "plain")]
    for place in places:
        place.mkdir()
    encoded = form.encode(config, tensors, dict.fromkeys((name.removesuffix(".weight") for name in tensors), 20.0))
    assert encoded.meant.keys() == set(filter(is_linear, tensors))
    exact = PlainForm("plain", torch.float32)
    meant = exact.encode(config, tensors | {name: one * lie for name, one in encoded.meant.items()}, {}).tensors
    locations = form.save(config, encoded.tensors, places[0]), exact.save(config, meant, places[1])
    models = [load(location, "float32", backend="reference") for location in locations]
    found, same = (
        log_probabilities(one.backend, one.decoder, one.config, one.dtype, WINDOWS).double() for one in models
    )
    return divergence(same, found).mean().item()


@pytest.mark.parametrize(
    "form",
    [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.slow, id=one.name) for one in FORMS],
)
def test_a_form_stands_for_what_its_writer_says(form: Form, tmp_path: Path) -> None:
    lost = distance(form, tmp_path)
    if form.name in ROUNDED:
        assert 1e-6 < lost < 0.1
    else:
        assert abs(lost) < ROUNDING


def test_other_weights_would_show(tmp_path: Path) -> None:
    assert distance(next(form for form in FORMS if form.name == "GGUF Q8_0"), tmp_path, lie=1.001) > 10 * ROUNDING


def test_largest_inputs_are_those_of_each_linear() -> None:
    backend = TorchBackend("float32", torch.device("cpu"))
    loaded = load(demo_directory(), "float32", backend="reference")
    found = largest_inputs(
        demo_directory(), lambda decoder: log_probabilities(backend, decoder, loaded.config, "float32", WINDOWS)
    )
    tensors = load_file(demo_directory() / "model.safetensors")
    assert set(found) >= {name.removesuffix(".weight") for name in tensors if is_linear(name)}
    first = "model.layers.0.self_attn."
    assert found[f"{first}q_proj"] == found[f"{first}v_proj"]
    hidden = tensors["model.embed_tokens.weight"].float()[WINDOWS[0]]
    norm = tensors["model.layers.0.input_layernorm.weight"].float()
    normed = rms_norm(hidden, norm.shape, norm, 1e-5)
    assert found[f"{first}q_proj"] == pytest.approx(normed.abs().max().item(), rel=1e-5)


@pytest.mark.slow
def test_benchmark_measures_each_way() -> None:
    command = [sys.executable, "-m", "bench.weight_precision", "--json", "--tokens", "512", "--only", "32"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    ways = [(row["dtype"], row["backend"]) for row in rows]
    assert {row["weights"] for row in rows} == {"GPTQ 4 bits g32 sym"}
    assert ways[0] == ("float32", "reference")
    assert ways[-1][0] == "bfloat16"
    assert abs(rows[0]["kl_from_plain"]) < 1e-7 < rows[0]["kl_mean"] < 0.1
