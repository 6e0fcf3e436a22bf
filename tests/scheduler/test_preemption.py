"""Preemption for waiting sequences: which rows give way, how many, and how often."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cache_manager.block_hash import BlockHasher
from cache_manager.manager import CacheManager
from scheduler.admission import Admission
from scheduler.events import Abort, EndReason, Event, Submit
from scheduler.policy import FirstCome, SchedulingPolicy
from scheduler.preemption import Preemption
from scheduler.priority import AgeingPriority
from scheduler.rows import Rows
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.step import StepResult
from tests.scheduler.executor import FakeExecutor, logprobs_of
from tests.scheduler.test_scheduler import reasons, result_of
from tests.scheduler.workloads import PATIENT, SECRET, make_layout, make_request
from tests.support.planted import plant


def scheduler_of(policy: SchedulingPolicy, rows: int = 1, pages: int = 64, depth: int = 1) -> Scheduler:
    settings = SchedulerSettings(64, rows, None, depth)
    return Scheduler(settings, PATIENT, CacheManager(make_layout(4), pages, rows, ahead=settings.ahead), policy=policy)


def submit(attempt: int, priority: int, prompt: int = 4, tokens: int = 4) -> Submit:
    return Submit(attempt, replace(make_request(attempt, prompt, tokens), priority=priority))


def step(scheduler: Scheduler, now: float, *events: Submit) -> tuple[list[int], list[int]]:
    """Plans and commits a step. Returns attempts that start in it and that end with it."""
    plan = scheduler.schedule(now, events)
    outputs = scheduler.commit(None if plan is None else result_of(plan, [1] * len(plan.logits)), now)
    assert all(reason is EndReason.LENGTH for _, reason in reasons(outputs))
    return [start.attempt for start in outputs.starts], [end.attempt for end in outputs.ends]


def test_an_urgent_request_takes_the_row_of_the_least() -> None:
    scheduler = scheduler_of(AgeingPriority(10.0), rows=3)
    step(scheduler, 0.0, submit(1, 1, tokens=30), submit(2, 3, tokens=30), submit(3, 0, tokens=30))
    assert step(scheduler, 1.0, submit(4, 0)) == ([4], [])
    assert sorted(scheduler.rows.attempts()) == [1, 3, 4]
    assert scheduler.queue.attempts() == [2]
    assert step(scheduler, 2.0, submit(5, 1, tokens=2)) == ([], []), "1 came earlier, and is no whole level behind"


def test_as_many_rows_give_way_as_are_lacking() -> None:
    scheduler = scheduler_of(AgeingPriority(0.0), rows=4)
    step(scheduler, 0.0, *(submit(i, i, tokens=30) for i in range(4)))
    several = submit(5, 1)
    step(scheduler, 1.0, replace(several, request=replace(several.request, count=2)))
    assert sorted(set(scheduler.rows.attempts())) == [0, 1, 5]
    assert scheduler.queue.attempts() == [2, 3]


def test_who_gave_way_did_not_in_vain_where_pages_will_lack_later() -> None:
    scheduler = scheduler_of(AgeingPriority(0.0), rows=3, pages=24)
    for tokens in (1, 50):
        scheduler.backpressure.observe_step(tokens, 0.01 + tokens)
    scheduler.backpressure.observe_output(60)
    step(scheduler, 0.0, submit(1, 0, tokens=60), submit(2, 3, prompt=32))
    assert step(scheduler, 1.0, submit(3, 0, prompt=56, tokens=30)) == ([3], [])
    assert scheduler.queue.attempts() == [2]


def test_none_gives_way_where_all_that_may_do_not_suffice() -> None:
    scheduler = scheduler_of(AgeingPriority(0.0), rows=4)
    step(scheduler, 0.0, *(submit(i, i % 2, tokens=30) for i in range(4)))
    several = submit(5, 0)
    step(scheduler, 1.0, replace(several, request=replace(several.request, count=3)))
    assert sorted(scheduler.rows.attempts()) == [0, 1, 2, 3]
    assert not scheduler.stats().preemptions


class Turns:
    """Plays turns of a scheduler with as many steps in flight as it may have. started: attempts, in order."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.started = scheduler, list[int]()
        self._executor = FakeExecutor(scheduler.cache.layout, scheduler.cache.pool.total, scheduler.settings)
        self._turn = self._flying = 0

    def play(self, *events: Event) -> None:
        plan = self.scheduler.schedule(float(self._turn), events)
        assert plan is not None
        self._executor.launch(plan)
        self._flying += 1
        if self._flying == self.scheduler.settings.depth:
            outputs = self.scheduler.commit(self._executor.collect(), float(self._turn))
            self.started += [start.attempt for start in outputs.starts]
            self._flying -= 1
        self._turn += 1


@pytest.mark.parametrize("depth", [1, 2])
def test_pages_are_made_free_too(depth: int) -> None:
    """With two steps in flight the pages come back with the next step."""
    turns = Turns(scheduler_of(AgeingPriority(10.0), rows=8, pages=24, depth=depth))
    turns.play(*(submit(i, 5, prompt=14, tokens=30) for i in range(4)))
    turns.play()
    turns.play()
    turns.play(submit(9, 0, prompt=40))
    turns.play()
    turns.play()
    assert turns.started == [0, 1, 2, 3, 9]
    assert turns.scheduler.stats().preemptions_priority == turns.scheduler.stats().preemptions == 2


def test_no_row_gives_way_for_pages_that_return() -> None:
    turns = Turns(scheduler_of(AgeingPriority(10.0), rows=8, pages=20, depth=2))
    turns.play(*(submit(i, 5, prompt=12, tokens=30) for i in range(4)))
    turns.play()
    turns.play(Abort(0), submit(9, 0, prompt=16))
    turns.play()
    turns.play()
    assert turns.started == [0, 1, 2, 3, 9]
    assert not turns.scheduler.stats().preemptions


