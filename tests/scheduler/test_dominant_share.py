"""Tenants that wait at once start by turns: next is who has the least of what it has most of."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from scheduler.backpressure import FEWEST_STEPS
from scheduler.dominant_share import DominantShare
from scheduler.events import EndReason, Submit
from scheduler.preemption_cause import PreemptionCause
from scheduler.rows import Sequence, sequences_of
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings
from tests.scheduler.test_scheduler import engine, reasons, step
from tests.scheduler.workloads import make_layout, make_request
from tests.support.examples import examples

ROWS, PAGES, PAGE = 6, 40, 4


def submit(attempt: int, tenant: str, prompt: int = 3, tokens: int = 5) -> Submit:
    return Submit(attempt, make_request(attempt, prompt, tokens, scope=Scope(tenant)))


def held(scheduler: Scheduler, tenant: str) -> Fraction:
    """Its dominant share, from the sequences themselves."""
    rows = [row for row in scheduler.rows.active().tolist() if scheduler.rows.sequence(row).tenant == tenant]
    tokens = sum(int(scheduler.rows.length[row]) for row in rows)
    return max(Fraction(len(rows), ROWS), Fraction(tokens, PAGES * PAGE))


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from("abc"), st.integers(1, 30), st.integers(1, 12)),
    min_size=1,
    max_size=25,
)


@settings(max_examples=examples(150), deadline=None)
@given(ARRIVALS)
@example([(0, "a", 26, 12), (0, "a", 26, 12), (6, "a", 12, 6), (6, "a", 25, 6), (6, "a", 1, 1), (6, "b", 25, 6)])
def test_next_is_who_has_the_least(arrivals: list[tuple[int, str, int, int]]) -> None:
    # None passes one that lacks room: `test_backfilling` has the law of those that do.
    scheduler = engine(rows=ROWS, pages=PAGES, page_size=PAGE, budget=64, backfill=0.0)
    start, checked, turn = scheduler.running.start, list[str](), 0

    def checking(sequence: Sequence, match: Match) -> int:
        waiting = {one.tenant: one for one in reversed(scheduler.queue.in_order())}
        mine = held(scheduler, sequence.tenant)
        # A sequence that gave way comes before all newcomers: others may hold rows that wait for it.
        for tenant, first in () if sequence.preempted else waiting.items():
            others = held(scheduler, tenant)
            assert mine <= others, f"{sequence.tenant} has {mine} and starts, {tenant} has {others} and waits"
            assert mine < others or sequence.order <= first.order, "of equals the first to come is the first"
        assert sequence is waiting[sequence.tenant], "of one tenant, too"
        checked.append(sequence.tenant)
        return start(sequence, match)

    scheduler.running.start = checking
    told = list[EndReason]()
    while turn < 13 or scheduler.has_work or scheduler.has_news:
        events = [
            submit(i, tenant, prompt, tokens)
            for i, (when, tenant, prompt, tokens) in enumerate(arrivals)
            if when == turn
        ]
        told += [reason for _, reason in reasons(step(scheduler, float(turn), events))]
        turn += 1
        assert turn < 2000
    assert told == [EndReason.LENGTH] * len(arrivals), "all are served in the end"
    assert len(checked) >= len(arrivals)


def test_a_tenant_alone_may_have_everything() -> None:
    scheduler = engine(rows=ROWS, pages=PAGES)
    step(scheduler, events=[submit(i, "a") for i in range(20)])
    assert scheduler.rows.used == ROWS


def test_who_comes_late_gets_its_part_as_others_end() -> None:
    scheduler = engine(rows=4, pages=PAGES)
    step(scheduler, events=[submit(i, "a", tokens=2 + i % 4) for i in range(12)])
    step(scheduler, 1.0, events=[submit(100 + i, "b", tokens=50) for i in range(8)])
    most = 0
    for turn in range(2, 12):
        step(scheduler, float(turn))
        tenants = [scheduler.rows.sequence(row).tenant for row in scheduler.rows.active()]
        most = max(most, tenants.count("b"))
    assert most == tenants.count("b") == 2, "half of the rows, as long as both want more"
    assert scheduler.queue.tenants == 2


def test_a_tenants_queue_is_bounded_and_leaves_room_for_others() -> None:
    limits = QueueLimits(10, 1e9, 1e9, tenant_share=0.5)
    scheduler = engine(rows=1, pages=PAGES, queue=limits)
    ended = reasons(step(scheduler, events=[submit(i, "a", tokens=50) for i in range(8)]))
    assert [reason for _, reason in ended] == [EndReason.QUEUE_FULL] * 2, "one starts, five may wait"
    assert not reasons(step(scheduler, 1.0, events=[submit(100, "b")])), "it has a part of its own"
    assert not reasons(step(scheduler, 2.0, events=[submit(200 + i, "default") for i in range(3)]))


def test_a_wait_is_predicted_for_ones_own_turn() -> None:
    scheduler = engine(rows=1, pages=PAGES, queue=QueueLimits(100, 1e9, 60.0))
    for _ in range(FEWEST_STEPS):
        scheduler.backpressure.observe_step(1, 10.0)
    step(scheduler, 0.0, events=[submit(0, "a", tokens=60)])
    step(scheduler, 31.0, events=[submit(1, "a", tokens=12)])
    refused = step(scheduler, 32.0, events=[submit(50, "a"), submit(60, "b")])
    assert reasons(refused) == [(50, EndReason.QUEUE_FULL)], "the other tenant does not wait for those before it"


@pytest.mark.parametrize("policy", ["dominant-share", "first-come", "fair", "deadline", "fair-deadline", "priority"])
def test_an_urgent_request_is_not_refused_for_a_wait_of_those_behind_it(policy: str) -> None:
    settings = SchedulerSettings(64, 1, policy=policy)
    cache = CacheManager(make_layout(4), PAGES, 1, ahead=settings.ahead)
    scheduler = Scheduler(settings, QueueLimits(100, 1e9, 60.0), cache)
    for _ in range(FEWEST_STEPS):
        scheduler.backpressure.observe_step(1, 10.0)
    step(scheduler, 0.0, events=[submit(0, "a", tokens=60)])
    step(scheduler, 31.0, events=[submit(1, "a", tokens=12)])
    urgent = submit(50, "a")
    refused = step(scheduler, 32.0, events=[replace(urgent, request=replace(urgent.request, priority=-100))])
    assert not reasons(refused)
    assert reasons(step(scheduler, 33.0, events=[submit(51, "a")])) == [(51, EndReason.QUEUE_FULL)]


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(-100, 100), st.integers(1, 20)), min_size=1, max_size=20))
def test_of_those_that_wait_the_lowest_priority_starts_first(arrivals: list[tuple[int, int, int]]) -> None:
    scheduler, turn = engine(rows=2, pages=PAGES, page_size=PAGE, budget=64), 0
    waiting, started = dict[int, tuple[int, int, int]](), list[int]()
    while turn < 9 or scheduler.has_work or scheduler.has_news:
        events = []
        for i, (when, priority, prompt) in enumerate(arrivals):
            if when == turn:
                request = replace(make_request(i, prompt, 4), priority=priority)
                events.append(Submit(i, request))
                waiting[i] = priority, turn, i
        outputs = step(scheduler, float(turn), events)
        for start in outputs.starts:
            mine = waiting.pop(start.attempt)
            assert all(mine < other for other in waiting.values()), "someone with a lower one, or earlier, still waits"
            started.append(start.attempt)
        turn += 1
        assert turn < 1000
    assert sorted(started) == list(range(len(arrivals)))


def test_a_lower_priority_is_not_preempted_for_a_higher_one() -> None:
    scheduler = engine(rows=2, pages=6, page_size=2, budget=16)
    step(scheduler, events=[Submit(1, replace(make_request(1, 4, 7), priority=5))])
    step(scheduler, 1.0, events=[Submit(2, replace(make_request(2, 4, 7), priority=-5))])
    assert scheduler.rows.used == 2
    ended, turn = list[int](), 2
    while scheduler.has_work or scheduler.has_news:
        ended += [attempt for attempt, _ in reasons(step(scheduler, float(turn)))]
        turn += 1
    assert scheduler.stats().preemptions > 0, "else nothing was shown"
    assert ended == [2, 1]


def running(*submits: Submit) -> Scheduler:
    scheduler = engine(rows=ROWS, pages=PAGES, page_size=PAGE, budget=256)
    scheduler.schedule(0.0, list(submits))
    return scheduler


def test_a_long_sequence_counts_by_its_tokens() -> None:
    scheduler = running(submit(1, "a", prompt=80), submit(2, "b"))
    shares = DominantShare(PAGES * PAGE).shares(scheduler.rows)
    assert [shares[scheduler.rows.tenant_number(one)] for one in "ab"] == [81 / 160, 1 / 6]


def test_rows_that_are_kept_for_siblings_count_for_their_tenant() -> None:
    scheduler = engine(rows=ROWS, pages=PAGES, page_size=PAGE, budget=8)
    several = submit(1, "a", prompt=20)
    scheduler.schedule(0.0, [replace(several, request=replace(several.request, count=3))])
    assert DominantShare(PAGES * PAGE).shares(scheduler.rows)[scheduler.rows.tenant_number("a")] == 3 / ROWS


def test_those_that_gave_way_come_before_all_others() -> None:
    scheduler = running(submit(1, "a"), submit(2, "a"))
    scheduler.running.preempt(scheduler.rows.row_of(2) or 0, PreemptionCause.PAGES)
    for event in (submit(3, "b"), submit(4, "a")):
        for sequence in sequences_of(event, 1.0, event.attempt):
            scheduler.queue.push(sequence)
    waiting = DominantShare(PAGES * PAGE).waiting(scheduler.queue, scheduler.rows, 1.0)
    assert [one.attempt for one in waiting] == [2, 3, 4]
