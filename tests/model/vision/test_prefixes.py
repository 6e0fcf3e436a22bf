"""Law: tokens of PaliGemma's prompts see each other in both directions, those that it generates see what came before;
however many share a step, give way, or are computed again.
"""

from dataclasses import replace
from typing import Any

import pytest

from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from scheduler.slices import Slices
from scheduler.step import StepPlan
from tests.model.vision.cases import BY_NAME
from tests.model.vision.conftest import Shelf
from tests.model.vision.seen import Seen
from tests.support.engines import Rig, make_rig

pytestmark = pytest.mark.sample(3)

CONTEXT, ROWS = 64, 4
STEPS = SchedulerSettings(max_batched_tokens=CONTEXT + ROWS, max_sequences=ROWS)  # two prompts at most fit in a step
TIGHT = {"page_size": 1, "pool_tokens": 80}
SCHEDULES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no prefix cache": {"prefix_cache": False},
    "pipelined": {"settings": replace(STEPS, steps_in_flight=2)},
    "recompute": {"settings": replace(STEPS, recompute=True)},
    "preempted": TIGHT,
    "preempted, no prefix cache": TIGHT | {"prefix_cache": False},
    "preempted, pipelined": TIGHT | {"settings": replace(STEPS, steps_in_flight=2)},
    "preempted, recompute": TIGHT | {"settings": replace(STEPS, recompute=True)},
    "preempted, page of 7": {"page_size": 7, "pool_tokens": 84},
}


@pytest.fixture(scope="module")
def seen(shelf: Shelf) -> Seen:
    case = BY_NAME["paligemma"]
    text = dict(case.more_text) | {"max_position_embeddings": CONTEXT}
    return Seen(replace(case, name="paligemma-short", more_text=text), shelf)


def three_of_each(rig: Rig, seen: Seen) -> dict[int, Request]:
    count = len(seen.expected)
    return {i: seen.request(rig.loaded.limits, i % count) for i in range(3 * count)}


def watched(rig: Rig) -> list[tuple[int, int, int]]:
    """Start, count and undivided tokens of each slice, as they are launched."""
    slices: list[tuple[int, int, int]] = []
    whole: dict[int, int] = {}
    runner, launch = rig.loaded.runner, rig.loaded.runner.launch

    def remember(plan: StepPlan) -> None:
        whole.update({join.row: join.bidirectional for join in plan.joins})
        slices.extend((start, count, whole[row]) for row, start, count in plan.slices.tolist())
        launch(plan)

    runner.launch = remember  # type: ignore[method-assign]
    return slices


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_prompt_is_computed_in_one_slice_and_its_output_is_causal(name: str, seen: Seen) -> None:
    """Tokens are transformers', whose output is causal; so are all logits, bit by bit, when they come a second time."""
    rig = make_rig(seen.directory, record_logits=True, **({"settings": STEPS} | SCHEDULES[name]))
    slices = watched(rig)
    requests = three_of_each(rig, seen)
    results = rig.run(requests)
    assert [results[i].tokens for i in requests] == seen.expected * 3
    assert {whole for _, _, whole in slices} == {len(request.prompt) for request in requests.values()}
    begun = [(start, count, whole) for start, count, whole in slices if start < whole]
    assert begun
    assert all(start + count >= whole for start, count, whole in begun)
    assert (rig.preemptions > 0) == name.startswith("preempted")


def test_a_divided_prompt_would_show(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slices, "fits", lambda self, start, whole: self.budget >= 1)
    rig = make_rig(seen.directory, settings=replace(STEPS, prefill_chunk=16))
    results = rig.run(three_of_each(rig, seen))
    assert [results[i].tokens for i in range(15)] != seen.expected * 3


def test_an_output_that_is_seen_from_before_would_show(seen: Seen) -> None:
    """Computed again, as after a preemption, with its output among the tokens that see each other."""
    rig = make_rig(seen.directory, settings=replace(STEPS, recompute=True))
    request = seen.request(rig.loaded.limits, 0)
    longer = replace(request, scope=replace(request.scope, bidirectional=len(request.prompt) + 8))
    assert rig.run({1: request, 2: longer})[1].tokens == seen.expected[0]
    assert rig.results[2].tokens != seen.expected[0]
