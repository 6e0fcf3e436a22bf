"""Law: greedy tokens are the likeliest in float32, however steps are launched and whoever else is in them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from model import logit_parts
from model.gpu.graphs import CudaRecorder, GraphDecoder
from model.logit_parts import LOGIT_BYTES
from scheduler.settings import SchedulerSettings
from tests.model.gpu.device.engine import (
    AHEAD,
    EXACT,
    NEAR,
    NEW,
    PROMPTS,
    VOCABULARY,
    Oracle,
    logprobs_of,
    on_device,
    random_prompts,
    run,
)  # fmt: skip
from tests.model.gpu.device.place import REHEARSED
from tests.support.engines import Result, Rig
from tests.support.planted import plant

ONE_IN_FLIGHT = SchedulerSettings(max_sequences=6, max_batched_tokens=128, prefill_chunk=48, steps_in_flight=1)
TIGHT = SchedulerSettings(max_sequences=6, max_batched_tokens=48, prefill_chunk=20, steps_in_flight=2)
NEARNESS = {"float32": EXACT, "bfloat16": NEAR}


@pytest.fixture(scope="module")
def oracle(dense: Path) -> Oracle:
    return Oracle.of(dense)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Replays:
    """Graphs that count how often they are replayed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, record: Callable[..., Any]) -> Callable[..., Any]:
        def counted(recorder: CudaRecorder, work: Callable[[], object]) -> Callable[[], None]:
            replay = record(recorder, work)

            def again() -> None:
                self.count += 1
                replay()

            return again

        return counted


@pytest.fixture(scope="module")
def replayed(dense: Path, dtype: str) -> tuple[Rig, Replays]:
    """The engine of this file, as it serves."""
    replays = Replays()
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, CudaRecorder, "__call__", replays)
        return on_device(dense, dtype=dtype), replays


