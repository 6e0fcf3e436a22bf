"""Priorities that age: who starts before whom, which rows give way, and how often."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.matching import Match
from scheduler.event_intake import EventIntake
from scheduler.events import Event, Submit
from scheduler.policy import FirstCome, SchedulingPolicy
from scheduler.preemption_cause import PreemptionCause
from scheduler.priority import AgeingPriority
from scheduler.queue import Queue, QueueLoad
from scheduler.request import Request
from scheduler.rows import Index, Rows, Sequence
from scheduler.running import Running
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.executor import FakeExecutor, law
from tests.scheduler.planting import Faults, caught
from tests.scheduler.play import play
from tests.scheduler.reaching import unreached_runs
from tests.scheduler.test_preemption import scheduler_of, step, submit
from tests.scheduler.test_scheduler import result_of
from tests.scheduler.trace import plan_bytes
from tests.scheduler.workloads import Workload, make_request, workloads
from tests.support.examples import examples

pytestmark = pytest.mark.sample(3)

AGEINGS = (2.0, 0.0, 0.5, 3.25)  # seconds a level; a turn takes a second


@st.composite
def urgent_workloads(draw, **options):
    """Workloads in which requests have priorities, and the seconds of a level."""
    workload = draw(workloads(**options))
    come = tuple(
        replace(one, request=replace(one.request, priority=draw(st.integers(-2, 2)))) for one in workload.arrivals
    )
    return replace(workload, arrivals=come), draw(st.sampled_from(AGEINGS))


class Watched:
    """A scheduler under the laws of the policy, found from arrivals alone.

    Attributes:
        yields: Times that each sequence gave way to one that waited.
        lost: Times that each gave way, for pages too.
        vain: Turns since rows gave way to a sequence that has no row yet.
    """

    def __init__(self, workload: Workload, ageing: float, policy: SchedulingPolicy | None = None) -> None:
        self.workload, self.ageing = workload, ageing
        self.scheduler = scheduler = Scheduler(
            workload.settings, workload.queue, workload.cache, workload.hasher, policy=policy or AgeingPriority(ageing)
        )
        self.yields, self.lost, self.passed = Counter[tuple[int, int]](), Counter[tuple[int, int]](), 0
        self._come = {one.attempt: one for one in workload.arrivals}
        self._preempt, self._start = scheduler.running.preempt, scheduler.running.start
        scheduler.running.preempt = self._preempting
        scheduler.running.start = self._starting

    def place(self, attempt: int) -> float:
        """Seconds at which an attempt stands in line: with strict priorities, its priority."""
        one = self._come[attempt]
        return one.turn + one.request.priority * self.ageing if self.ageing else one.request.priority

    def _starting(self, sequence: Sequence, match: Match) -> int:
        mine = self.place(sequence.attempt), sequence.key
        for one in self.scheduler.queue.in_order():
            earlier = (self.place(one.attempt), one.key) < mine
            self.passed += earlier
            law(not earlier or one.awaited is not None, f"{sequence.key} starts before {one.key}, which waits in front")
        return self._start(sequence, match)

    def _preempting(self, row: int, cause: PreemptionCause) -> None:
        rows, queue = self.scheduler.rows, self.scheduler.queue.in_order()
        key = int(rows.attempt[row]), int(rows.index[row])
        if cause is PreemptionCause.PRIORITY:
            level = self.ageing or 1
            ahead = [one.key for one in queue if self.place(one.attempt) + level <= self.place(key[0])]
            law(ahead, f"{key} gives way, and none that waits is a level before it")
            behind = [
                other
                for other in rows.active().tolist()
                if (self.place(int(rows.attempt[other])), rows.attempt[other]) > (self.place(key[0]), key[0])
            ]
            most = self.workload.settings.max_preemptions
            bare = [one for one in behind if self.lost[int(rows.attempt[one]), int(rows.index[one])] < most]
            law(not bare, f"{key} gives way, rows {bare} are behind it")
            self.yields[key] += 1
            law(self.lost[key] < most, f"{key} gives way once more")
        self.lost[key] += cause.counts_to_bound
        self._preempt(row, cause)


def run(drawn: tuple[Workload, float]) -> Watched:
    """Plays a workload under the laws of any policy, and under this one's."""
    workload, ageing = drawn
    watched = Watched(workload, ageing)
    play(workload, watched.scheduler, FakeExecutor(workload.layout, workload.pages, workload.settings), patience=4)
    stats = watched.scheduler.stats()
    law(stats.preemptions_priority == watched.yields.total() <= stats.preemptions, f"preemptions by cause: {stats}")
    return watched


