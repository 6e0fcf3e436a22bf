"""Jump-forward decoding: tokens without draws of their own change nothing but the number of steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from cache_manager.allocator import LedgerError
from scheduler.jump_forward import JumpForward
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.test_drafts import Guessing
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.planted import plant


def run(workload: Workload, jumps: int, drafts: int = 0, jump_forward: bool = True) -> Scheduler:
    """Runs the workload with an executor that offers up to `jumps` tokens a draw, under the laws of `play`."""
    chosen = replace(workload.settings, draft_tokens=drafts, jump_forward=jump_forward)
    drafter = Guessing(workload) if drafts else None
    scheduler = Scheduler(chosen, workload.queue, workload.cache, workload.hasher, drafter)
    executor = FakeExecutor(workload.layout, workload.pages, chosen, jumps=jumps)
    play(replace(workload, settings=chosen), scheduler, executor)
    assert executor.jumped <= scheduler.stats().jump_forward_tokens
    return scheduler


@settings(max_examples=150)
@given(workloads(cancels=True), st.integers(1, 6))
def test_tokens_do_not_depend_on_jumps(workload: Workload, jumps: int) -> None:
    run(workload, jumps)


@settings(max_examples=60)
@given(workloads(several=True, resumed=True, resets=True), st.integers(1, 6))
def test_nor_beside_searches_and_several_sequences(workload: Workload, jumps: int) -> None:
    run(workload, jumps)


@settings(max_examples=60)
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