def tokens_of(results: list[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


def test_the_law_is_that_of_transformers(dense: Path, oracle: Oracle) -> None:
    """Logprobs in float32 on the device are those of transformers on the CPU."""
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).eval()
    text = PROMPTS[5]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([text])).logits[0, :-1], -1)
    (found,) = oracle.likelihoods([text])
    chosen = expected.gather(1, torch.tensor(text[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor([one for one, _ in found]), chosen, atol=EXACT, rtol=0)
    torch.testing.assert_close(torch.tensor([best for _, best in found]), expected.amax(-1), atol=EXACT, rtol=0)


def test_a_wrong_token_or_logprob_is_noticed(oracle: Oracle, dtype: str, replayed: tuple[Rig, Replays]) -> None:
    (right,) = run(replayed[0], PROMPTS[:1])
    near = NEARNESS[dtype]
    oracle.check(PROMPTS[:1], [right], near)
    token = replace(right, tokens=[*right.tokens[:-1], (right.tokens[-1] + 1) % VOCABULARY])
    logprob = replace(right, logprobs=[right.logprobs[0] + 3 * near, *right.logprobs[1:]])
    for wrong in (token, logprob):
        with pytest.raises(AssertionError, match="1 of 16 tokens are wrong"):
            oracle.check(PROMPTS[:1], [wrong], near)


def test_replays_launched_ahead_give_the_tokens_of_launches_one_by_one(
    dense: Path, dtype: str, oracle: Oracle, replayed: tuple[Rig, Replays], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, replays = replayed
    if not REHEARSED:
        assert isinstance(rig.loaded.runner.model, GraphDecoder), "the model was not recorded"
    assert rig.loaded.runner.runs_ahead, "the engine waits for each step"
    before = replays.count
    found = run(rig, PROMPTS)
    assert REHEARSED or replays.count - before > NEW, "steps ran launch by launch"
    monkeypatch.setattr("model.gpu.backend.why_no_graphs", lambda _: "the test compares with launches")
    plain = on_device(dense, ONE_IN_FLIGHT, dtype=dtype)
    assert not isinstance(plain.loaded.runner.model, GraphDecoder)
    expected = run(plain, PROMPTS)
    oracle.check(PROMPTS, expected, NEARNESS[dtype])
    oracle.check(PROMPTS, found, NEARNESS[dtype])
    if dtype == "float32":
        assert tokens_of(found) == tokens_of(expected)


def test_each_request_alone_gets_the_tokens_that_it_gets_among_others(
    dtype: str, oracle: Oracle, replayed: tuple[Rig, Replays]
) -> None:
    rig, _ = replayed
    together = run(rig, PROMPTS)
    alone = [result for prompt in PROMPTS for result in run(rig, [prompt])]
    oracle.check(PROMPTS, alone, NEARNESS[dtype])
    oracle.check(PROMPTS, together, NEARNESS[dtype])
    if dtype == "float32":
        assert tokens_of(alone) == tokens_of(together)


def test_requests_that_share_a_long_prefix_get_their_own_tokens(
    dense: Path, dtype: str, oracle: Oracle, replayed: tuple[Rig, Replays]
) -> None:
    """Twelve read the same pages, whose keys one launch reads for all; some preempt others."""
    head, *tails = random_prompts([160, *range(1, 13)], seed=72)
    prompts = [head + tail for tail in tails]
    run(replayed[0], [head])
    oracle.check(prompts, run(replayed[0], prompts), NEARNESS[dtype])
    many = SchedulerSettings(max_sequences=12, max_batched_tokens=256, steps_in_flight=2)
    rig = on_device(dense, many, dtype=dtype)
    run(rig, [head])
    oracle.check(prompts, run(rig, prompts), NEARNESS[dtype])


def test_sequences_that_are_preempted_go_on_with_their_tokens(dense: Path, dtype: str, oracle: Oracle) -> None:
    rig = on_device(dense, TIGHT, dtype=dtype, pool_tokens=208, prefix_cache=False)
    found = run(rig, PROMPTS, 40)
    assert rig.preemptions, "the pool was large enough for all"
    oracle.check(PROMPTS, found, NEARNESS[dtype])


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_logprobs_of_prompts_in_parts_are_those_in_one_part(
    dtype: str, oracle: Oracle, replayed: tuple[Rig, Replays], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of float32."""
    rig, _ = replayed
    prompts = PROMPTS[1:]

    whole = logprobs_of(rig, prompts, 3)
    monkeypatch.setattr(logit_parts, "PART_BYTES", rows * VOCABULARY * LOGIT_BYTES)
    parts = logprobs_of(rig, prompts, 3)
    likely = oracle.likelihoods(prompts)
    for number, (one, other) in enumerate(zip(parts, whole, strict=True)):
        for place, (chosen, top) in one.items():
            where, near = f"prompt {number}, token {place}, parts of {rows} rows", NEARNESS[dtype]
            assert chosen == pytest.approx(other[place][0], abs=near), where
            assert top == pytest.approx(other[place][1], abs=near), where
            assert chosen == pytest.approx(likely[number][place - 1][0], abs=near), where
            assert top[0] == pytest.approx(likely[number][place - 1][1], abs=near), where


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_steps_in_flight_change_no_draw(dense: Path, dtype: str, replayed: tuple[Rig, Replays]) -> None:
    """A seed fixes a draw: sampled tokens are the same again, one step in flight or two. In bfloat16 a draw near a
    bound may fall on its other side.
    """
    rig, one = replayed[0], on_device(dense, ONE_IN_FLIGHT, dtype=dtype)
    assert AHEAD.depth > ONE_IN_FLIGHT.depth
    for how in ({"top_k": 20}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01}, {"min_p": 0.05}):
        sampling = {"temperature": 0.9, "seed": 5} | how
        drawn = [run(each, PROMPTS[:4], **sampling) for each in (rig, rig, one)]
        assert tokens_of(drawn[0]) == tokens_of(drawn[1]), f"drawn again with {how}"
        assert tokens_of(drawn[0]) == tokens_of(drawn[2]), f"one step in flight, with {how}"
