"""The replay of real traffic: the trace fits the model, and every request is accounted for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay import Seen, Targets, prompts
from bench.trace import CONVERSATIONS, Arrival, read_trace, scaled
from tests.support.server import running_server

ROOT = Path(__file__).parents[2]


def test_trace_is_the_one_of_azure() -> None:
    trace = read_trace(CONVERSATIONS, 200)
    assert len(trace) == 200
    assert trace[0] == Arrival(0.0, 374, 44)
    assert trace[-1].at == pytest.approx(61.263537)
    assert [a.at for a in trace] == sorted(a.at for a in trace)
    readme = (CONVERSATIONS.parent / "README.md").read_text()
    assert "CC-BY 4.0" in readme
    assert "Splitwise" in readme


LENGTHS = st.builds(Arrival, st.floats(0, 100), st.integers(1, 5000), st.integers(1, 2000))


@given(st.lists(LENGTHS, min_size=1), st.integers(16, 8192), st.floats(0.1, 10))
def test_scaled_requests_fit_and_keep_their_proportions(arrivals: list[Arrival], context: int, speed: float) -> None:
    shrunk = scaled(arrivals, context, speed)
    for before, after in zip(arrivals, shrunk, strict=True):
        assert after.prompt >= 1
        assert after.output >= 1
        assert after.prompt + after.output <= max(context, 2)
        assert after.at == before.at / speed
        assert after.prompt <= before.prompt
    if max(a.prompt + a.output for a in arrivals) < context:
        assert [(a.prompt, a.output) for a in shrunk] == [(a.prompt, a.output) for a in arrivals]


def test_prompts_have_their_lengths_and_are_the_same_each_time() -> None:
    arrivals = scaled(read_trace(CONVERSATIONS, 50), 1024, 1.0)
    cut = prompts(arrivals)
    assert [len(prompt) for prompt in cut] == [arrival.prompt for arrival in arrivals]
    assert cut == prompts(arrivals)


def test_targets_of_latency_are_met_by_whole_requests() -> None:
    targets = Targets(first=1.0, other=0.1, share=0.9)
    assert targets.met_by(Seen(5.0, [6.0, 6.1, 6.15, 6.3], "ok")), "0.1 s a token on average"
    assert targets.met_by(Seen(5.0, [5.5], "ok"))
    assert not targets.met_by(Seen(5.0, [6.01, 6.02], "ok")), "the first one is late"
    assert not targets.met_by(Seen(5.0, [5.5, 5.7], "ok")), "the other one is late"
    assert not targets.met_by(Seen(5.0, [5.1, 5.2], "lost"))
    assert not targets.met_by(Seen(5.0, [], "refused"))


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


def test_replay_on_a_running_server_counts_what_the_server_counts() -> None:
    with running_server() as server:
        check(replay("--server", server.address, "--metrics", server.metrics_url, "--requests", "40"), 40)
        generated = sum(a.output for a in scaled(read_trace(CONVERSATIONS, 40), 1024, 2.0))
        assert server.metrics()["quire_generation_tokens_total"] == generated
        assert server.metrics()["quire_requests_total{length}"] == 40


def test_a_load_that_misses_its_targets_fails() -> None:
    with running_server() as server:
        flags = ("--server", server.address, "--metrics", server.metrics_url, "--requests", "5")
        assert replay(*flags, "--ttft", "1e9", "--tpot", "1e9", "--share", "1")["met_latency_targets"] == 1
        assert replay(*flags, "--ttft", "0", "--share", "0.5", status=1)["met_latency_targets"] == 0


@pytest.mark.slow
def test_whole_replay_through_ray() -> None:
    check(replay("--ray"), 200)
