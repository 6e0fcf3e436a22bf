"""The replay of real traffic: every request is accounted for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rpc.loadgen.traces import read_trace, scaled
from tests.support.server import running_server

ROOT = Path(__file__).parents[2]


def replay(*flags: str, status: int = 0) -> dict:
    command = [sys.executable, "-m", "bench.replay", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == status, done.stderr + done.stdout
    return json.loads(done.stdout)


def check(result: dict, requests: int) -> None:
    assert (result["requests"], result["ok"], result["refused"], result["lost"]) == (requests, requests, 0, 0)
    assert result["errors"] == []
    assert result["kv_pages_held_at_the_end"] == 0
    assert result["kv_pages_peak"] > 0
    assert result["time_to_first_token_ms"]["p50"] <= result["time_to_first_token_ms"]["p99"]


@pytest.mark.slow
def test_replay_on_a_running_server_counts_what_the_server_counts() -> None:
    with running_server() as server:
        check(replay("--server", server.address, "--metrics", server.metrics_url, "--requests", "40"), 40)
        generated = sum(a.output for a in scaled(read_trace("azure-conv", 40), 1024, 2.0))
        assert server.metrics()["quire_generation_tokens_total"] == generated
        assert server.metrics()["quire_requests_total{length}"] == 40


@pytest.mark.slow
def test_a_load_that_misses_its_targets_fails() -> None:
    with running_server() as server:
        flags = ("--server", server.address, "--metrics", server.metrics_url, "--requests", "5")
        assert replay(*flags, "--ttft", "1e9", "--tpot", "1e9", "--share", "1")["met_latency_targets"] == 1
        assert replay(*flags, "--ttft", "1e-9", "--share", "0.5", status=1)["met_latency_targets"] == 0


@pytest.mark.slow
def test_whole_replay_through_ray() -> None:
    check(replay("--ray"), 200)