def test_a_prompt_that_takes_the_budget_goes_on() -> None:
    scheduler = scheduler_of(AgeingPriority(0.0), rows=2, pages=200)
    step(scheduler, 0.0, submit(1, 5, tokens=50))
    step(scheduler, 1.0, submit(2, 3, prompt=200))
    step(scheduler, 2.0, submit(3, 0))
    assert not scheduler.stats().preemptions, "1 would give way in vain: 2 would take its token of the step"
    turns = [turn for turn in range(3, 8) if 3 in step(scheduler, float(turn))[0]]
    assert turns == [4], "the first with budget"


def test_a_sequence_that_gave_way_often_is_protected() -> None:
    scheduler, ended = scheduler_of(AgeingPriority(0.0)), list[int]()
    for turn in range(60):
        urgent = [submit(2 + turn, 0, tokens=2)] if turn % 3 == 1 else []
        ended += step(scheduler, float(turn), *([submit(1, 9, tokens=20)] if not turn else urgent))[1]
        if 1 in ended:
            break
    assert ended[-1] == 1, "it ends while others come"
    assert scheduler.stats().preemptions_priority == scheduler.settings.max_preemptions == 3
    assert len(scheduler.queue) > 1


def test_a_request_that_another_engine_had_taken_comes_first_and_does_not_preempt_its_equals() -> None:
    for ageing in (0.0, 10.0):
        scheduler = scheduler_of(AgeingPriority(ageing))
        step(scheduler, 0.0, submit(1, 0, tokens=6))
        step(scheduler, 1.0, submit(2, -1), replace(submit(3, 0), again=True))
        assert scheduler.rows.attempts() == [1], "3 is first in line, and 1 no level behind it"
        assert [attempt for turn in range(2, 20) for attempt in step(scheduler, float(turn))[0]] == [3, 2]


def test_none_gives_way_first_come() -> None:
    scheduler = scheduler_of(FirstCome())
    step(scheduler, 0.0, submit(1, 100, tokens=9))
    assert step(scheduler, 1.0, submit(2, -100)) == ([], [])
    assert not scheduler.stats().preemptions


# Bugs, each with the test that catches it.


def the_protection_is_forgotten(real):
    def sequence(self, row):
        found = real(self, row)
        found.preemptions = 0
        return found

    return sequence


def rows_give_way_one_at_a_time(real):
    return lambda self, *args: real(self, *args)[:1]


def rows_give_way_in_vain(real):
    return lambda self, sequence, match, those: real(self, sequence, match, those) or those


def pages_that_return_are_forgotten(real):
    def lacking(self, sequence, match):
        lack = real(self, sequence, match)
        return replace(lack, pages=lack.pages + self._cache.pool.returning)

    return lacking


def no_budget_is_kept(real):
    return lambda self, *args: True


FAULTS: list[tuple[type, str, Callable, Callable[[], None]]] = [
    (Rows, "sequence", the_protection_is_forgotten, test_a_sequence_that_gave_way_often_is_protected),
    (AgeingPriority, "gives_way", rows_give_way_one_at_a_time, test_as_many_rows_give_way_as_are_lacking),
    (Preemption, "_enough", rows_give_way_in_vain, test_none_gives_way_where_all_that_may_do_not_suffice),
    (
        Admission,
        "lacking",
        pages_that_return_are_forgotten,
        test_no_row_gives_way_for_pages_that_return,
    ),
    (Preemption, "_leaves_budget", no_budget_is_kept, test_a_prompt_that_takes_the_budget_goes_on),
]


@pytest.mark.parametrize(("target", "name", "stand_in", "shows"), FAULTS, ids=[one[2].__name__ for one in FAULTS])
def test_a_test_catches_each(
    target: type, name: str, stand_in: Callable, shows: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, target, name, stand_in)
    with pytest.raises(AssertionError):
        shows()


def preempted_and_started(shared: bool) -> tuple[int, int]:
    """Runs an urgent request beside a lesser one that has its prefix, or has not. Returns how often each was."""
    room = SchedulerSettings(max_batched_tokens=512, max_sequences=4, policy="priority")
    cache = CacheManager(make_layout(4), 40, 4)
    scheduler = Scheduler(room, NO_QUEUE_LIMITS, cache, BlockHasher(SECRET, b"model", 4))
    common, other = (tuple((factor * i + 1) % 11 for i in range(60)) for factor in (1, 3))
    equal = make_request(1, tuple((5 * i + 2) % 11 for i in range(40)), 60)
    lesser = replace(make_request(2, (*common, 1, 2, 3, 4), 60), priority=5)
    urgent = make_request(3, (*(common if shared else other), *range(1, 9), *(7 * tuple(range(1, 9)))), 2)
    started = 0
    for turn in range(20):
        events = {0: [Submit(1, equal)], 1: [Submit(2, lesser)], 4: [Submit(3, urgent)]}.get(turn, [])
        plan = scheduler.schedule(turn / 50, events)
        assert plan is not None
        n = len(plan.logits)
        drawn = np.ones(n, np.int32)
        outputs = scheduler.commit(StepResult(plan.step, drawn, logprobs_of(drawn)), (turn + 1) / 50)
        started += sum(one.attempt == 3 for one in outputs.starts)
    return scheduler.stats().preemptions_priority, started


@pytest.mark.parametrize("shared", [False, True])
def test_no_row_gives_way_for_pages_that_the_other_goes_on_from(shared: bool) -> None:
    """They stay held. So the request would not fit, and the row would give way in vain."""
    preempted, started = preempted_and_started(shared)
    assert preempted == started
