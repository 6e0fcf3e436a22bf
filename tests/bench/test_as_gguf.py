"""The files that llama.cpp gets to be measured with hold the weights that Quire gets."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.peers.as_gguf import convert
from bench.peers.models import write_tokenizer
from bench.shapes import MODELS, write_model
from scheduler.settings import SchedulerSettings
from tests.support.engines import make_request, make_rig

PROMPTS = ([5, 9, 200, 31, 7] * 9, [100, 3])
LAYERS: dict[str, dict[str, Any]] = {
    "llama-135m": {"num_hidden_layers": 2},
    "qwen3-0.6b": {"num_hidden_layers": 2},
    "qwen3.5-0.8b": {"num_hidden_layers": 4},
    "granite-4-h-350m": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_the_file_computes_the_same(name: str, tmp_path: Path) -> None:
    """Logits differ by the rounding of an epsilon, a factor and an exponential alone.

    DeepSeek's shape has no experts, without whose count Quire reads no file of its architecture.
    """
    shape = MODELS[name] | LAYERS[name] | {"vocab_size": 256}
    write_tokenizer(tmp_path, 256)
    write_model(tmp_path, shape)
    convert(tmp_path, tmp_path / "model.gguf")
    found = []
    for location in (tmp_path, tmp_path / "model.gguf"):
        rig = make_rig(location, 16, 2048, SchedulerSettings(), True, dtype="float32", backend="reference")
        rig.run({i: make_request(rig, prompt, 4) for i, prompt in enumerate(PROMPTS)})
        found.append([np.frombuffer(row, np.float32) for i in range(len(PROMPTS)) for row in rig.logits_of(i).values()])
    np.testing.assert_allclose(*found, atol=1e-4)
