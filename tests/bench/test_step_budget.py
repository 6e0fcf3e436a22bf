"""The benchmark of step budgets on a tiny model."""

from pathlib import Path

import pytest

from bench import step_budget
from bench.shapes import MODELS, write_model
from bench.step_budget import Gaps, figures
from model.loading import load
from model.settings import ModelSettings
from scheduler.settings import RequestLimits


def test_gaps_are_those_of_steps_with_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STREAMS", 4), ("FIRST", 8), ("CONTEXT", 256), ("BUDGET", 64), ("ALONE", 3)):
        monkeypatch.setattr(step_budget, name, value)
    small = {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
    directory = write_model(tmp_path, MODELS["llama-135m"] | small | heads)
    settings = ModelSettings(str(directory), None, "bfloat16", "cpu", 16, 2**22)
    loaded = load(directory, settings, 5, 64, RequestLimits(), False)
    free, paced = Gaps(loaded, None), Gaps(loaded, 1e-6)
    for gaps in (free, paced):
        gaps.run(2)
        assert len(gaps.first) == 2
        assert len(gaps.alone) >= 6
    # 254 tokens in chunks of 60 beside four decodes, and 16 at a time where there is no time for them.
    assert len(free.beside) == 2 * 5
    assert len(paced.beside) == 2 * 16
    made = figures(paced, 1e-6)
    assert made["over_twice_the_target_part"] == 1.0
    assert 0 < made["gap_median_ms"] <= made["gap_most_ms"]
