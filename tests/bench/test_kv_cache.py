"""The plain GPT that the KV cache is measured beside is the same model."""

from pathlib import Path

import pytest

import bench.kv_cache
from bench.kv_cache import measure, write_gpt2
from bench.plain_gpt import PlainGPT


def test_ids_are_the_same_with_the_cache_without_it_and_in_a_plain_gpt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.kv_cache, "NEW", (1, 48))
    rows = measure(write_gpt2(tmp_path), 1, PlainGPT(tmp_path))
    assert [row["ids_equal"] for row in rows] == [True, True]
    assert all(row["ratio_to_plain"] > 0 for row in rows)


def test_another_model_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.kv_cache, "NEW", (48,))
    plain = PlainGPT(write_gpt2(tmp_path))
    plain.weights["h.3.mlp.c_fc.bias"] = -plain.weights["h.3.mlp.c_fc.bias"]
    assert not measure(tmp_path, 1, plain)[0]["ids_equal"]
