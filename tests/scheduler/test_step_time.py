"""The step budget in seconds: what steps cost is learned, and prefill gets what the target leaves."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.manager import CacheManager
from scheduler.events import Logprobs, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.slices import Slices
from scheduler.step import StepPlan, StepResult
from scheduler.step_costs import StepWork, pairs
from scheduler.step_time import LEAST_PREFILL, SETTLED, Pace, StepTime
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.workloads import Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant


@dataclass(frozen=True)
class Machine:
    """Costs of steps: seconds of each, of a decode, of a token in its context, of prefill, of a pair in it."""

    fixed: float
    decode: float
    context: float
    prefill: float
    pair: float

    def seconds(self, work: StepWork) -> float:
        costs = (self.fixed, self.decode, self.context, self.prefill, self.pair)
        counts = (1.0, work.decodes, work.context, work.prefill, work.pairs)
        return sum(cost * count for cost, count in zip(costs, counts, strict=True))


CPU = Machine(0.02, 0.0003, 2e-8, 0.0008, 2e-8)
GPU = Machine(0.003, 2e-6, 2e-10, 2e-5, 5e-11)
LONG = Machine(0.001, 1e-5, 1e-9, 1e-6, 4e-9)  # attention takes most of it
MACHINES = {"cpu": CPU, "gpu": GPU, "attention": LONG}


def slices_of(decodes: list[int], prefills: list[tuple[int, int]]) -> np.ndarray:
    rows = [(start, 1) for start in decodes] + prefills
    return np.array([(row, start, count) for row, (start, count) in enumerate(rows)], np.int32).reshape(-1, 3)


@given(st.integers(0, 10**5), st.integers(1, 5000))
def test_pairs_are_counted(start: int, count: int) -> None:
    assert pairs(start, count) == sum(start + i + 1 for i in range(count))
    work = StepWork.of(slices_of([start, 7], [(start, count + 1)]))
    assert (work.decodes, work.context, work.prefill) == (2, start + 1 + 8, count + 1)
    assert work.pairs == pairs(start, count + 1)


@pytest.mark.parametrize("name", MACHINES)
@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_costs_are_learned(name: str, seed: int) -> None:
    """Within 3 % of each kind of step, after 200 steps of all kinds."""
    machine, rng, time = MACHINES[name], np.random.default_rng(seed), StepTime()
    for _ in range(200):
        decodes = rng.integers(0, 8000, rng.integers(0, 64)).tolist()
        prefills = [(int(rng.integers(0, 8000)), int(rng.integers(2, 512)))] if rng.random() < 0.5 else []
        slices = slices_of(decodes, prefills)
        time.observe(slices, machine.seconds(StepWork.of(slices)))
    for work in (StepWork(32, 32 * 4000.0), StepWork(32, 32 * 4000.0, 256, pairs(3000, 256))):
        assert time.expected(work) == pytest.approx(machine.seconds(work), rel=0.03)


def test_long_steps_that_vary_leave_short_ones_right_where_they_count_less() -> None:
    """Most of a server's steps have few rows. Counted alike, some prompts of a second say what those take."""
    errors = np.array([errors_of_few_rows(seed) for seed in range(20)])
    alike, by_time = np.median(errors, axis=0)
    assert by_time < 0.05
    assert alike > 3 * by_time


def errors_of_few_rows(seed: int) -> tuple[float, float]:
    """Returns errors of steps with one to eight rows, fitted to steps of which those with prompts vary by a fifth."""
    rng, alike, by_time = np.random.default_rng(seed), StepTime(1.0), StepTime(1.0)
    for _ in range(80):
        prompts = [(0, int(rng.integers(2, 512)))] if rng.random() < 0.3 else []
        slices = slices_of([100] * int(rng.integers(1, 33)), prompts)
        seconds = CPU.seconds(StepWork.of(slices)) * (1 + (0.2 if prompts else 0.02) * rng.standard_normal())
        alike.observe(slices, seconds)
        by_time.observe(slices, seconds, 1 / seconds)
    few = [StepWork(rows, 101.0 * rows) for rows in (1, 4, 8)]

    def error(time: StepTime) -> float:
        return float(np.mean([abs(time.expected(work) / CPU.seconds(work) - 1) for work in few]))

    return error(alike), error(by_time)


