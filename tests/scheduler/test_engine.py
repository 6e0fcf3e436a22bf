"""The engine's thread: outputs reach the sink, idleness costs nothing, a failure is told to everybody once.

Nothing here waits for time to pass: the executor stops where a test wants it to, and `parked` says when the loop has
nothing left to do.
"""

import threading
from collections import defaultdict
from collections.abc import Callable

import pytest

from scheduler.engine import Engine
from scheduler.events import End, EndReason, EngineStats, Event, Finish, StepOutputs, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.scheduler.executor import FakeExecutor, alone
from tests.scheduler.workloads import PATIENT, make_layout, make_request

PATIENCE = 20.0  # seconds after which a wait of these tests is a failure


class Gate:
    """Stops the engine's thread in one place until it is opened."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def stop_here(self) -> None:
        self._reached.set()
        assert self._open.wait(PATIENCE), "the gate was never opened"

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "the engine never came to the gate"

    def open(self) -> None:
        self._open.set()


class HookedExecutor(FakeExecutor):
    """before: what to do, by (call, its number from 0), before it is done."""

    before: dict[tuple[str, int], Callable[[], None]]

    def launch(self, plan: StepPlan) -> None:
        self._hook("launch")
        super().launch(plan)

    def collect(self) -> StepResult:
        self._hook("collect")
        return super().collect()

    def _hook(self, call: str) -> None:
        self.calls = getattr(self, "calls", defaultdict(int))
        number = self.calls[call]
        self.calls[call] += 1
        self.before.get((call, number), lambda: None)()


class Parking(threading.Condition):
    """The engine's condition; tells when the loop goes to sleep on it."""

    def __init__(self) -> None:
        super().__init__()
        self.sleeps = threading.Semaphore(0)

    def wait_for(self, predicate, timeout=None):
        self.sleeps.release()
        return super().wait_for(predicate, timeout)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """An engine with its thread, and all that its sink was told."""

    def __init__(self, depth: int = 1, rows: int = 4, pages: int = 64, queue: QueueLimits = PATIENT) -> None:
        settings = SchedulerSettings(max_batched_tokens=16, max_sequences=rows, steps_in_flight=depth)
        layout = make_layout(4)
        self.scheduler = Scheduler(settings, queue, layout, pages)
        self.executor = HookedExecutor(layout, pages, settings)
        self.executor.before = {}
        self.clock = Clock()
        self.engine = Engine(self.scheduler, self.executor, self._sink, self.clock)
        self.engine._wake = self.parking = Parking()
        self.on_outputs: Callable[[StepOutputs], None] = lambda outputs: None
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.ends: dict[int, list[End]] = defaultdict(list)
        self.threads: set[str] = set()
        self.stats = EngineStats()
        self.schedules = 0
        self._told = threading.Condition()
        self._count_schedules()

    def _count_schedules(self) -> None:
        real = self.scheduler.schedule

        def counting(now, events):
            self.schedules += 1
            return real(now, events)

        self.scheduler.schedule = counting

    def _sink(self, outputs: StepOutputs) -> None:
        with self._told:
            self.threads.add(threading.current_thread().name)
            for attempt, position, token in zip(
                outputs.attempts.tolist(), outputs.positions.tolist(), outputs.tokens.tolist(), strict=True
            ):
                assert position == len(self.tokens[attempt]), "a gap or a duplicate"
                assert not self.ends[attempt], "a token after the end"
                self.tokens[attempt].append(token)
            self.stats = outputs.stats
            for end in outputs.ends:
                self.ends[end.attempt].append(end)
            self._told.notify_all()
        self.on_outputs(outputs)

    def stop_at(self, call: str, number: int) -> Gate:
        gate = Gate()
        self.executor.before[call, number] = gate.stop_here
        return gate

    def fail_at(self, call: str, number: int) -> None:
        def fail() -> None:
            raise RuntimeError("the device is gone")

        self.executor.before[call, number] = fail

    def parked(self) -> None:
        """Until the loop sleeps once more."""
        assert self.parking.sleeps.acquire(timeout=PATIENCE), "the engine does not come to rest"

    def wait_ends(self, *attempts: int) -> None:
        with self._told:
            done = self._told.wait_for(lambda: all(self.ends[attempt] for attempt in attempts), PATIENCE)
        assert done, f"no end of {[a for a in attempts if not self.ends[a]]}"

    def wait_dead(self) -> None:
        self.engine._thread.join(PATIENCE)
        assert not self.engine._thread.is_alive()

    def reasons(self) -> dict[int, list[EndReason]]:
        return {attempt: [end.reason for end in ends] for attempt, ends in self.ends.items() if ends}


