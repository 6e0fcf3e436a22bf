"""The gateway's benchmark measures what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_benchmark_runs() -> None:
    flags = ["--streams", "4", "--rate", "50", "--rounds", "1", "--seconds", "2", "--json"]
    command = [sys.executable, "-m", "bench.gateway", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    bare, gateway = figures["bare"], figures["gateway"]
    assert min(bare["us_per_token"], gateway["us_per_token"]) > 0
    assert gateway["ratio"] == pytest.approx(gateway["us_per_token"] / bare["us_per_token"])