@settings(max_examples=60)
@given(st.floats(1e-6, 1e-2), st.floats(0, 1e-6), st.integers(0, 10**4), st.floats(0.001, 1), st.integers(0, 99))
def test_prefill_fills_the_time(each: float, pair: float, start: int, seconds: float, seed: int) -> None:
    machine, rng, time = Machine(0.0, 0.0, 0.0, each, pair), np.random.default_rng(seed), StepTime()
    for count in [*rng.integers(2, 512, 30).tolist(), 10**6]:
        slices = slices_of([], [(int(rng.integers(0, 8000)), count)])
        time.observe(slices, machine.seconds(StepWork.of(slices)))

    def cost(count: int) -> float:
        return time.expected(StepWork(0, 0.0, count, pairs(start, count))) - time.expected(StepWork())

    found = time.prefill_within(seconds, start)
    assert cost(found) <= seconds * (1 + 1e-6)
    assert found == 2 * 10**6 or cost(found + 2) > seconds * (1 - 1e-6)


def test_a_pause_of_the_machine_is_no_cost() -> None:
    time, slices = StepTime(), slices_of([100] * 8, [])
    for _ in range(SETTLED + 20):
        time.observe(slices, 0.02)
    time.observe(slices, 10.0)
    assert time.expected(StepWork.of(slices)) < 0.03


@pytest.mark.parametrize("wrong", [-1.5, 0.0])
def test_a_wrong_time_is_forgotten(wrong: float) -> None:
    """As where a swap that fell before a step is taken off its time."""
    time, slices = StepTime(), slices_of([100] * 8, [])
    for seconds in [0.02] * (SETTLED + 5) + [wrong] * 60 + [0.02] * 200:
        time.observe(slices, seconds)
    assert time.expected(StepWork.of(slices)) == pytest.approx(0.02, rel=0.05)


def test_drafts_are_booked_as_they_are_learned() -> None:
    """A row with several tokens counts as prefill in both."""
    time, checks = StepTime(), np.array([[row, 2000, 5] for row in range(32)], np.int32)
    for count in range(40):
        time.observe(checks[: 1 + count % 32], GPU.seconds(StepWork.of(checks[: 1 + count % 32])))
        mixed = slices_of([2000] * (count % 9), [(50 * count, 8 + 11 * (count * 7 % 40))])
        time.observe(mixed, GPU.seconds(StepWork.of(mixed)))
    expected = GPU.seconds(StepWork.of(checks))
    pace = Pace(time, expected + 64 * GPU.prefill)
    for row in checks.tolist():
        pace.several(row[1], row[2])
    assert 50 < pace.most(0) < 80


class Clock:
    """Runs steps on a machine's time, and keeps each step's seconds and work."""

    def __init__(self, machine: Machine, target: float | None, budget: int = 512) -> None:
        layout, self.now, self.machine = make_layout(16), 0.0, machine
        self.settings = SchedulerSettings(max_batched_tokens=budget, max_sequences=64, target_itl=target)
        pages = 64 * layout.pages_for(9000)
        self.scheduler = Scheduler(self.settings, NO_QUEUE_LIMITS, CacheManager(layout, pages, 64))
        self.steps: list[tuple[float, StepWork]] = []

    def turn(self, *submits: Submit) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now, submits)
        if plan is not None:
            work = StepWork.of(plan.slices)
            seconds = self.machine.seconds(work)
            self.now += seconds
            self.steps.append((seconds, work))
            n = len(plan.logits)
            none = np.empty((n, 0))
            logprobs = Logprobs(
                np.zeros(n, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32)
            )
            self.scheduler.commit(StepResult(plan.step, np.ones(n, np.int32), logprobs), self.now)
        return plan

    def streams_and_prompts(self) -> list[tuple[float, StepWork]]:
        """32 streams, then prompts of 8,000 tokens beside them. Returns the steps with both."""
        self.turn(*(Submit(i, make_request(i, 20, 4000)) for i in range(32)))
        for number in range(3):
            for _ in range(60):
                self.turn()
            self.turn(Submit(100 + number, make_request(100 + number, 8000, 2)))
            while any(one >= 100 for one in self.scheduler.live_attempts()):
                self.turn()
        return [(seconds, work) for seconds, work in self.steps if work.decodes and work.prefill]