ONES = urgent_workloads() | urgent_workloads(cancels=True)

NOTES: dict[str, Callable[[Watched], object]] = {
    "a row gives way": lambda run: run.yields,
    "with ageing": lambda run: run.yields and run.ageing,
    "several rows": lambda run: len(run.yields) > 1,
    "with two steps in flight": lambda run: run.yields and run.workload.depth == 2,
    "with windows": lambda run: run.yields and run.workload.layout.windows,
    "for pages": lambda run: run.yields and run.workload.settings.max_sequences > len(run.workload.arrivals),
    "in lockstep": lambda run: run.yields and run.scheduler.lockstep.steps,
    "beside a lack of pages": lambda run: run.scheduler.stats().preemptions > run.yields.total() > 0,
    "one waits for a page": lambda run: run.passed,
}


@pytest.mark.slow
def test_drawn_workloads_reach_what_the_laws_speak_of() -> None:
    assert unreached_runs(ONES.map(run), NOTES) == set()


@settings(max_examples=examples(200), deadline=None)
@given(ONES)
def test_requests_start_by_priority_and_age_and_lesser_rows_give_way(drawn: tuple[Workload, float]) -> None:
    run(drawn)


@settings(max_examples=examples(100), deadline=None)
@given(urgent_workloads(several=True, cancels=True))
def test_also_with_searches_and_several_sequences(drawn: tuple[Workload, float]) -> None:
    run(drawn)


@settings(max_examples=examples(100), deadline=None)
@given(workloads(cancels=True, queue_timeout=True, resumed=True, faults=True), st.sampled_from(AGEINGS))
def test_equal_priorities_are_first_come(workload: Workload, ageing: float) -> None:
    """Plans and outputs, byte for byte, under all laws of `SchedulerDriver`, where no row gives way.

    None does but for a request that came a whole level before it, and was passed while its prefix was computed.
    """
    aged, first_come = (SchedulerDriver(workload, one).run() for one in (AgeingPriority(ageing), FirstCome()))
    if not aged.scheduler.stats().preemptions_priority:
        assert aged.trace == first_come.trace
    else:
        assert ageing
        assert workload.prefix_cache


class PlannedAnew(AgeingPriority):
    """Each step gets a new array of it, so that none is taken to go on as the one before it."""

    def running(self, rows: Rows, now: float) -> Index:
        return super().running(rows, now).copy()


class Recorded(FakeExecutor):
    """Keeps the bytes of all plans."""

    def launch(self, plan: StepPlan) -> None:
        self.__dict__.setdefault("plans", []).append(plan_bytes(plan))
        super().launch(plan)


@settings(max_examples=examples(150), deadline=None)
@given(ONES)
def test_steps_in_lockstep_are_those_of_steps_planned_anew(drawn: tuple[Workload, float]) -> None:
    workload, ageing = drawn
    plans = []
    for policy in (AgeingPriority(ageing), PlannedAnew(ageing)):
        executor = Recorded(workload.layout, workload.pages, workload.settings)
        play(workload, Watched(workload, ageing, policy).scheduler, executor, patience=4)
        plans.append(vars(executor).get("plans", []))
    assert plans[0] == plans[1]


# The bound


def wait_among_others(policy: SchedulingPolicy, priority: int, turns: int = 400) -> int:
    """Turn in which a request starts beside which a more urgent one comes in every turn; `turns` where it does not."""
    scheduler = scheduler_of(policy)
    step(scheduler, 0.0, submit(1, 0), submit(2, priority))
    for turn in range(1, turns):
        if 2 in step(scheduler, float(turn), submit(2 + turn, 0))[0]:
            return turn
    return turns


@pytest.mark.parametrize("count", [1, 2, 3])
def test_rows_that_share_their_pages_give_way_together(count: int) -> None:
    """The forty pages of a prompt are free once all of its sequences have given way."""
    scheduler = scheduler_of(AgeingPriority(10.0), rows=8, pages=60)
    started = dict[int, float]()

    def turn(now: float, *events: Event) -> None:
        plan = scheduler.schedule(now, events)
        outputs = scheduler.commit(None if plan is None else result_of(plan, [1] * len(plan.logits)), now)
        for start in outputs.starts:
            started.setdefault(start.attempt, now)

    turn(0.0, Submit(1, replace(make_request(1, 160, 60), priority=8, count=count)))
    for now in range(1, 6):
        turn(float(now))
    turn(6.0, Submit(2, make_request(2, 120, 4)))
    turn(7.0)
    assert started == {1: 0.0, 2: 6.0}
    assert scheduler.stats().preemptions_priority == count


