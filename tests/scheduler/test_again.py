"""Attempts that another engine had taken, and those that run alone."""

from dataclasses import replace

from cache_manager.tier import HostTier
from scheduler.events import EndReason, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits
from tests.scheduler.test_scheduler import engine, pairs, reasons, result_of, step
from tests.scheduler.workloads import make_request


def submit(attempt: int, *emitted: int, queue_timeout: float | None = None, again: bool = True, **how: int) -> Submit:
    return Submit(attempt, make_request(attempt, 3, 4, queue_timeout=queue_timeout), (emitted,), again=again, **how)


def running(scheduler: Scheduler) -> set[int]:
    return set(scheduler.rows.attempt[scheduler.rows.active()].tolist())


def test_they_are_not_refused_and_go_on_where_they_were() -> None:
    scheduler = engine(rows=1, queue=QueueLimits(requests=1))
    step(scheduler, 0.0, [Submit(1, make_request(1, 3, 4)), Submit(2, make_request(2, 3, 4))])
    outputs = step(scheduler, 0.0, [submit(3, 7, 8), Submit(4, make_request(4, 3, 4))])
    assert reasons(outputs) == [(4, EndReason.QUEUE_FULL)]
    assert scheduler.queue.attempts() == [3, 2], "it comes before requests that were not served yet"
    found = []
    while scheduler.has_work:
        found += [(attempt, position) for attempt, position, _ in pairs(step(scheduler)) if attempt == 3]
    assert found == [(3, 2), (3, 3)]


def test_among_themselves_they_keep_their_order() -> None:
    scheduler = engine(rows=1)
    step(scheduler, 0.0, [Submit(1, make_request(1, 3, 4))])
    step(scheduler, 0.0, [Submit(2, make_request(2, 3, 4)), submit(3), submit(4, 5), submit(5)])
    assert scheduler.queue.attempts() == [3, 4, 5, 2]


def test_they_wait_as_long_as_they_say_and_no_shorter() -> None:
    scheduler = engine(rows=1, queue=QueueLimits(wait=2.0))
    step(scheduler, 0.0, [Submit(1, replace(make_request(1, 3, 30)))])
    step(scheduler, 0.0, [submit(2), submit(3, queue_timeout=7.0)])
    assert reasons(step(scheduler, 6.9)) == []
    assert reasons(step(scheduler, 7.0)) == [(3, EndReason.QUEUE_TIMEOUT)]
    assert scheduler.queue.attempts() == [2]


def test_alone_is_with_nobody() -> None:
    scheduler = engine(rows=4)
    step(scheduler, 0.0, [Submit(1, make_request(1, 3, 4)), Submit(2, make_request(2, 3, 6))])
    events = [submit(3, 5, isolated_steps=99), submit(4), Submit(5, make_request(5, 3, 4))]
    seen = []
    while scheduler.has_work:
        step(scheduler, 0.0, events)
        events = []
        if (now := running(scheduler)) and (not seen or seen[-1] != now):
            seen.append(now)
    assert seen == [{1, 2}, {2}, {3}, {4, 5}], "3 waits for all to leave, and all wait for 3"
    assert scheduler.live_attempts() == []


def test_others_come_back_once_it_has_gone_far_enough() -> None:
    scheduler = engine(rows=4, chunk=2)
    alone = Submit(1, make_request(1, 4, 9), ((5,),), again=True, isolated_steps=3)
    step(scheduler, 0.0, [alone, Submit(2, make_request(2, 3, 4))])
    steps = 1
    while running(scheduler) == {1}:
        step(scheduler)
        steps += 1
    assert running(scheduler) == {1, 2}
    assert steps - 1 == 3 + 3, "three chunks of its five tokens, and as many steps as it was to go beyond"


def test_it_is_told_while_one_runs_alone() -> None:
    scheduler = engine(rows=4)
    step(scheduler, 0.0, [Submit(1, make_request(1, 3, 2)), submit(2, 5, isolated_steps=99)])
    told = []
    while scheduler.has_work:
        told.append((step(scheduler).stats.isolated, running(scheduler)))
    assert (1, {2}) in told
    assert told[-1] == (0, set()), "which stands until there is work again"


def test_two_that_run_alone_take_turns() -> None:
    scheduler = engine(rows=4)
    step(scheduler, 0.0, [submit(1, isolated_steps=99), submit(2, isolated_steps=99)])
    seen = [running(scheduler)]
    while scheduler.has_work:
        step(scheduler)
        seen.append(running(scheduler))
    assert {frozenset(now) for now in seen} == {frozenset({1}), frozenset({2}), frozenset()}


def test_after_its_time_alone_none_of_its_sequences_is_alone() -> None:
    """Two that go on from outputs of their own, of which one has no row yet when the time is over."""
    scheduler = engine(rows=1)
    request = replace(make_request(1, 3, 9), count=2)
    step(scheduler, 0.0, [Submit(1, request, ((5,), (6, 7)), again=True, isolated_steps=2)])
    for _ in range(4):
        step(scheduler)
    step(scheduler, 0.0, [submit(2)])
    assert [sequence.isolated_steps for sequence in scheduler.queue.in_order()] == [0, 0]


def test_sequences_of_one_that_runs_alone_run_together() -> None:
    scheduler = engine(rows=4)
    request = replace(make_request(1, 3, 6), count=3)
    step(scheduler, 0.0, [Submit(1, request, ((5,), (), ()), again=True, isolated_steps=99), submit(2)])
    step(scheduler)
    assert running(scheduler) == {1}
    assert scheduler.rows.used == 3


def test_one_that_is_preempted_comes_back_isolated() -> None:
    """The copy that it went on from was lost: others go on waiting while it computes that again."""
    scheduler = engine(rows=4)
    scheduler.cache.pool.tier = HostTier(4)
    step(scheduler, 0.0, [submit(1, 5, isolated_steps=99), submit(2)])
    plan = scheduler.schedule(0.0, [])
    (page,) = scheduler.cache.tables.row(int(plan.logits[0, 1]))[:1].tolist()
    scheduler.commit(replace(result_of(plan, [1]), lost_pages=(page,)), 0.0)
    assert running(scheduler) == set()
    assert step(scheduler).stats.isolated == 1
    assert running(scheduler) == {1}


def test_one_that_was_isolated_once_comes_back_beside_others() -> None:
    """After its isolation two that are more urgent take its pages; it need not wait until both have ended."""
    scheduler = engine(rows=3, pages=9, page_size=4)
    step(scheduler, 0.0, [Submit(1, make_request(1, 4, 28), ((5,),), again=True, isolated_steps=2)])
    urgent = [replace(make_request(attempt, 4, tokens), priority=-1) for attempt, tokens in ((2, 24), (3, 8))]
    seen = [running(scheduler)]
    events = [Submit(attempt, request, again=True) for attempt, request in enumerate(urgent, 2)]
    while scheduler.has_work:
        step(scheduler, 0.0, events)
        events = []
        if seen[-1] != running(scheduler):
            seen.append(running(scheduler))
    assert seen[:5] == [{1}, {1, 2, 3}, {2, 3}, {2}, {1, 2}]
