"""The link's benchmark measures what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.link import age
from bench.paced import CYCLE, PERIOD


def test_age_of_a_token_is_the_time_since_its_step_ended() -> None:
    for number in (1, CYCLE - 1, CYCLE, 5 * CYCLE + 7):
        for late in (0.0001, 0.019, 0.5, 20.0):
            assert age(number % CYCLE, number * PERIOD + late) == pytest.approx(late, abs=1e-6)


@pytest.mark.slow
def test_benchmark_runs_and_accounts_for_every_token() -> None:
    command = [sys.executable, "-m", "bench.link", "--rounds", "1", "--seconds", "1.5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    for mode in ("thread", "process"):
        assert rows[mode]["tokens"] > 1000
        assert 0 < rows[mode]["latency_p50_ms"] <= rows[mode]["latency_p99_ms"]
    assert rows["link"].keys() == {"engine_us_per_token", "added_latency_p50_ms"}
