"""Logprobs of prompts: transformers' of the same prompt, whatever the schedule, and what is cached does not count."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from scheduler.events import Submit
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import BOTH, ENDLESS, random_prompts
from tests.support.engines import Rig, make_request, make_rig
from tests.support.planted import plant

LENGTHS = [1, 2, 7, 16, 17, 33, 60]
PROMPTS = random_prompts(LENGTHS)
NEW, TOP = 12, 3


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[np.ndarray]:
    """By prompt: [tokens - 1, vocabulary] log-probabilities of each token after the first."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    with torch.no_grad():
        return [torch.log_softmax(model(torch.tensor([p])).logits[0, :-1], -1).numpy() for p in PROMPTS]


def asking(rig: Rig, prompt: list[int], top: int = TOP) -> Request:
    request = make_request(rig, prompt, NEW)
    return replace(request, controls=replace(request.controls, prompt_logprobs=True, top_logprobs=top))


Told = dict[int, dict[int, tuple[float, int, list[int], list[float]]]]
"""By attempt and position in the prompt: logprob, rank, likeliest ids and their logprobs."""


def run(rig: Rig, requests: dict[int, Request]) -> Told:
    told: Told = {attempt: {} for attempt in requests}
    drawn: set[int] = set()
    outputs = rig.turn([Submit(attempt, request) for attempt, request in requests.items()])
    while outputs is not None:
        for part in outputs.prompt_parts:
            whole = {*told[part.attempt], *range(part.start, part.start + len(part.logprobs.chosen))}
            assert part.attempt not in drawn or part.start + len(part.logprobs.chosen) <= len(whole) + 1
            for i, chosen in enumerate(part.logprobs.chosen.tolist()):
                ranks = int(part.logprobs.rank[i])
                now = (chosen, ranks, part.logprobs.top_ids[i].tolist(), part.logprobs.top[i].tolist())
                assert told[part.attempt].setdefault(part.start + i, now) == now, "the same when it comes again"
        for attempt in outputs.attempts.tolist():
            prompt = requests[attempt].prompt
            asked = requests[attempt].controls.prompt_logprobs
            assert set(told[attempt]) == (set(range(1, len(prompt))) if asked else set()), "before the first token"
            drawn.add(attempt)
        outputs = rig.turn()
    return told


def check(told: Told, expected: list[np.ndarray]) -> None:
    for attempt, positions in told.items():
        prompt, theirs = PROMPTS[attempt], expected[attempt]
        assert set(positions) == set(range(1, len(prompt)))
        for position, (chosen, rank, ids, top) in positions.items():
            row = theirs[position - 1]
            assert chosen == pytest.approx(row[prompt[position]], abs=2e-3)
            assert rank == 1 + (row > row[prompt[position]]).sum()
            assert ids == np.argsort(-row)[:TOP].tolist()
            assert top == pytest.approx(row[ids], abs=2e-3)


SETTINGS = {
    "whole": SchedulerSettings(max_sequences=64),
    "chunks, two steps in flight": BOTH,
    "without a cache": SchedulerSettings(max_sequences=64, prefill_chunk=8, recompute=True),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_they_are_those_of_transformers(tiny: Path, expected: list[np.ndarray], settings: str) -> None:
    rig = make_rig(tiny, settings=SETTINGS[settings], queue=ENDLESS)
    check(run(rig, {i: asking(rig, prompt) for i, prompt in enumerate(PROMPTS)}), expected)


def test_under_preemption(tiny: Path, expected: list[np.ndarray]) -> None:
    settings = SchedulerSettings(max_sequences=7, steps_in_flight=2, prefill_chunk=5)
    rig = make_rig(tiny, 1, 75, settings, queue=ENDLESS)
    check(run(rig, {i: asking(rig, prompt) for i, prompt in enumerate(PROMPTS)}), expected)
    assert rig.preemptions > 0


def test_what_is_cached_is_computed_for_them_and_left_for_others(tiny: Path, expected: list[np.ndarray]) -> None:
    rig = make_rig(tiny, 4, queue=ENDLESS)
    run(rig, {8: make_request(rig, PROMPTS[6], NEW)})
    check(run(rig, {6: asking(rig, PROMPTS[6])}), expected)
    run(rig, {9: make_request(rig, PROMPTS[6], NEW)})
    assert (rig.started[8], rig.started[6], rig.started[9]) == (0, 0, 56)


def test_who_does_not_ask_gets_none(tiny: Path, expected: list[np.ndarray]) -> None:
    rig = make_rig(tiny, queue=ENDLESS)
    told = run(rig, {5: asking(rig, PROMPTS[5]), 6: make_request(rig, PROMPTS[6], NEW)})
    check({5: told[5]}, expected)
    assert told[6] == {}


def test_tokens_are_those_of_a_request_that_does_not_ask(tiny: Path) -> None:
    for requests in (asking, make_request):
        rig = make_rig(tiny, record_logits=True, queue=ENDLESS)
        rig.run({i: requests(rig, prompt, NEW) for i, prompt in enumerate(PROMPTS)})
        bits = [rig.logits_of(i) for i in range(len(PROMPTS))]
        if requests is asking:
            first = bits
    assert bits == first


def test_a_logprob_of_the_token_before_would_show(
    tiny: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: logits that are one position late."""
    from model.input_batch import InputBatch

    def stand_in(slices):  # type: ignore[no-untyped-def]
        def late(self, *args):  # type: ignore[no-untyped-def]
            prompts, offsets = slices(self, *args)
            return prompts, [np.maximum(offset - 1, 0) for offset in offsets]

        return late

    plant(monkeypatch, InputBatch, "_prompt_slices", stand_in)
    rig = make_rig(tiny, queue=ENDLESS)
    told = run(rig, {6: asking(rig, PROMPTS[6])})
    with pytest.raises(AssertionError):
        check(told, expected)
