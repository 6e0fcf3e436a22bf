"""Backfilling: smaller requests may pass one that lacks rows or pages, for a bounded time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from cache_manager.manager import CacheManager
from scheduler.admission import MOST_PASSED, Admission
from scheduler.dominant_share import DominantShare
from scheduler.events import Logprobs, Submit
from scheduler.policies import POLICIES
from scheduler.policy import FirstCome, SchedulingPolicy
from scheduler.rows import Sequence
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.scheduler.executor import LawBroken, law
from tests.scheduler.test_preemption import scheduler_of
from tests.scheduler.test_scheduler import result_of
from tests.scheduler.workloads import PATIENT, make_layout, make_request
from tests.support.examples import examples
from tests.support.planted import plant


def step(scheduler: Scheduler, now: float, *events: Submit) -> list[int]:
    """Plans and commits a step. Returns attempts that start in it."""
    plan = scheduler.schedule(now, events)
    outputs = scheduler.commit(None if plan is None else result_of(plan, [1] * len(plan.logits)), now)
    return [start.attempt for start in outputs.starts]


def submit(attempt: int, prompt: int, tokens: int, tenant: str = "") -> Submit:
    return Submit(attempt, make_request(attempt, prompt, tokens, scope=Scope(tenant)))


def blocked_by_a_giant(policy: SchedulingPolicy, tenant: str = "") -> Scheduler:
    """A running request holds 4 of 20 pages and more later; a giant that comes after it needs 16."""
    scheduler = scheduler_of(policy, rows=8, pages=20)
    assert step(scheduler, 0.0, submit(1, 16, 60)) == [1]
    assert step(scheduler, 0.5, submit(2, 62, 4, tenant)) == []
    return scheduler


POLICIES_THAT_PASS = [FirstCome(5.0), DominantShare(64, 5.0)]


@pytest.mark.parametrize("policy", POLICIES_THAT_PASS)
def test_smaller_ones_pass_until_the_bound_and_none_from_then_on(policy: SchedulingPolicy) -> None:
    scheduler = blocked_by_a_giant(policy)
    started = [step(scheduler, 0.5 + now, submit(2 + now, 4, 2)) for now in range(1, 12)]
    assert started == [[3], [4], [5], [6], [], [], [], [], [], [], []]


@pytest.mark.parametrize("name", POLICIES)
def test_with_zero_none_passes_under_any_policy(name: str) -> None:
    policy = POLICIES[name](SchedulerSettings(backfill_time=0.0), 64)
    scheduler = blocked_by_a_giant(policy)
    assert [step(scheduler, float(now), submit(2 + now, 4, 2)) for now in (1, 2)] == [[], []]


@pytest.mark.parametrize("name", ["deadline", "fair", "fair-deadline", "priority"])
def test_policies_that_promise_order_let_none_pass(name: str) -> None:
    scheduler = blocked_by_a_giant(POLICIES[name](SchedulerSettings(), 64))
    assert step(scheduler, 1.0, submit(3, 4, 2)) == []


def test_the_time_counts_from_when_it_is_its_turn() -> None:
    """Else a long queue would leave no time to pass."""
    scheduler = blocked_by_a_giant(FirstCome(0.0))
    step(scheduler, 1.0, submit(3, 60, 4))
    for now in range(2, 10):
        step(scheduler, float(now))
    assert [one.blocked for one in scheduler.queue.in_order()] == [0.5, None]


def test_a_preempted_request_is_passed_by_none() -> None:
    scheduler = scheduler_of(FirstCome(1e3), rows=8, pages=16)
    step(scheduler, 0.0, submit(1, 16, 60), submit(2, 24, 30))
    while scheduler.rows.row_of(2) is not None:
        step(scheduler, 1.0)
    assert step(scheduler, 2.0, submit(3, 4, 2)) == []


def test_few_are_looked_at_in_a_step() -> None:
    """Each takes a look-up of its prefix."""
    scheduler = blocked_by_a_giant(FirstCome(1e3))
    giants = [submit(i, 62, 4) for i in range(3, 2 + MOST_PASSED)]
    assert step(scheduler, 1.0, *giants, submit(90, 4, 20)) == [90]
    assert step(scheduler, 2.0, submit(50, 62, 4), submit(91, 4, 2)) == []


# The law, under load


@dataclass(frozen=True)
class Load:
    """Requests as (second, prompt tokens, output tokens, tenant), for a pool of pages and some rows."""

    come: tuple[tuple[int, int, int, str], ...]
    rows: int
    pages: int
    backfill: float


REQUESTS = st.tuples(
    st.integers(0, 30), st.integers(1, 12) | st.integers(30, 60), st.integers(1, 30), st.sampled_from("aab")
)
LOADS = st.builds(
    Load,
    st.lists(REQUESTS, min_size=3, max_size=24).map(tuple),
    st.sampled_from((2, 4, 8)),
    st.sampled_from((25, 32, 48)),
    st.sampled_from((0.0, 1.0, 4.0, 20.0)),
)


def check_bound(load: Load, make: Callable[[float], SchedulingPolicy]) -> int:
    """Plays a load. Returns how often a request was passed.

    Of those that wait in the policy's order, none is passed that has lacked room for `backfill` seconds or longer, by
    a plain statement of room: each is given a page for all its tokens but the running rows' share.
    """
    scheduler, turn, passes = scheduler_of(make(load.backfill), load.rows, load.pages), 0, 0
    start, since = scheduler.running.start, dict[tuple[int, int], float]()
    line, passed = list[Sequence](), set[tuple[int, int]]()
    real = scheduler.policy.waiting

    def waiting(queue, rows, now):
        line.clear()
        for one in real(queue, rows, now):
            line.append(one)
            yield one

    def starting(sequence: Sequence, match) -> int:
        for other in line[: line.index(sequence)]:
            if scheduler.queue.get(*other.key) is None:
                continue  # it has started in this step
            since.setdefault(other.key, float(turn))
            passed.add(other.key)
            law(turn - since[other.key] < load.backfill, f"{other.key} is passed after its time")
            law(not other.preempted, f"{other.key} was preempted, and is passed")
        return start(sequence, match)

    vars(scheduler.policy)["waiting"], scheduler.running.start = waiting, starting
    while turn <= max(second for second, *_ in load.come) or scheduler.has_work:
        law(turn < 5000, "still at work")
        events = [submit(i, p, n, who) for i, (at, p, n, who) in enumerate(load.come, 1) if at == turn]
        step(scheduler, float(turn), *events)
        turn += 1
        passes = len(passed)
    return passes


@settings(max_examples=examples(120), deadline=None)
@given(LOADS, st.sampled_from([FirstCome, lambda seconds: DominantShare(100, seconds)]))
def test_none_is_passed_after_its_time(load: Load, make: Callable[[float], SchedulingPolicy]) -> None:
    check_bound(load, make)


FLOOD = Load(((0, 20, 60, "a"), (1, 60, 4, "a"), *((i // 2, 4, 6, "a") for i in range(2, 80))), 8, 20, 6.0)


def test_the_law_is_not_empty() -> None:
    assert check_bound(FLOOD, FirstCome) == 1


def it_never_holds_the_line(real: Callable) -> Callable:
    return lambda self, sequence, now: False


def its_time_begins_anew(real: Callable) -> Callable:
    def note_blocked(self: Admission, sequence: Sequence, now: float) -> None:
        sequence.blocked = now

    return note_blocked


@pytest.mark.parametrize(
    ("target", "name", "stand_in"),
    [(FirstCome, "holds_the_line", it_never_holds_the_line), (Admission, "_note_blocked", its_time_begins_anew)],
)
def test_harness_catches(target: type, name: str, stand_in: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, target, name, stand_in)
    with pytest.raises(LawBroken):
        check_bound(FLOOD, FirstCome)


# What it gains, on a modelled machine


ROWS, GIANT = 16, 0


def waits(backfill: float) -> tuple[float, float]:
    """Plays small requests behind a giant prompt, in a pool that others fill until they end.

    A step takes 20 ms and 0.2 ms for each token.

    Returns:
        Mean seconds that small ones wait for their first step, and seconds that the giant waits.
    """
    layout, now = make_layout(16), 0.0
    config = SchedulerSettings(max_batched_tokens=256, max_sequences=ROWS, policy="first-come", backfill_time=backfill)
    scheduler = Scheduler(config, PATIENT, CacheManager(layout, 150, ROWS))
    coming = [(0.0, 100 + i, 160, 300) for i in range(5)]  # they take half of the pool, and more later
    coming += [(1.0, GIANT, 1400, 20)]
    coming += [(1.5 + 0.25 * i, 200 + i, 24, 16) for i in range(60)]
    came, waited = {attempt: at for at, attempt, *_ in coming}, dict[int, float]()
    while coming or scheduler.has_work:
        due = [one for one in coming if one[0] <= now]
        coming = coming[len(due) :]
        plan = scheduler.schedule(now, [Submit(i, make_request(i, prompt, tokens)) for _, i, prompt, tokens in due])
        began, now = now, now + 0.02 if plan is None else now + 0.02 + 2e-4 * int(plan.slices[:, 2].sum())
        outputs = scheduler.commit(None if plan is None else drawn(plan), now)
        waited |= {start.attempt: began - came[start.attempt] for start in outputs.starts}
    return float(np.mean([seconds for attempt, seconds in waited.items() if attempt >= 200])), waited[GIANT]


def drawn(plan: StepPlan) -> StepResult:
    n = len(plan.logits)
    none = np.empty((n, 0))
    logprobs = Logprobs(np.zeros(n, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32))
    return StepResult(plan.step, np.ones(n, np.int32), logprobs)


def test_small_ones_wait_less_and_the_giant_within_its_bound() -> None:
    strict, giant = waits(0.0)
    default = SchedulerSettings().backfill_time
    passing, delayed = waits(default)
    assert passing < 0.7 * strict
    assert giant <= delayed <= giant + default


def test_the_setting_is_checked() -> None:
    for seconds in (-1.0, 3601.0, float("nan")):
        with pytest.raises(ValueError, match=r"--backfill-time is .*, must be in \[0, 3600\] seconds"):
            SchedulerSettings(backfill_time=seconds)
    assert isinstance(POLICIES["first-come"](replace(SchedulerSettings(), backfill_time=0.0), 1), FirstCome)