@pytest.mark.parametrize("priority", [1, 3, 10])
def test_nobody_starves_beside_a_stream_of_more_urgent_requests(priority: int) -> None:
    """All before it arrive within priority x ageing seconds, and have one row, four steps each."""
    for ageing in (0.5, 2.0, 5.0):
        assert wait_among_others(AgeingPriority(ageing), priority) <= 4 * (priority * ageing + 2)


def test_without_ageing_it_starves() -> None:
    assert wait_among_others(AgeingPriority(0.0), 1) == wait_among_others(FirstCome(), 1) == 400


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(-3, 3), st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=25
)


@settings(max_examples=examples(150), deadline=None)
@given(ARRIVALS, st.sampled_from([ageing for ageing in AGEINGS if ageing]))
def test_none_that_comes_later_by_more_than_the_bound_starts_before(
    arrivals: list[tuple[int, int, int, int]], ageing: float
) -> None:
    scheduler, turn, waiting = scheduler_of(AgeingPriority(ageing), rows=2, pages=40), 0, dict[int, tuple[int, int]]()
    while turn < 21 or scheduler.has_work or scheduler.has_news:
        events = [submit(i, p, n, m) for i, (when, p, n, m) in enumerate(arrivals) if when == turn]
        waiting |= {one.attempt: (turn, one.request.priority) for one in events}
        for attempt in step(scheduler, float(turn), *events)[0]:
            came, q = waiting.pop(attempt)
            late = [one for one, (when, p) in waiting.items() if came > when + (p - q) * ageing]
            assert not late, f"{attempt} starts, {late} wait and came earlier by more than the bound"
        turn += 1
        assert turn < 1000
    assert not waiting


def test_what_is_ahead_of_a_request_is_what_is_before_it() -> None:
    policy, queue = AgeingPriority(2.0), Queue()

    def sequence(attempt: int, priority: int, now: float) -> Sequence:
        request: Request = submit(attempt, priority, 10).request
        return Sequence(attempt, request, np.empty(0, np.int32), now, policy.order(request, attempt, now, 0.0))

    for i in range(6):
        queue.push(sequence(i, 3, float(i)))
    for priority, before in ((3, 6), (1, 5), (0, 3), (-2, 0)):
        assert policy.ahead(queue, sequence(9, priority, 8.0), QueueLoad(6, 60)) == QueueLoad(before, 10 * before)
    assert policy.ahead(queue, sequence(9, 3, 8.0), QueueLoad(2, 20)) == QueueLoad(2, 20), "the others can start now"


def test_requests_of_one_moment_keep_their_order_and_their_places_apart() -> None:
    for ageing in (0.0, 0.001, 10.0, 86400.0):
        policy = AgeingPriority(ageing)
        orders = [policy.order(submit(1, 100).request, arrival, 1e6, 0.0) for arrival in range(1, 200, 16)]
        assert all(later - order == 16 for order, later in pairwise(orders))
        assert max(map(abs, orders)) < 2**59


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 86401.0])
def test_seconds_that_make_no_ageing_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"--priority-ageing is .*, must be in"):
        SchedulerSettings(priority_ageing=seconds)


# Bugs in the policy and in what preempts for it.

FAULTS = Faults()


@FAULTS.fault(AgeingPriority, "order")
def age_is_ignored(real):
    return lambda self, request, arrivals, now, runs: real(self, request, arrivals, 0.0, runs)


@FAULTS.fault(AgeingPriority, "order")
def priority_is_ignored(real):
    return lambda self, request, arrivals, now, runs: real(self, replace(request, priority=0), arrivals, now, runs)


@FAULTS.fault(AgeingPriority, "_lesser")
def any_row_behind_gives_way(real):
    return lambda self, sequence, rows, those: those[rows.order[those] > sequence.order]


@FAULTS.fault(AgeingPriority, "_lesser")
def equals_give_way(real):
    return lambda self, sequence, rows, those: those


@FAULTS.fault(AgeingPriority, "gives_way")
def the_best_of_the_lesser_gives_way(real):
    return lambda self, *args: real(self, *args)[::-1]


@FAULTS.fault(Running, "preempt")
def causes_are_not_counted(real):
    return lambda self, row, cause: real(self, row, PreemptionCause.PAGES)


@FAULTS.fault(EventIntake, "_submit")
def arrivals_come_in_reverse(real):
    def submit(self, event, now):
        self._arrivals -= 2
        real(self, event, now)

    return submit


@pytest.mark.parametrize("name", FAULTS)
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught(FAULTS[name], monkeypatch, urgent_workloads, run)
