"""Law: a beam search finds what the plain definition finds over transformers' logits, under any schedule."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from scheduler.events import Abort, EndReason, Submit
from scheduler.parameters import Beam
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.model.test_parity import BOTH, CHUNKED, PIPELINED, random_prompts
from tests.support.engines import Rig, key_of, make_request, make_rig

NEW, PAGE = 14, 4
STOPS = tuple(range(0, 320, 9))  # so that some hypotheses end early
PROMPTS = random_prompts([1, 4, 15, 33], seed=6)
SEARCHES = [(1, 1, 1.0), (2, 2, 1.0), (3, 2, 0.0), (4, 4, 2.0), (5, 1, -0.5)]
"""Width, results, length penalty."""

Result = tuple[list[int], float]
Logprobs = Callable[[list[list[int]]], NDArray[np.float32]]


def plain_search(
    logprobs: Callable[[list[list[int]]], NDArray[np.float32]],
    prompt: list[int],
    width: int,
    count: int,
    penalty: float,
) -> list[Result]:
    """The definition. It never ends early: all that goes on is as long as it may be in the end."""
    live: list[Result] = [([], 0.0)]
    finished: list[Result] = []
    for _ in range(NEW):
        rows = [] if not live else logprobs([prompt + tokens for tokens, _ in live])
        every = [
            (total + float(row[token]), [*tokens, token])
            for (tokens, total), row in zip(live, rows, strict=True)
            for token in range(len(row))
        ]
        best = sorted(every, key=lambda one: -one[0])[: 2 * width]
        finished += [(tokens, total) for total, tokens in best if tokens[-1] in STOPS]
        live = [(tokens, total) for total, tokens in best if tokens[-1] not in STOPS][:width]
    scored = [(tokens, total / len(tokens) ** penalty) for tokens, total in finished + live]
    return sorted(scored, key=lambda one: -one[1])[:count]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[tuple[int, int], list[Result]]:
    """By prompt and search."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)

    def logprobs(sequences: list[list[int]]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor(sequences)).logits[:, -1], -1).numpy()

    return {
        (i, j): plain_search(logprobs, prompt, *search)
        for i, prompt in enumerate(PROMPTS)
        for j, search in enumerate(SEARCHES)
    }


def run(directory: Path, scheduling: SchedulerSettings | None = None, pool: int = 4096, **kind: object) -> Rig:
    """All prompts with all searches at once, and beside them a greedy and some sampled sequences."""
    rig = make_rig(directory, settings=scheduling, pool_tokens=pool, **({"page_size": PAGE} | kind))
    requests = {}
    for i, prompt in enumerate(PROMPTS):
        for j, (width, count, penalty) in enumerate(SEARCHES):
            request = make_request(rig, prompt, NEW, sequence_count=count, beam=Beam(width, penalty))
            requests[10 * i + j] = replace(request, stop_ids=STOPS)
        requests[10 * i + 8] = make_request(rig, prompt, NEW)
        requests[10 * i + 9] = make_request(rig, prompt, NEW, temperature=1.0, seed=3, sequence_count=3)
    rig.run(requests, limit=5000)
    return rig


def results_of(rig: Rig, attempt: int, search: tuple[int, int, float]) -> list[Result]:
    found = [rig.results[key_of(attempt, index)] for index in range(search[1])]
    return [(one.tokens, sum(one.logprobs) / len(one.tokens) ** search[2]) for one in found]


def check(rig: Rig, expected: dict[tuple[int, int], list[Result]]) -> None:
    for (i, j), results in expected.items():
        found = results_of(rig, 10 * i + j, SEARCHES[j])
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in results], (i, j)
        assert [score for _, score in found] == pytest.approx([score for _, score in results], abs=1e-4)


SCHEDULES = {
    "together": {},
    "chunked": {"scheduling": CHUNKED},
    "pipelined": {"scheduling": PIPELINED},
    "few rows": {"scheduling": SchedulerSettings(max_sequences=6, max_batched_tokens=16)},
    "page of 1": {"page_size": 1},
    "page of 16": {"page_size": 16},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"scheduling": BOTH, "pool": 96},
    "hardly room for one": {"scheduling": BOTH, "pool": 52},
    "hardly room for one, page of 1, no prefix cache": {"pool": 48, "page_size": 1, "prefix_cache": False},
    "recompute": {"scheduling": SchedulerSettings(max_sequences=128, recompute=True)},
    "swapped": {"scheduling": BOTH, "pool": 96, "host_pages": 200},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.sample(2)
def test_a_search_finds_what_the_definition_finds(
    tiny: Path, expected: dict[tuple[int, int], list[Result]], name: str
) -> None:
    rig = run(tiny, **SCHEDULES[name])
    check(rig, expected)
    assert (rig.preemptions > 0) == ("pool" in SCHEDULES[name])
    reasons = {end.reason for result in rig.results.values() if (end := result.end) is not None}
    assert reasons == {EndReason.STOP, EndReason.LENGTH}


