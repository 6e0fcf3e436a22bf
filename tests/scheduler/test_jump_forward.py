"""Jump-forward decoding: tokens without draws of their own change nothing but the number of steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from cache_manager.allocator import LedgerError
from cache_manager.manager import CacheManager
from scheduler.events import Logprobs, Submit
from scheduler.jump_forward import JumpForward
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from scheduler.slices import Slices
from scheduler.step import StepResult
from scheduler.step_time import Pace, StepTime
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.test_drafts import Guessing
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant

pytestmark = pytest.mark.sample(3)


def run(workload: Workload, jumps: int, drafts: int = 0, jump_forward: bool = True) -> Scheduler:
    """Runs the workload with an executor that offers up to `jumps` tokens a draw, under the laws of `play`."""
    chosen = replace(workload.settings, draft_tokens=drafts, jump_forward=jump_forward)
    drafter = Guessing(workload) if drafts else None
    scheduler = Scheduler(chosen, workload.queue, workload.cache, workload.hasher, drafter)
    executor = FakeExecutor(workload.layout, workload.pages, chosen, jumps=jumps)
    play(replace(workload, settings=chosen), scheduler, executor)
    assert executor.jumped <= scheduler.stats().jump_forward_tokens
    return scheduler


@settings(max_examples=examples(150))
@given(workloads(cancels=True), st.integers(1, 6))
def test_tokens_do_not_depend_on_jumps(workload: Workload, jumps: int) -> None:
    run(workload, jumps)


@settings(max_examples=examples(60))
@given(workloads(several=True, resumed=True, resets=True), st.integers(1, 6))
def test_nor_beside_searches_and_several_sequences(workload: Workload, jumps: int) -> None:
    run(workload, jumps)


@settings(max_examples=examples(60))
@given(workloads(cancels=True), st.integers(1, 5), st.integers(1, 4))
def test_nor_beside_drafts(workload: Workload, jumps: int, drafts: int) -> None:
    run(workload, jumps, drafts)


ONE = (Arrival(1, 0, make_request(1, (3, 1, 4), 24)),)


@pytest.mark.parametrize(("depth", "steps"), [(1, (24, 9)), (2, (24, 15))])
def test_jumps_save_steps(depth: int, steps: tuple[int, int]) -> None:
    room = SchedulerSettings(max_batched_tokens=32, max_sequences=2, steps_in_flight=depth)
    workload = Workload(ONE, make_layout(4), 32, room)
    assert tuple(run(workload, jumps).stats().steps for jumps in (0, 6)) == steps


def test_they_can_be_switched_off() -> None:
    workload = Workload(ONE, make_layout(4), 32, SchedulerSettings(max_batched_tokens=32, max_sequences=2))
    stats = run(workload, 6, jump_forward=False).stats()
    assert (stats.steps, stats.jump_forward_tokens) == (24, 0)


def test_a_jump_is_computed_in_chunks() -> None:
    room = SchedulerSettings(max_batched_tokens=3, max_sequences=2, prefill_chunk=2)
    workload = Workload(ONE, make_layout(4), 32, room)
    assert run(workload, 6).stats().jump_forward_tokens > 8


def told_twice(real):
    def take(self):
        jumps = real(self)
        return np.concatenate((jumps, jumps))

    return take


def told_late(real):
    def take(self):
        jumps = real(self)
        jumps[:, 1] += 1
        return jumps

    return take


def behind_an_end(real):
    return lambda self, rows, *drawn: (np.zeros(len(rows), np.bool_), real(self, rows, *drawn)[1])


def while_it_draws(real):
    def got(self, row, token, offered):
        length = self._rows.length[row]
        self._rows.length[row] = self._rows.prompt[row] + self._rows.emitted[row] + 1
        found = real(self, row, token, offered)
        self._rows.length[row] = length + len(found)
        return found

    return got


def of_another_row(real):
    def take(self, jumps, rows, tokens, logprobs):
        return real(self, np.stack((np.roll(jumps[:, 0], 1), jumps[:, 1]), 1), rows, tokens, logprobs)

    return take


def kept_by_who_left(real):
    def drop(self, row):
        kept = self.jumps.get(row)
        real(self, row)
        if kept is not None:
            self.jumps[row] = kept

    return drop


PLANTED = {
    "they are told twice": (Running, "take_jumps", told_twice),
    "they are told at the wrong place": (Running, "take_jumps", told_late),
    "they go on behind a stop token": (Rows, "ends", behind_an_end),
    "a row gets them while it draws again": (JumpForward, "_got", while_it_draws),
    "another row gets them": (JumpForward, "take", of_another_row),
    "a row that has left gets them": (Running, "drop", kept_by_who_left),
}


@pytest.mark.parametrize("name", PLANTED)
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`find` raises where no workload breaks a law."""
    plant(monkeypatch, *PLANTED[name])

    def breaks(workload: Workload) -> bool:
        try:
            run(workload, 4)
        except (AssertionError, LedgerError, LookupError, ValueError):
            return True
        return False

    find(workloads(cancels=True), breaks, settings=settings(max_examples=400, database=None, phases=[Phase.generate]))


def no_logprobs(n: int) -> Logprobs:
    none = np.empty((n, 0))
    return Logprobs(np.zeros(n, np.float32), np.ones(n, np.int32), none.astype(np.int32), none.astype(np.float32))


def longest_gap(again: bool, priority: int, target: float | None) -> int:
    """Returns the most steps between two tokens of a stream that jumps, beside a long prompt that comes before it."""
    room = SchedulerSettings(max_batched_tokens=64, max_sequences=8, target_itl=target)
    scheduler = Scheduler(room, NO_QUEUE_LIMITS, CacheManager(make_layout(16), 3000, 8))
    prompt, last, gaps = replace(make_request(1, 3200, 2), priority=priority), 0, list[int]()
    for turn in range(150):
        events = {0: [Submit(2, make_request(2, 5, 400))], 5: [Submit(1, prompt, again=again)]}.get(turn, [])
        plan = scheduler.schedule(turn / 100, events)
        assert plan is not None
        rows = [row for row in plan.logits[:, 1].tolist() if scheduler.rows.attempt[row] == 2]
        jumps = np.array([(row, 7) for row in rows for _ in range(4 * (turn % 10 == 3))], np.int32).reshape(-1, 2)
        n = len(plan.logits)
        result = StepResult(plan.step, np.ones(n, np.int32), no_logprobs(n), jumps=jumps)
        if 2 in scheduler.commit(result, (turn + 1) / 100).attempts.tolist():
            gaps.append(turn - last)
            last = turn
    return max(gaps[1:])


@pytest.mark.parametrize("target", [None, 0.001])
@pytest.mark.parametrize(("again", "priority"), [(False, 0), (True, 0), (False, -5)])
def test_a_prompt_delays_no_row_that_jumps(again: bool, priority: int, target: float | None) -> None:
    """Whatever comes first in the policy's order: its tokens are computed with those of rows that decode."""
    assert longest_gap(again, priority, target) == 1


def test_a_row_that_jumps_bounds_prefill_in_time() -> None:
    time, jumping = StepTime(), np.array([[0, 300, 5]], np.int32)
    for count in (400, 30, 250, 90, 180, 360, 60, 2):
        time.observe(np.array([[0, 7 * count, count]], np.int32), 0.001 * count)
    slices = Slices(SchedulerSettings(max_batched_tokens=512), Pace(time, 0.1))
    slices.several(*jumping[0].tolist())
    slices.prefill(1, 0, 4000)
    assert slices.array()[0].tolist() == [0, 300, 5]
    assert slices.array()[1, 2] == pytest.approx(95, abs=2)