@pytest.fixture
def make_rig():
    rigs: list[Rig] = []

    def make(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield make
    for rig in rigs:
        if rig.engine._thread.is_alive():
            rig.engine.stop(PATIENCE)


def submits(count: int, max_tokens: int = 5) -> list[Event]:
    return [Submit(i, make_request(i, 3, max_tokens)) for i in range(1, count + 1)]


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_of_all_requests_reach_the_sink(make_rig, depth):
    rig = make_rig(depth=depth, rows=2)
    rig.engine.start()
    come = submits(5)
    rig.engine.send(come)
    rig.wait_ends(1, 2, 3, 4, 5)
    rig.parked()
    assert rig.reasons() == {i: [EndReason.LENGTH] for i in range(1, 6)}
    assert rig.tokens == {event.attempt: alone(event.request) for event in come}
    assert rig.threads == {"quire-engine"}
    assert rig.scheduler.cache.free == rig.scheduler.cache.total


def test_events_of_many_threads_are_all_answered(make_rig):
    rig = make_rig(depth=2)
    rig.engine.start()

    def client(first: int) -> None:
        for attempt in range(first, first + 10):
            rig.engine.send([Submit(attempt, make_request(attempt, 2, 3))])
            if attempt % 3 == 0:
                rig.engine.send([Finish(attempt)])

    threads = [threading.Thread(target=client, args=(first,)) for first in (1, 11, 21, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    rig.wait_ends(*range(1, 41))
    rig.parked()
    assert all(len(ends) == 1 for ends in rig.ends.values())
    assert all(rig.tokens[a] == alone(make_request(a, 2, 3)) for a in range(1, 41) if a % 3)


def test_an_idle_engine_takes_no_turns(make_rig):
    rig = make_rig()
    rig.engine.start()
    rig.parked()
    assert rig.schedules == 0
    rig.engine.send([])
    rig.engine.send(submits(1, max_tokens=3))
    rig.parked()
    assert rig.schedules == 3, "one turn a token"
    rig.engine.send([])
    rig.engine.send([Finish(77)])
    rig.parked()
    assert rig.schedules == 4
    rig.engine.stop(PATIENCE)


def test_finish_while_a_step_is_in_flight(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 1)
    rig.engine.start()
    rig.parked()
    rig.engine.send(submits(2))
    gate.wait_reached()
    rig.engine.send([Finish(1)])
    gate.open()
    rig.wait_ends(1, 2)
    rig.parked()
    assert rig.reasons() == {1: [EndReason.FINISHED], 2: [EndReason.LENGTH]}
    assert rig.tokens[1] == alone(make_request(1, 3, 5))[: len(rig.tokens[1])]
    assert len(rig.tokens[1]) == 2, "the token of the step in flight is delivered, none after it"
    assert rig.scheduler.cache.free == rig.scheduler.cache.total


def test_the_sink_may_send(make_rig):
    rig = make_rig()
    rig.on_outputs = lambda outputs: rig.engine.send([Finish(1)]) if 1 in outputs.attempts else None
    rig.engine.start()
    rig.engine.send(submits(1, max_tokens=50))
    rig.wait_ends(1)
    assert rig.reasons() == {1: [EndReason.FINISHED]}
    assert len(rig.tokens[1]) == 1


# Failure

FAILURES = [(call, number, depth) for call in ("launch", "collect") for number in (0, 1, 3) for depth in (1, 2)]


@pytest.mark.parametrize(("call", "number", "depth"), FAILURES)
def test_a_failure_of_the_executor_ends_every_attempt_once(make_rig, call, number, depth):
    rig = make_rig(depth=depth, rows=2)
    rig.fail_at(call, number)
    rig.engine.start()
    rig.engine.send(submits(5, max_tokens=9))
    rig.wait_dead()
    assert rig.reasons() == {i: [EndReason.ENGINE_FAILED] for i in range(1, 6)}
    assert all(ends[0].message == "RuntimeError: the device is gone" for ends in rig.ends.values() if ends)
    assert rig.engine.failure == "RuntimeError: the device is gone"
    rig.clock.now += 100.0
    assert rig.engine.stalled_for() == 0.0, "a dead engine is dead, not stalled"


def test_attempts_that_ended_before_a_failure_are_not_told_again(make_rig):
    rig = make_rig()
    rig.fail_at("launch", 2)
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 3, 1)), Submit(2, make_request(2, 3, 9))])
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.LENGTH], 2: [EndReason.ENGINE_FAILED]}


def test_events_that_wait_when_the_engine_fails_are_answered(make_rig):
    rig = make_rig(queue=QueueLimits(requests=1))
    gate = Gate()

    def fail() -> None:
        gate.stop_here()
        raise RuntimeError("the device is gone")

    rig.executor.before["launch", 1] = fail
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 3, 9))])
    gate.wait_reached()
    rig.engine.send([Submit(2, make_request(2, 3, 9)), Finish(1), Finish(77)])
    rig.engine.send([Submit(3, make_request(3, 3, 9))])
    gate.open()
    rig.wait_dead()
    assert {attempt: len(ends) for attempt, ends in rig.ends.items()} == {1: 1, 2: 1, 3: 1}


