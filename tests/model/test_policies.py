"""No scheduling policy changes a token of a real model, nor a bit of its logits, also where rows give way."""

from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.events import EndReason, Submit
from scheduler.settings import SCHEDULING_POLICIES, SchedulerSettings
from tests.model.test_parity import ENDLESS, NEW, TOGETHER, bits_of, random_prompts, tokens_of
from tests.support.engines import Rig, make_request, make_rig

pytestmark = pytest.mark.sample(3)

PROMPTS = random_prompts([30, 22, 41, 9, 17, 12])
ASKED = [(0, "a", 2), (0, "b", 2), (0, "a", 1), (6, "c", -1), (9, "b", -2), (12, "c", 0)]  # turn, tenant, priority


@pytest.fixture(scope="module")
def together(tiny: Path) -> Rig:
    return TOGETHER.run(tiny, PROMPTS, NEW)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_tokens_and_logits_are_those_of_any_schedule(tiny: Path, together: Rig, policy: str, depth: int) -> None:
    scheduling = SchedulerSettings(11, 3, 5, depth, policy, tenant_weights="a=2")
    rig = make_rig(tiny, 16, 192, scheduling, True, True, "float32", queue=ENDLESS)
    script = dict[int, list[Submit]]()
    for attempt, (turn, tenant, priority) in enumerate(ASKED):
        request = make_request(rig, PROMPTS[attempt], NEW)
        scope = replace(request.scope, tenant=tenant)
        script.setdefault(turn, []).append(Submit(attempt, replace(request, scope=scope, priority=priority)))
    results = rig.play(script)
    assert all(result.end is not None and result.end.reason is EndReason.LENGTH for result in results.values())
    assert tokens_of(rig, len(ASKED)) == tokens_of(together, len(ASKED))
    assert bits_of(rig, len(ASKED)) == bits_of(together, len(ASKED))
    assert bool(rig.scheduler.stats().preemptions_priority) == (policy == "priority")