@pytest.mark.parametrize("name", MACHINES)
def test_no_step_with_decodes_takes_twice_the_target(name: str) -> None:
    """The first prompts may, whose costs are learned. Nearly all of the time is used."""
    machine = MACHINES[name]
    alone = machine.seconds(StepWork(32, 32 * 500.0))
    target = 1.5 * alone
    free, paced = Clock(machine, None), Clock(machine, target)
    assert max(seconds for seconds, _ in free.streams_and_prompts()) > 2 * target
    both = paced.streams_and_prompts()
    assert max(seconds for seconds, _ in both) < 2 * target
    later = [seconds for seconds, _ in both[len(both) // 2 :]]
    assert max(later) < 1.05 * target
    assert np.median(later) > 0.9 * target


def test_prompts_end_where_the_target_leaves_no_time() -> None:
    clock = Clock(CPU, CPU.fixed / 2)
    both = clock.streams_and_prompts()
    assert {work.prefill for _, work in both} <= set(range(1, LEAST_PREFILL + 1))


def test_no_target_bounds_prefill_alone() -> None:
    clock = Clock(CPU, 0.001)
    clock.turn(Submit(1, make_request(1, 1000, 2)))
    assert clock.steps[0][1].prefill == 512


def test_a_bidirectional_prefix_is_whole() -> None:
    time = StepTime()
    time.observe(slices_of([10] * 4, [(0, 64)]), 1.0)
    slices = Slices(SchedulerSettings(target_itl=0.001), Pace(time, 0.001))
    slices.decodes(np.arange(4, dtype=np.int32), np.full(4, 10, np.int32))
    slices.prefill(4, 0, 200, bidirectional=100)
    assert slices.array()[-1].tolist() == [4, 0, 100]


@settings(max_examples=examples(80))
@given(workloads(cancels=True, several=True, resumed=True), st.floats(0.001, 3.0))
def test_tokens_do_not_depend_on_the_target(workload: Workload, target: float) -> None:
    chosen = replace(workload.settings, target_itl=target)
    scheduler = Scheduler(chosen, workload.queue, workload.cache, workload.hasher)
    executor = FakeExecutor(workload.layout, workload.pages, chosen)
    play(replace(workload, settings=chosen), scheduler, executor, patience=16)


def never_learns(_: Callable) -> Callable:
    return lambda self, slices, seconds: None


def forgets_what_it_gave(_: Callable) -> Callable:
    return lambda self, start, count: None


def sees_no_context(real: Callable) -> Callable:
    return lambda self, seconds, start: real(self, seconds, 0)


PLANTED = {
    "costs are not learned": (StepTime, "observe", never_learns, "gpu"),
    "a prompt's context is overlooked": (StepTime, "prefill_within", sees_no_context, "attention"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_wrong_budget_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, attribute, stand_in, machine = PLANTED[name]
    plant(monkeypatch, target, attribute, stand_in)
    with pytest.raises(AssertionError):
        test_no_step_with_decodes_takes_twice_the_target(machine)


def test_what_a_step_has_given_is_no_more_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prompts share the time of one step; planted: they do not."""

    def seconds() -> float:
        clock = Clock(CPU, 0.1)
        clock.turn(*(Submit(i, make_request(i, 20, 4000)) for i in range(32)))
        for number in range(40):
            clock.turn(
                *([] if number % 8 else [Submit(100 + 9 * number + i, make_request(i, 60, 2)) for i in range(9)])
            )
        return max(took for took, work in clock.steps[20:] if work.decodes > 30)

    assert seconds() < 0.105
    plant(monkeypatch, Pace, "taken", forgets_what_it_gave)
    assert seconds() > 0.12
