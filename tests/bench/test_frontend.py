"""The frontend's benchmark measures what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.frontend import FrontendWindow, report


def window(tokens: int, cpu: float, messages: int = 1000) -> FrontendWindow:
    counts = {"cpu": cpu, "stub": 9.0, "tokens": tokens, "steps": 100, "turns": 300, "sleeps": 200}
    return FrontendWindow(2.0, messages, counts, 0.25)


def test_report_divides_processor_time_by_tokens_and_takes_medians() -> None:
    windows = {
        "floor": [window(1000, 0.02), window(1000, 0.5), window(1000, 0.01)],
        "served": [window(2000, 0.1), window(2000, 0.08), window(2000, 9.0)],
    }
    row = report(windows)
    assert row["floor_us_per_message"] == pytest.approx(20)
    assert row["us_per_token"] == pytest.approx(50)
    assert row["ratio"] == pytest.approx(2.5)
    assert row["tokens_per_core_second"] == pytest.approx(20_000)
    assert (row["tokens_per_second"], row["messages_per_second"], row["tokens_per_message"]) == (1000, 500, 2)
    assert (row["loop_turns_per_step"], row["wakeups_per_step"]) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0, 50])
def test_benchmark_runs_and_sends_a_token_a_message(rate: int) -> None:
    flags = ["--streams", "4", "--rate", str(rate), "--rounds", "1", "--seconds", "1.5", "--json"]
    command = [sys.executable, "-m", "bench.frontend", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["4"]
    # How fast is the machine's: beside other work a message may wait for the next token.
    assert 0.9 < row["tokens_per_message"] < 2
    assert min(row["floor_us_per_message"], row["us_per_token"]) > 0
    if rate:
        assert 0 < row["tokens_per_second"] < 1.2 * 4 * rate
