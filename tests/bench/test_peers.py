"""The peers' bench: what it asks, what it takes for the floor, and an engine behind its pipe."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import shapes
from bench.peers.__main__ import turns
from bench.peers.floor import MachineFloor, MachineRates, operations_of, token_bytes
from bench.peers.models import make
from bench.peers.report import PeerRun, report
from bench.peers.workloads import PeerRequest, Workload, build

TINY = shapes.MODELS["llama-135m"] | {
    "vocab_size": 16_384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}  # fmt: skip


WEIGHTS = 1_000_000


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4", "W5@2", "P512"])
def test_a_seed_says_what_is_asked(name: str) -> None:
    assert build(name, 1) == build(name, 1)
    assert build(name, 1).requests[0].prompt != build(name, 2).requests[0].prompt, "a cache would answer it"


def test_the_floor_of_one_request_is_its_prompt_and_a_reading_of_all_weights_a_token(monkeypatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    token = token_bytes("tiny")
    assert token == 2 * 2 * 16
    layers, head, attention = operations_of("tiny")
    machine = MachineFloor.__new__(MachineFloor)
    seconds = machine.floor(
        "tiny", Workload("", "", [PeerRequest([1] * 8, 3)], 1), MachineRates(read=1.0, multiply=1e12), WEIGHTS
    )
    prompt = (8 * layers + head + 32 * attention) / 1e12
    assert seconds == pytest.approx(prompt + 2 * WEIGHTS + (8 + 9) * token)


def test_a_prompt_with_one_token_out_has_no_further_step(monkeypatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    layers, head, attention = operations_of("tiny")
    machine = MachineFloor.__new__(MachineFloor)
    alone = machine.floor("tiny", build("P512", 1), MachineRates(read=1.0, multiply=1.0), WEIGHTS)
    assert alone == pytest.approx(512 * layers + head + 512 * 512 / 2 * attention)


def test_a_rate_counts_the_outputs_or_else_the_prompts() -> None:
    assert build("W4", 1).counted == 16 * 256
    assert build("P512", 1).counted == 512


def test_what_is_shared_counts_once_and_those_that_wait_start_where_one_ends(monkeypatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    machine, endless = MachineFloor.__new__(MachineFloor), MachineRates(read=1.0, multiply=1e30)
    alone = machine.floor("tiny", Workload("", "", [PeerRequest([1] * 8, 3)] * 3, 1), endless, WEIGHTS)
    together = machine.floor("tiny", Workload("", "", [PeerRequest([1] * 8, 3)] * 3, 3), endless, WEIGHTS)
    assert alone - together == pytest.approx(4 * WEIGHTS)
    several = [PeerRequest([1] * 8, 1)] * 4
    shared, own = (
        machine.floor("tiny", Workload("", "", several, 4, part), MachineRates(1e30, 1.0), WEIGHTS) for part in (6, 0)
    )
    layers, _, attention = operations_of("tiny")
    assert own - shared == pytest.approx(3 * (6 * layers + 18 * attention))


@pytest.mark.slow
def test_an_engine_answers_when_each_token_was_there(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", TINY)
    command = [sys.executable, "-m", "bench.peers.quire_engine", str(make(tmp_path, "tiny")), "8192"]
    asked = "W2 1\nwarm 3\nW5@100 1\n"
    run = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=120)
    hello, single, warm, paced = map(json.loads, run.stdout.splitlines())
    assert hello["version"]
    (times,) = single["times"]
    assert len(times) == 128
    assert sorted(times) == times
    assert 0 < times[0] <= times[-1] <= single["seconds"]
    assert [len(one) for one in warm["times"]] == [8] * 6
    assert all(0 <= token < 16_384 for one in warm["ids"] for token in one)
    assert [len(one) for one in warm["ids"]] == [8] * 6
    arrivals = [asked.arrives for asked in build("W5@100", 1).requests]
    assert 0 < arrivals[-1] <= paced["seconds"]
    assert all(arrives <= one[0] for one, arrives in zip(paced["times"], arrivals, strict=True))


def test_medians_are_told() -> None:
    rows = [
        PeerRun(name, "tiny", "W2", tokens, 0.5, 10.0, 12.0, 1.0, 40.0, 300.0, 0.01, (5, first), 2**19, 2.5, 3 * 2**20)
        for name, first in (("quire", 6), ("other", 7))
        for tokens in (90.0, 100.0, 170.0)
    ]
    told = report(rows)
    assert "| tiny | W2 | weights MiB | start s | memory MiB |" in told
    assert "| quire | 100.0 (50%) | 0.5 | 2.5 | 3 |" in told
    assert "| quire | 10 (12) | 100% |" in told
    assert "| other | 10 (12) | 50% |" in told


def test_one_that_dies_is_left_out(monkeypatch) -> None:
    def side(name: str, *answers: object) -> SimpleNamespace:
        left = list(answers)

        def turn(*_: object) -> object:
            answer = left.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(name=name, turn=turn, close=lambda: closed.append(name))

    closed: list[str] = []
    sides = [side("a", 1, 2, 3), side("b", 4, RuntimeError("b: no answer"))]
    assert list(turns(sides, ["W2"], "tiny", 3)) == [(1, 1), (1, 4), (2, 2), (3, 3)]
    assert closed == ["b"]