@pytest.mark.parametrize(("width", "top"), [(3, 4), (2, 9), (3, 0), (2, -1)])
def test_logprobs_come_with_the_result(tiny: Path, width: int, top: int) -> None:
    """As many alternatives as were asked for, also where the search itself looks at fewer."""
    rig = make_rig(tiny)
    request = make_request(rig, PROMPTS[2], NEW, sequence_count=2, beam=Beam(width))
    request = replace(request, stop_ids=STOPS, controls=replace(request.controls, top_logprobs=top))
    rig.turn([Submit(1, request)])
    while not len((outputs := rig.turn()).attempts):
        pass
    told, wanted = outputs.logprobs, max(0, top)
    assert told.top.shape[1] >= wanted  # other requests of the step may have asked for more
    assert (told.top_ids[:, :wanted] >= 0).all()
    assert np.isfinite(told.top[:, :wanted]).all()
    if top > 0:
        within = told.rank <= top
        likelier = told.top[:, :top] > told.chosen[:, None]
        assert (told.rank[within] == 1 + likelier.sum(1)[within]).all()
        likeliest = told.rank == 1
        assert (told.top_ids[likeliest, 0] == outputs.tokens[likeliest]).all()
    assert outputs.indices.tolist() == sorted(outputs.indices.tolist())


@pytest.mark.parametrize("turns", [1, 2, 3, 8])
@pytest.mark.parametrize("scheduling", [None, CHUNKED, PIPELINED])
def test_a_search_that_nobody_wants_any_more_lets_go_of_all(
    tiny: Path, turns: int, scheduling: SchedulerSettings | None
) -> None:
    rig = make_rig(tiny, page_size=PAGE, settings=scheduling)
    submit = Submit(1, make_request(rig, PROMPTS[3], NEW, sequence_count=3, beam=Beam(4)))
    results = rig.play({0: [submit], turns: [Abort(1)]})
    (result,) = results.values()
    assert (result.end.reason, result.end.more, result.tokens) == (EndReason.FINISHED, False, [])
    assert not rig.scheduler.running.beams
    assert rig.scheduler.live_attempts() == []


def test_hypotheses_share_what_they_have_in_common(tiny: Path) -> None:
    """A prompt of 33 is 9 pages of 4; what a hypothesis has for itself is never more than its output takes."""
    rig = make_rig(tiny, page_size=PAGE)
    rig.turn([Submit(1, make_request(rig, PROMPTS[3], NEW, sequence_count=4, beam=Beam(4)))])
    most = 0
    while rig.turn() is not None:
        stats = rig.scheduler.stats()
        most = max(most, stats.pages_if_copied - stats.pages_used)
        assert stats.pages_used <= 8 + 4 * (1 + -(-(NEW + 1) // PAGE))
    assert most >= 3 * 8, "copies would have needed the prompt three times more"
    assert rig.scheduler.stats().computed_tokens <= 33 + 4 * (NEW - 1)


def test_a_search_is_over_when_nothing_can_get_better(tiny: Path) -> None:
    """Every token ends a hypothesis: one round is enough, though much more would be allowed."""
    rig = make_rig(tiny)
    request = make_request(rig, PROMPTS[2], 100, sequence_count=2, beam=Beam(2, 0.0))
    results = rig.run({1: replace(request, stop_ids=tuple(range(320)))})
    assert [len(result.tokens) for result in results.values()] == [1, 1]
    assert rig.scheduler.stats().computed_tokens == len(PROMPTS[2])


def test_a_fault_ends_the_whole_search_and_nobody_else(
    tiny: Path, expected: dict[tuple[int, int], list[Result]]
) -> None:
    """Logits that are not finite for any sequence that holds a certain token in its prompt."""
    rig = make_rig(tiny, page_size=PAGE)
    j = 3
    width, count, penalty = SEARCHES[j]
    bad = make_request(rig, PROMPTS[1], NEW, sequence_count=count, beam=Beam(width, penalty))
    fine = replace(make_request(rig, PROMPTS[2], NEW, sequence_count=count, beam=Beam(width, penalty)), stop_ids=STOPS)
    launch, collect, drawing = rig.loaded.runner.launch, rig.loaded.runner.collect, list[int]()

    def launch_and_note(plan: StepPlan) -> None:
        drawing[:] = plan.logits[:, 1].tolist()
        launch(plan)

    def collect_with_a_fault() -> StepResult:
        result = collect()
        row = rig.scheduler.rows.row_of(1, 2)
        if row in drawing:
            result.tokens[drawing.index(row)] = -1
            return replace(result, faults=((row, "planted"),))
        return result

    rig.loaded.runner.launch, rig.loaded.runner.collect = launch_and_note, collect_with_a_fault  # type: ignore[method-assign]
    results = rig.run({1: bad, 2: fine})
    assert results[1].end.reason is EndReason.FAULT
    assert not any(isinstance(key, tuple) and key[0] == 1 for key in results)
    assert results_of(rig, 2, SEARCHES[j])[0][0] == expected[2, j][0][0]
