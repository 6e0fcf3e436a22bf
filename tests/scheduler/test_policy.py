"""Any policy: one of a test's own beside those that have a name. Order changes, no token does."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from cache_manager.manager import CacheManager
from scheduler.dominant_share import DominantShare
from scheduler.events import Submit
from scheduler.fair import FairService
from scheduler.policies import POLICIES
from scheduler.policy import FirstCome, SchedulingPolicy
from scheduler.queue import Queue, QueueLoad
from scheduler.rows import Index, Rows, Sequence
from scheduler.scheduler import Scheduler
from scheduler.settings import SCHEDULING_POLICIES, SchedulerSettings
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.workloads import PATIENT, Workload, make_layout, make_request, workloads
from tests.support.examples import examples


class ShortestFirst(FirstCome):
    """Requests by the length of their prompts, and rows likewise; a request that does not fit is passed by others."""

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:
        return sorted(queue.in_order(), key=lambda one: (len(one.request.prompt), one.attempt, one.index))

    def running(self, rows: Rows, now: float) -> Index:
        active = rows.active()
        return active[np.lexsort((rows.index[active], rows.attempt[active], rows.prompt[active]))]

    def holds_the_line(self, sequence: Sequence, now: float) -> bool:
        return False


class Oldest(FirstCome):
    """Passes over a request until it has waited for `seconds`: an ageing policy's part."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:
        return (one for one in queue.in_order() if one.preempted or now - one.submitted >= self._seconds)


def run(workload: Workload, policy: SchedulingPolicy) -> None:
    """Runs the workload under a policy and the laws of `play`, in four times the turns that first come may take."""
    scheduler = Scheduler(workload.settings, workload.queue, workload.cache, workload.hasher, policy=policy)
    play(workload, scheduler, FakeExecutor(workload.layout, workload.pages, workload.settings), patience=4)


ANY_POLICY = st.sampled_from([ShortestFirst(), *(make(SchedulerSettings(), 100) for make in POLICIES.values())])


@st.composite
def of_tenants(draw, **options) -> Workload:
    """Workloads of up to three tenants, with priorities."""
    workload = draw(workloads(**options))
    tenants, priorities = st.sampled_from(("a", "a", "b", "c")), st.integers(-2, 2)
    come = []
    for one in workload.arrivals:
        scope = replace(one.request.scope, tenant=draw(tenants))
        come.append(replace(one, request=replace(one.request, scope=scope, priority=draw(priorities))))
    return replace(workload, arrivals=tuple(come))


@settings(max_examples=examples(150), deadline=None)
@given(of_tenants(cancels=True), ANY_POLICY)
def test_the_laws_hold_under_any_policy(workload: Workload, policy: SchedulingPolicy) -> None:
    run(workload, policy)


@settings(max_examples=examples(80), deadline=None)
@given(of_tenants(several=True), ANY_POLICY)
def test_also_with_searches_and_several_sequences(workload: Workload, policy: SchedulingPolicy) -> None:
    run(workload, policy)


def scheduler_of(policy: SchedulingPolicy, rows: int = 1, pages: int = 64) -> Scheduler:
    settings = SchedulerSettings(max_batched_tokens=64, max_sequences=rows)
    return Scheduler(settings, PATIENT, CacheManager(make_layout(4), pages, rows), policy=policy)


def starts(scheduler: Scheduler, submits: list[Submit], turns: int = 40) -> list[int]:
    """Attempts in order of their starts, run with an executor."""
    executor = FakeExecutor(scheduler.cache.layout, scheduler.cache.pool.total, scheduler.settings)
    found: list[int] = []
    for turn in range(turns):
        plan = scheduler.schedule(float(turn), submits if turn == 0 else [])
        if plan is not None:
            executor.launch(plan)
        outputs = scheduler.commit(executor.collect() if plan is not None else None, float(turn))
        found += [start.attempt for start in outputs.starts]
    return found


SUBMITS = [
    Submit(i, make_request(i, prompt, 2, scope=Scope(tenant)))
    for i, (prompt, tenant) in enumerate([(9, "a"), (20, "a"), (3, "a"), (12, "b")], 1)
]


@pytest.mark.parametrize(
    ("policy", "order"),
    [(FirstCome(), [1, 2, 3, 4]), (DominantShare(256), [1, 2, 3, 4]), (ShortestFirst(), [3, 1, 4, 2])],
    ids=["first come", "dominant share", "shortest first"],
)
def test_requests_start_in_the_policys_order(policy: SchedulingPolicy, order: list[int]) -> None:
    assert starts(scheduler_of(policy), SUBMITS) == order


def test_with_rows_to_share_tenants_take_turns() -> None:
    """The second tenant's first request comes before the first one's second: one holds a row, the other none."""
    assert starts(scheduler_of(DominantShare(256), rows=2), SUBMITS)[:2] == [1, 4]
    assert starts(scheduler_of(FirstCome(), rows=2), SUBMITS)[:2] == [1, 2]


def test_a_request_that_does_not_fit_is_passed_where_the_policy_lets_it() -> None:
    large, small = Submit(2, make_request(2, 40, 8)), Submit(3, make_request(3, 4, 2))
    running = Submit(1, make_request(1, 30, 20))
    assert starts(scheduler_of(FirstCome(), rows=4, pages=14), [running, large, small]) == [1, 2, 3]
    assert starts(scheduler_of(ShortestFirst(), rows=4, pages=14), [running, large, small])[-1] == 2


def test_a_request_that_the_policy_leaves_out_waits() -> None:
    scheduler = scheduler_of(Oldest(5.0), rows=4)
    assert scheduler.schedule(0.0, SUBMITS) is None
    assert scheduler.schedule(4.9, []) is None
    assert scheduler.schedule(5.0, []) is not None


def test_what_is_ahead_of_a_new_request() -> None:
    """A tenant's request starts before most of another's queue, where the two take turns."""
    queue, waiting = Queue(), QueueLoad(6, 60)
    for i in range(1, 7):
        queue.push(Sequence(i, make_request(i, 10, 1, scope=Scope("a")), np.empty(0, np.int32), 0.0, i))
    a, b = (Sequence(9, make_request(9, 10, 1, scope=Scope(one)), np.empty(0, np.int32), 0.0, 9) for one in "ab")
    assert FirstCome().ahead(queue, b, waiting) == waiting
    for policy in (DominantShare(100), FairService({})):
        assert policy.ahead(queue, b, waiting) == QueueLoad(0, 0)
        assert policy.ahead(queue, a, waiting) == waiting


def test_every_name_makes_its_policy() -> None:
    assert tuple(POLICIES) == SCHEDULING_POLICIES
    for name, make in POLICIES.items():
        settings = replace(SchedulerSettings(), policy=name)
        cache = CacheManager(make_layout(4), 8, settings.max_sequences)
        assert type(Scheduler(settings, PATIENT, cache).policy) is type(make(settings, 1))
    names = ", ".join(SCHEDULING_POLICIES)
    with pytest.raises(ValueError, match=f"--scheduling-policy is 'x', must be one of {names}"):
        SchedulerSettings(policy="x")