def test_gauges_of_a_dead_engine_are_zero_and_its_counts_stay(make_rig):
    rig = make_rig(rows=2)
    rig.fail_at("launch", 3)
    rig.engine.start()
    rig.engine.send(submits(4, max_tokens=9))
    rig.wait_dead()
    told = rig.stats
    assert (told.running, told.waiting, told.waiting_tokens, told.pages_used) == (0, 0, 0, 0)
    assert (told.steps, told.computed_tokens, told.pages_total) == (3, 2 * (3 + 1 + 1), 64)
    rig.engine.send([Submit(9, make_request(9))])
    assert rig.stats == told


def test_work_that_cannot_start_is_a_bug_and_told(make_rig):
    rig = make_rig(pages=2)
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 30, 1))])
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.ENGINE_FAILED]}
    assert "none can be scheduled" in rig.engine.failure


def test_a_scheduler_that_raises_ends_what_it_was_just_given(make_rig):
    rig = make_rig()

    def broken(now, events):
        raise ZeroDivisionError("a bug")

    rig.scheduler.schedule = broken
    rig.engine.start()
    rig.engine.send(submits(2))
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.ENGINE_FAILED], 2: [EndReason.ENGINE_FAILED]}
    assert rig.engine.failure == "ZeroDivisionError: a bug"


def test_a_failed_engine_answers_later_submits_at_once(make_rig):
    rig = make_rig()
    rig.fail_at("launch", 0)
    rig.engine.start()
    rig.engine.send(submits(1))
    rig.wait_dead()
    rig.engine.send([Finish(1), Submit(8, make_request(8)), Submit(9, make_request(9))])
    failed = [EndReason.ENGINE_FAILED]
    assert rig.reasons() == {1: failed, 8: failed, 9: failed}
    rig.engine.stop(PATIENCE)


def test_an_attempt_that_is_finished_in_the_turn_that_fails_is_told(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 0)
    rig.fail_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(2, max_tokens=9))
    gate.wait_reached()
    rig.engine.send([Finish(1)])
    gate.open()
    rig.wait_dead()
    assert {attempt: len(ends) for attempt, ends in rig.ends.items()} == {1: 1, 2: 1}


def test_an_attempt_that_is_refused_in_the_turn_that_fails_is_told_once(make_rig):
    rig = make_rig(rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at("collect", 0)
    rig.fail_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(1, max_tokens=9))
    gate.wait_reached()
    rig.engine.send([Submit(2, make_request(2)), Submit(3, make_request(3))])
    gate.open()
    rig.wait_dead()
    failed = [EndReason.ENGINE_FAILED]
    assert rig.reasons() == {1: failed, 2: failed, 3: [EndReason.QUEUE_FULL]}


def test_an_attempt_that_times_out_in_the_turn_that_fails_is_told(make_rig):
    rig = make_rig(rows=1, queue=QueueLimits(wait=5.0))
    gate = rig.stop_at("collect", 0)
    rig.fail_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(2, max_tokens=9))
    gate.wait_reached()
    rig.clock.now = 100.0
    gate.open()
    rig.wait_dead()
    assert {attempt: len(ends) for attempt, ends in rig.ends.items()} == {1: 1, 2: 1}


# Stopping and stalling


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_ends_an_idle_engine(make_rig, depth):
    rig = make_rig(depth=depth)
    rig.engine.start()
    rig.engine.send(submits(2))
    rig.wait_ends(1, 2)
    rig.engine.stop(PATIENCE)
    assert not rig.engine._thread.is_alive()
    assert rig.engine.failure is None
    assert rig.executor.closed == 1


def test_stop_waits_for_the_step_in_flight_and_says_so(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 1)
    rig.engine.start()
    rig.engine.send(submits(1, max_tokens=50))
    gate.wait_reached()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.01 s: it waits for the step in flight"):
        rig.engine.stop(0.01)
    gate.open()
    rig.engine.stop(PATIENCE)
    assert not rig.engine._thread.is_alive()
    assert len(rig.tokens[1]) == 2, "the step in flight is told, no other is begun"


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_an_engine_whose_executor_blocks_stalls(make_rig, call):
    rig = make_rig()
    rig.clock.now = 1000.0
    rig.on_outputs = lambda outputs: setattr(rig.clock, "now", rig.clock.now + 7.0)
    gate = rig.stop_at(call, 1)
    rig.engine.start()
    rig.parked()
    assert rig.engine.stalled_for() == 0.0
    rig.engine.send(submits(1, max_tokens=3))
    gate.wait_reached()
    assert rig.engine.stalled_for() == 0.0, "the first step was progress"
    rig.clock.now += 40.0
    assert rig.engine.stalled_for() == 40.0
    rig.clock.now += 2.5
    assert rig.engine.stalled_for() == 42.5
    gate.open()
    rig.parked()
    assert rig.engine.stalled_for() == 0.0
    rig.clock.now += 500.0
    assert rig.engine.stalled_for() == 0.0


def test_time_spent_idle_is_not_a_stall(make_rig):
    rig = make_rig()
    rig.engine.start()
    rig.parked()
    rig.clock.now = 900.0
    gate = rig.stop_at("launch", 0)
    rig.engine.send(submits(1))
    gate.wait_reached()
    assert rig.engine.stalled_for() == 0.0
    gate.open()
