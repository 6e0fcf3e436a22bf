"""A request whose logits processors are not ready waits, alone, and goes on with the same tokens once they are."""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Events
from dataclasses import fields
from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.manager import CacheManager
from scheduler.events import EndReason, Event, Ready, StepOutputs, Submit
from scheduler.preemption_cause import PreemptionCause
from scheduler.readiness import with_ready
from scheduler.request import Request
from scheduler.rows import Sequence
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, QueueLimits, SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.engine_rig import Rig, submits
from tests.scheduler.executor import LawBroken, alone, law, logprobs_of
from tests.scheduler.plan_checker import PlanChecker
from tests.scheduler.workloads import PATIENT, Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples

MOST_ASKED = 4


class Patient(Workload):
    """A workload whose attempts may wait for readiness, once and after each preemption."""

    @property
    def most_turns(self) -> int:
        return 4 * MOST_ASKED * super().most_turns

    @staticmethod
    def of(workload: Workload) -> "Patient":
        return Patient(**{one.name: getattr(workload, one.name) for one in fields(workload)})


class HeldDriver(SchedulerDriver):
    """Says that an attempt is ready once it has been asked some number of times, anew after each preemption.

    Attributes:
        asks: By attempt, the times for each of its waits; the last holds for all later ones.
        ready: Attempts that may have a row.
        waits: The number of waits of each attempt so far.
    """

    def __init__(self, workload: Workload, asks: Mapping[int, tuple[int, ...]]) -> None:
        super().__init__(Patient.of(workload))
        one = self.workload
        self.scheduler = Scheduler(one.settings, one.queue, self.scheduler.cache, one.hasher, holds=True)
        self.oracle.scheduler = self.scheduler
        self.asks, self.ready, self.waits, self._left = asks, set[int](), dict[int, int](), dict[int, int]()

    def next_turn(self) -> StepOutputs | None:
        return self.take_turn(with_ready(self.workload.events(self.turn), self.scheduler.held, self._ask))

    def take_turn(self, events: Events[Event] = ()) -> StepOutputs | None:
        before = self._rows()
        outputs = super().take_turn(events)
        self.ready -= {attempt for attempt, _ in before & self._waiting()}  # they were preempted
        return outputs

    def _ask(self, requests: Mapping[int, Request]) -> list[Ready]:
        for attempt in requests:
            if attempt not in self._left:
                wait = self.waits[attempt] = self.waits.get(attempt, 0) + 1
                times = self.asks.get(attempt, (0,))
                self._left[attempt] = times[min(wait, len(times)) - 1]
            self._left[attempt] -= 1
        now = [attempt for attempt in requests if self._left[attempt] < 0]
        for attempt in now:
            del self._left[attempt]
            self.ready.add(attempt)
        return [Ready(attempt) for attempt in now]

    def _check_admission(self, newcomers: list[int], before: set[PlanChecker]) -> None:
        super()._check_admission(newcomers, before)
        for row in newcomers:
            attempt = self.executor.rows[row].seed
            law(attempt in self.ready, f"attempt {attempt} has a row and is not ready")


ASKS = st.dictionaries(
    st.integers(1, 12), st.lists(st.integers(0, MOST_ASKED - 1), min_size=1, max_size=3).map(tuple), max_size=8
)


@settings(max_examples=examples(200), deadline=None)
@given(workloads(), ASKS)
def test_all_laws_hold_whoever_is_not_ready(workload: Workload, asks: dict[int, tuple[int, ...]]) -> None:
    """Each gets the tokens that it gets by itself, none waits for one that is held, and equal runs are equal."""
    first, second = (HeldDriver(workload, asks).run() for _ in range(2))
    assert first.trace == second.trace


def crowded(depth: int = 1) -> Workload:
    """More requests than pages for all of them: some are preempted."""
    made = tuple(Arrival(i, 0, make_request(i, 5, 12)) for i in range(1, 6))
    sizes = SchedulerSettings(max_batched_tokens=16, max_sequences=4, steps_in_flight=depth)
    return Workload(made, make_layout(4), 10, sizes)


SLOW = {2: (3, 2), 3: (0, 3), 4: (2, 1), 5: (1,)}


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_request_waits_again(depth: int) -> None:
    driver = HeldDriver(crowded(depth), SLOW).run()
    assert driver.stats.preemptions
    assert max(driver.waits.values()) > 1


def _is_not_held(driver: HeldDriver) -> None:
    driver.scheduler.running.wait = driver.scheduler.queue.push  # type: ignore[method-assign]


