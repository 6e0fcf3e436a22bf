"""`bench.hit_rates` prints what the simulation gives."""

import json
import sys
from pathlib import Path

import pytest

from bench.hit_rates import main, read_trace
from bench.made_traffic import MADE
from cache_manager.policies import POLICIES
from cache_manager.simulation import simulate


def write(path: Path, requests: list[list[int]]) -> str:
    path.write_text("".join(json.dumps({"hash_ids": ids}) + "\n" for ids in requests))
    return str(path)


def test_rows_are_the_hit_rates_of_each_policy(tmp_path, monkeypatch, capsys) -> None:
    requests = [[1, 2, 3], [4, 5], [1, 2, 6], [4, 5], [1, 2, 3]]
    trace = write(tmp_path / "trace.jsonl", requests)
    monkeypatch.setattr(sys, "argv", ["hit_rates", trace, f"{trace}@1:4", "--capacities", "3", "9", "--json"])
    main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["requests"], row["capacity"]) for row in rows] == [(5, 3), (5, 9), (3, 3), (3, 9)]
    for row, part in zip(rows, (requests, requests, requests[1:4], requests[1:4]), strict=True):
        assert row["rates"] == {name: simulate(part, row["capacity"], make).hit_rate for name, make in POLICIES.items()}


def test_a_range_of_requests(tmp_path) -> None:
    trace = write(tmp_path / "trace.jsonl", [[1], [2], [3]])
    assert read_trace(f"{trace}@:2") == [[1], [2]]
    assert read_trace(f"{trace}@1:") == [[2], [3]]
    with pytest.raises(ValueError, match="must be START:END"):
        read_trace(f"{trace}@2")


def test_made_traffic_is_the_same_each_time() -> None:
    for name, make in MADE.items():
        requests = read_trace(f"made:{name}")
        assert requests == make()
        assert all(requests)
    with pytest.raises(ValueError, match="made:nothing is unknown"):
        read_trace("made:nothing")
