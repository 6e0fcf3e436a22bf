"""The policy `fair-deadline`: tenants by the service that they have had, and within one tenant least slack first."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from scheduler.events import EndReason, Submit
from scheduler.fair import FairService
from scheduler.least_slack import LeastSlack
from scheduler.policies import POLICIES
from scheduler.queue import Queue, QueueLoad
from scheduler.rows import Sequence
from scheduler.settings import SchedulerSettings
from tests.scheduler.executor import LawBroken, law
from tests.scheduler.test_fair import BURSTS, EQUAL, ROOM, WEIGHTS, Books, Burst, run
from tests.scheduler.test_least_slack import peak_of, served_in_time
from tests.scheduler.test_preemption import scheduler_of
from tests.scheduler.workloads import make_request
from tests.support.examples import examples
from tests.support.planted import plant


def check_bound(bursts: list[Burst], weights: dict[str, float], room: tuple[int, int]) -> Books:
    """Also that of one tenant the request with the least slack is next: `run` looks at each start."""
    books = run(bursts, FairService(weights, LeastSlack()), weights, *room)
    law(books.gap <= books.bound, f"service differs by {books.gap}, the bound is {books.bound}")
    return books


@st.composite
def with_deadlines(draw: st.DrawFn) -> list[Burst]:
    return [replace(one, deadline=draw(st.none() | st.integers(1, 80))) for one in draw(BURSTS)]


@settings(max_examples=examples(60), deadline=None)
@given(with_deadlines(), st.sampled_from([WEIGHTS, dict.fromkeys("abc", 1.0)]), ROOM)
def test_service_of_tenants_that_wait_stays_within_the_bound(
    bursts: list[Burst], weights: dict[str, float], room: tuple[int, int]
) -> None:
    check_bound(bursts, weights, room)


SHOWING = [Burst(0, "a", 60, 4, 4, deadline=400), Burst(1, "b", 40, 20, 10, deadline=900)]


def check_what_shows() -> None:
    books = check_bound(SHOWING, EQUAL, (3, 64))
    assert min(sum(one) for one in books.backlogged.values()) > 50, "else nothing was shown"


def test_a_late_request_with_less_slack_is_next_of_its_tenant_and_of_no_other() -> None:
    scheduler = scheduler_of(FairService({}, LeastSlack()))
    for attempt, tenant, deadline in ((1, "a", 90.0), (2, "a", 80.0), (3, "b", 99.0), (4, "a", None), (5, "b", 1.0)):
        request = replace(make_request(attempt, scope=Scope(tenant)), deadline=deadline)
        scheduler.intake.take(Submit(attempt, request), 0.0)
    scheduler.rows.service.lift(scheduler.rows.tenant_number("b"), 100.0)
    order = [one.attempt for one in scheduler.policy.waiting(scheduler.queue, scheduler.rows, 0.0)]
    assert order == [2, 1, 4, 5, 3], "b has had more, however urgent its requests are"


def test_what_can_no_longer_be_ready_is_refused_and_costs_its_tenant_nothing() -> None:
    scheduler = scheduler_of(FairService({}, LeastSlack()))
    late = [Submit(i, replace(make_request(i, scope=Scope("a")), deadline=2.0)) for i in (1, 2, 3)]
    scheduler.schedule(0.0, [Submit(9, make_request(9, max_tokens=40, scope=Scope("b")))])
    scheduler.schedule(0.0, late)
    scheduler.schedule(5.0, [])
    assert [(end.attempt, end.reason) for end in scheduler.pending_ends] == [
        (attempt, EndReason.QUEUE_TIMEOUT) for attempt in (1, 2, 3)
    ]
    assert not scheduler.rows.service.input[scheduler.rows.tenant_number("a")]


def test_only_its_tenants_tighter_requests_are_ahead_of_a_request() -> None:
    queue, policy = Queue(), FairService({}, LeastSlack())

    def sequence(attempt: int, tenant: str, deadline: float) -> Sequence:
        request = replace(make_request(attempt, 10, 1, scope=Scope(tenant)), deadline=deadline)
        return Sequence(attempt, request, np.empty(0, np.int32), 0.0, policy.order(request, attempt, 0.0, 1.0))

    for i in range(1, 9):
        queue.push(sequence(i, "ab"[i % 2], 10.0 * i))
    assert policy.ahead(queue, sequence(9, "a", 35.0), QueueLoad(8, 80)) == QueueLoad(2, 20), "2, and one of b"
    assert policy.ahead(queue, sequence(9, "c", 35.0), QueueLoad(8, 80)) == QueueLoad(0, 0)


@pytest.mark.slow  # the same overload as of test_least_slack
def test_goodput_holds_under_overload_within_a_tenant() -> None:
    """At five times the peak, where `fair` serves who came first, and that is too late for most."""
    peak = peak_of("fair-deadline")
    kept, lost = served_in_time("fair-deadline", 5 * peak)[0], served_in_time("fair", 5 * peak)[0]
    assert kept > 0.9 * peak
    assert lost < 0.3 * peak


def test_the_setting_makes_it() -> None:
    policy = POLICIES["fair-deadline"](SchedulerSettings(tenant_weights="a=2"), 1)
    assert isinstance(policy, FairService)
    assert (policy.weight("a"), policy.weight("b")) == (2.0, 1.0)
    assert policy.patience(replace(make_request(1), deadline=3.0), 5.0) == 0.0


# Bugs, which the laws catch.


def tenants_do_not_matter(real: Callable) -> Callable:
    return lambda self, queue, rows: iter(queue.in_order())


def slack_does_not_matter_within(real: Callable) -> Callable:
    def by_service(self, queue, rows):
        return iter(sorted(real(self, queue, rows), key=lambda one: (one.tenant, -one.order)))

    return by_service


@pytest.mark.parametrize("stand_in", [tenants_do_not_matter, slack_does_not_matter_within])
def test_harness_catches(stand_in: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, FairService, "_by_service", stand_in)
    with pytest.raises(LawBroken):
        check_what_shows()


def test_without_a_fault_they_hold() -> None:
    check_what_shows()