def _is_not_held_again(driver: HeldDriver) -> None:
    running = driver.scheduler.running
    wait: Callable[..., None] = running.wait

    def once(sequence: Sequence, deadline: float = float("inf")) -> None:
        if sequence.preempted:
            running.queue.push(sequence)
        else:
            wait(sequence, deadline)

    running.wait = once  # type: ignore[method-assign]


def _holds_the_line(driver: HeldDriver) -> None:
    scheduler = driver.scheduler
    waiting: Callable[..., Iterable[Sequence]] = scheduler.policy.waiting

    def until_held(*args: Any) -> Iterable[Sequence]:
        return takewhile(lambda one: one.attempt not in scheduler.held, waiting(*args))

    scheduler.policy.waiting = until_held  # type: ignore[method-assign]


def _is_forgotten(driver: HeldDriver) -> None:
    schedule = driver.scheduler.schedule

    def without_ready(now: float, events: Events[Event]) -> StepPlan | None:
        return schedule(now, [event for event in events if not isinstance(event, Ready)])

    driver.scheduler.schedule = without_ready  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [_is_not_held, _is_not_held_again, _holds_the_line, _is_forgotten])
def test_harness_catches(plant: Callable[[HeldDriver], None]) -> None:
    driver = HeldDriver(crowded(), SLOW)
    plant(driver)
    with pytest.raises(LawBroken):
        driver.run()


def holding(queue: QueueLimits = PATIENT) -> Scheduler:
    one = SchedulerSettings(max_batched_tokens=16, max_sequences=2)
    return Scheduler(one, queue, Workload((), make_layout(4), 20, one).cache, holds=True)


def test_one_that_never_is_ready_ends_with_its_queue_timeout() -> None:
    scheduler = holding(QueueLimits(requests=9, wait=5.0))
    assert scheduler.schedule(0.0, [Submit(1, make_request(1, 3, 3))]) is None
    assert scheduler.is_held
    scheduler.schedule(5.0, [])
    (end,) = scheduler.commit(None, 5.0).ends
    assert (end.reason, end.message) == (
        EndReason.QUEUE_TIMEOUT, "not scheduled within 5.0 s: its logits processors were not ready",
    )  # fmt: skip
    assert not scheduler.has_work
    assert scheduler.schedule(6.0, [Ready(1)]) is None
    assert not scheduler.held


def test_a_fault_ends_its_request_alone() -> None:
    scheduler = holding()
    events = [Submit(i, make_request(i, 3, 3)) for i in (1, 2)]
    plan = scheduler.schedule(0.0, [*events, Ready(1, "no such grammar"), Ready(2), Ready(77, "unknown")])
    assert plan is not None
    assert [join.controls.seed for join in plan.joins] == [2]
    (end,) = scheduler.commit(None, 0.0).ends
    assert (end.attempt, end.reason, end.message) == (1, EndReason.FAULT, "no such grammar")


def test_an_engine_waits_for_what_it_holds(make_rig: Callable[..., Rig]) -> None:
    """All requests are held: it looks again now and then, takes that for no bug, and goes on once they are ready."""
    asked = list[int]()

    def ready_later(requests: Mapping[int, Request]) -> list[Ready]:
        asked.append(len(requests))
        return [Ready(attempt) for attempt in requests] if len(asked) > 5 else []

    rig, come = make_rig(depth=2, readiness=ready_later), submits(3)
    rig.engine.start()
    rig.engine.send(come)
    rig.wait_ends(1, 2, 3)
    assert rig.tokens == {event.attempt: alone(event.request) for event in come if isinstance(event, Submit)}
    assert len(asked) == 6
    assert rig.engine.failure is None


def test_an_isolated_attempt_that_is_held_again_holds_up_the_engine() -> None:
    """No other may run meanwhile, so that there is no step to plan, and none that is missing."""
    room = SchedulerSettings(max_batched_tokens=64, max_sequences=4)
    scheduler = Scheduler(room, NO_QUEUE_LIMITS, CacheManager(make_layout(4), 40, 4), holds=True)

    def turn(now: float, *events: Event) -> None:
        plan = scheduler.schedule(now, events)
        assert plan is not None
        n = len(plan.logits)
        scheduler.commit(StepResult(plan.step, np.ones(n, np.int32), logprobs_of(np.ones(n, np.int32))), now)

    turn(0.0, Submit(1, make_request(1, 8, 20), isolated_steps=10), Ready(1))
    turn(1.0, Submit(2, make_request(2, 8, 20)), Ready(2))
    scheduler.running.preempt(int(scheduler.rows.active()[0]), PreemptionCause.LOST_COPY)
    assert scheduler.schedule(2.0, ()) is None
    assert scheduler.is_held
    turn(3.0, Ready(1))
    assert not scheduler.is_held
