"""The policy `deadline`: who must start soonest is first, and who would be late is refused, so that goodput holds."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.manager import CacheManager
from scheduler.events import Abort, EndReason, Event, Logprobs, Submit
from scheduler.least_slack import LEVEL, MARGIN, LeastSlack
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepResult
from scheduler.step_costs import StepWork
from tests.scheduler.test_step_time import CPU
from tests.scheduler.workloads import make_layout, make_request
from tests.support.planted import plant, planted

ROWS, PROMPT, OUTPUT = 32, 60, 40
ENDLESS = QueueLimits(requests=10**6, pools_of_tokens=1e9, wait=1e6)


@dataclass(frozen=True)
class Wish:
    """A request: when it comes, and in how many seconds it has to be complete."""

    at: float
    deadline: float


@settings(max_examples=100)  # with fewer a planted fault may not show
@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 50), st.floats(0, 20), st.integers(-3, 3)), min_size=2, max_size=9
    )
)
def test_least_slack_is_first(drawn: list[tuple[float, float, float, int]]) -> None:
    """At any moment, by slack as numbers say it; a level of priority is as LEVEL seconds of it."""
    policy = LeastSlack()
    orders, starts = list[int](), list[float]()
    for number, (now, deadline, seconds, priority) in enumerate(drawn):
        request = replace(make_request(number), deadline=deadline, priority=priority)
        orders.append(policy.order(request, number + 1, now, seconds))
        starts.append(now + deadline - MARGIN * seconds + LEVEL * priority)
    for one in range(len(drawn)):
        for other in range(len(drawn)):
            if starts[one] < starts[other] - 1 / 1024:
                assert orders[one] < orders[other]


def wishes(rate: float, seconds: float, seed: int) -> list[Wish]:
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, int(rate * seconds)))
    return [Wish(float(at), float(rng.uniform(4, 12))) for at in times]


def served_in_time(policy: str, rate: float, seconds: float = 60.0, seed: int = 1) -> tuple[float, int]:
    """Clients leave at their deadlines. Returns how many are in time, of a second, and how many are refused."""
    layout, wanted, now = make_layout(16), wishes(rate, seconds, seed), 0.0
    settings = SchedulerSettings(max_batched_tokens=256, max_sequences=ROWS, policy=policy)
    pages = ROWS * layout.pages_for(PROMPT + OUTPUT + 32)
    scheduler = Scheduler(settings, ENDLESS, CacheManager(layout, pages, ROWS))
    coming, live, in_time, refused = list(enumerate(wanted)), dict[int, float](), 0, 0
    while coming or live:
        events: list[Event] = [Abort(number) for number, until in live.items() if until <= now]
        for event in events:
            del live[event.attempt]  # type: ignore[union-attr]
        while coming and coming[0][1].at <= now:
            number, wish = coming.pop(0)
            live[number] = wish.at + wish.deadline
            request = replace(make_request(number, PROMPT, OUTPUT), deadline=live[number] - now)
            events.append(Submit(number, request))
        plan, result = scheduler.schedule(now, events), None
        if plan is not None:
            now += CPU.seconds(StepWork.of(plan.slices))
            n = len(plan.logits)
            none = np.empty((n, 0))
            logprobs = Logprobs(
                np.zeros(n, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32)
            )
            result = StepResult(plan.step, np.ones(n, np.int32), logprobs)
        elif coming and not live:
            now = max(now, coming[0][1].at)
        else:
            now += 0.01
        for end in scheduler.commit(result, now).ends:
            until = live.pop(end.attempt, None)
            in_time += until is not None and end.reason is EndReason.LENGTH and now <= until
            refused += end.reason in (EndReason.QUEUE_FULL, EndReason.QUEUE_TIMEOUT)
    return in_time / seconds, refused


RATES = (8.0, 10.0, 12.0, 14.0, 16.0)


def peak_of(policy: str) -> float:
    """Returns the most requests in time a second over some rates."""
    return max(served_in_time(policy, rate)[0] for rate in RATES)


def goodput_at_overload(policy: str) -> tuple[float, float]:
    """Returns the most requests in time a second over some rates, and those at five times as many as that."""
    peak = peak_of(policy)
    return peak, served_in_time(policy, 5 * peak)[0]


def test_goodput_holds_under_overload() -> None:
    """At five times its peak 90 % of that is served in time; with first come, first served less than a third."""
    peak, overloaded = goodput_at_overload("deadline")
    assert overloaded > 0.9 * peak
    plain, collapsed = goodput_at_overload("first-come")
    assert peak >= 0.97 * plain
    assert collapsed < 0.3 * plain


def test_what_can_be_in_time_is_not_refused() -> None:
    assert served_in_time("deadline", 8.0)[1] == 0


def late_ones_wait(_):
    return lambda self, request, seconds: float("inf")


def late_ones_first(_):
    return lambda self, request, arrivals, now, seconds: -arrivals


PLANTED = {
    "what is late keeps its place": ("patience", late_ones_wait),
    "the last is first": ("order", late_ones_first),
}


@pytest.mark.parametrize("name", planted(PLANTED, rare=["what is late keeps its place"]))
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, LeastSlack, *PLANTED[name])
    law = test_least_slack_is_first if name == "the last is first" else test_goodput_holds_under_overload
    with pytest.raises(AssertionError):
        law()


@pytest.mark.parametrize("deadline", [1e10, math.inf])
@pytest.mark.parametrize("policy", ["deadline", "fair-deadline"])
def test_a_request_with_all_the_time_in_the_world_is_served(policy: str, deadline: float) -> None:
    """As `--max-request-time inf` gives each."""
    scheduler = scheduler_of(policy)
    late, soon = (replace(make_request(i, 20, 10), deadline=one) for i, one in enumerate((deadline, 50.0)))
    assert scheduler.schedule(1e6, [Submit(0, late), Submit(1, soon)]) is not None
    assert sorted(scheduler.rows.attempts()) == [0, 1]
    first, last = LeastSlack().order(soon, 2, 1e6, 0.0), LeastSlack().order(late, 1, 1e6, 0.0)
    assert -(2**59) < LeastSlack().order(late, 1, 0.0, 1e12) < first < last < 2**59


def test_a_request_without_a_deadline_is_never_refused_for_it() -> None:
    policy = LeastSlack()
    assert policy.patience(make_request(1), 1e9) == float("inf")
    assert policy.patience(replace(make_request(1), deadline=3.0), 5.0) == 0.0


@pytest.mark.parametrize("policy", ["deadline", "fair-deadline"])
def test_an_idle_engine_refuses_no_request_by_a_prediction(policy: str) -> None:
    """It would never run the steps that put the prediction right."""
    scheduler = scheduler_of(policy)
    for _ in range(50):
        scheduler.backpressure.observe_step(10, 100.0)
    request = replace(make_request(0, 20, 10), deadline=1.0)
    assert scheduler.schedule(0.0, [Submit(0, request)]) is not None
    scheduler.schedule(0.0, [Submit(1, replace(request, deadline=1.0))])
    assert [end.attempt for end in scheduler.pending_ends] == [1]  # while another runs, it is refused


def scheduler_of(policy: str) -> Scheduler:
    cache = CacheManager(make_layout(16), 100, 4)
    return Scheduler(SchedulerSettings(64, 4, policy=policy), QueueLimits(), cache)
