"""A search holds rows that wait for hypotheses of its own which wait in the queue.

Work goes on beside others that wait there, of any tenant or priority, isolated or not.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cache_manager.block_hash import Scope
from cache_manager.manager import CacheManager
from scheduler.events import EndReason, Event, Submit
from scheduler.parameters import Beam
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.workloads import PATIENT, make_layout, make_request

PAGE = 2


def ends_of(pages: int, come: dict[int, Event]) -> list[tuple[int, EndReason]]:
    """come: by turn. Raises AssertionError where work stands still."""
    layout, settings = make_layout(PAGE), SchedulerSettings(64, 8, None, 1)
    cache = CacheManager(layout, pages, 8, ahead=settings.ahead)
    scheduler, executor = Scheduler(settings, PATIENT, cache), FakeExecutor(layout, pages, settings, {})
    found = list[tuple[int, EndReason]]()
    for turn in itertools.count():
        plan = scheduler.schedule(float(turn), [come[turn]] if turn in come else [])
        if plan is not None:
            executor.launch(plan)
        assert plan is not None or not scheduler.has_work, f"turn {turn}: requests wait, and none can be scheduled"
        outputs = scheduler.commit(None if plan is None else executor.collect(), float(turn))
        found += [(end.attempt, end.reason) for end in outputs.ends if not end.more]
        if turn > max(come) and not scheduler.has_work and not scheduler.has_news:
            return found
        assert turn < 3000
    raise AssertionError("it never ends")


def search(width: int, tenant: str = "a") -> Submit:
    request = make_request(1, 8, 12, scope=Scope(tenant))
    controls = replace(request.controls, top_logprobs=2 * width)
    return Submit(1, replace(request, beam=Beam(width), count=1, controls=controls))


def sets() -> Iterator[tuple[int, int, int, int]]:
    """Pages, width of the search, turn and prompt of the other one."""
    return itertools.product((12, 13, 16, 19), (4, 5), (2, 4, 6, 8), (2, 8, 12))


KINDS = {
    "of another tenant": lambda prompt: Submit(2, make_request(2, prompt, 8, scope=Scope("b"))),
    "of the same tenant": lambda prompt: Submit(2, make_request(2, prompt, 8, scope=Scope("a"))),
    "more urgent": lambda prompt: Submit(2, replace(make_request(2, prompt, 8, scope=Scope("a")), priority=-1)),
    "less urgent": lambda prompt: Submit(2, replace(make_request(2, prompt, 8, scope=Scope("a")), priority=1)),
    "a suspect": lambda prompt: Submit(2, make_request(2, prompt, 8, scope=Scope("a")), again=True, isolated_steps=4),
    "a suspect of another tenant": lambda prompt: Submit(
        2, make_request(2, prompt, 8, scope=Scope("b")), again=True, isolated_steps=4
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_both_end(kind: str) -> None:
    for pages, width, turn, prompt in sets():
        ended = ends_of(pages, {0: search(width), turn: KINDS[kind](prompt)})
        assert sorted(attempt for attempt, _ in ended) == [1, 2], (pages, width, turn, prompt)
        assert {reason for _, reason in ended} <= {EndReason.LENGTH, EndReason.STOP}, (pages, width, turn, prompt)
