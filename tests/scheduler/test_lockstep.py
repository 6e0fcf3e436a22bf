"""Steps in lockstep: their plans and outputs are those of steps that are planned anew each time."""

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings

from scheduler.dominant_share import DominantShare
from scheduler.events import EndReason
from scheduler.lockstep import DecodingRows, Lockstep
from scheduler.results import Results
from scheduler.rows import Index, Rows
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.planting import Faults, caught
from tests.scheduler.reaching import unreached
from tests.scheduler.trace import plan_bytes
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.planted import plant, planted

pytestmark = pytest.mark.sample(3)


class PlannedAnew(DominantShare):
    """The default policy. Each step gets a new array of it, so that none is taken to go on as the one before it."""

    def running(self, rows: Rows, now: float) -> Index:
        return super().running(rows, now).copy()


def anew(workload: Workload) -> SchedulerDriver:
    """Plans each step anew."""
    tokens, backfill = workload.layout.tokens_in(workload.pages), workload.settings.backfill_time
    return SchedulerDriver(workload, PlannedAnew(tokens, backfill))


EVERYTHING = workloads() | workloads(cancels=True, queue_timeout=True, resumed=True, faults=True, resets=True)

NOTES = {
    "in lockstep": lambda drive: drive.lockstep,
    "with two steps in flight": lambda drive: drive.lockstep and drive.workload.depth == 2,
    "beside those that wait": lambda drive: drive.lockstep and drive.stats.preemptions,
    "a page in lockstep": lambda drive: drive.grown_in_lockstep > 1,
    "with windows": lambda drive: drive.grown_in_lockstep > 2 and drive.workload.layout.windows,
    "a client left": lambda drive: drive.lockstep and any(t.end.reason is EndReason.FINISHED for t in ended(drive)),
    "a row faulted": lambda drive: drive.lockstep and any(t.end.reason is EndReason.FAULT for t in ended(drive)),
    "a reset": lambda drive: drive.lockstep and drive.stats.evicted_reset,
    "evicted": lambda drive: drive.grown_in_lockstep and drive.stats.evicted_capacity,
}


def ended(drive: SchedulerDriver) -> list:
    return [told for told in drive.told.values() if told.end is not None]


def test_drawn_workloads_reach_what_the_laws_speak_of() -> None:
    assert unreached(EVERYTHING, NOTES) == set()


@settings(max_examples=examples(300), deadline=None)
@given(EVERYTHING)
def test_plans_and_outputs_are_those_of_steps_planned_anew(workload: Workload) -> None:
    drive = anew(workload).run()
    assert SchedulerDriver(workload).run().trace == drive.trace
    assert not drive.lockstep


@settings(max_examples=examples(100), deadline=None)
@given(workloads(several=True, cancels=True))
def test_also_with_several_sequences_and_searches(workload: Workload) -> None:
    assert SchedulerDriver(workload).run().trace == anew(workload).run().trace


class KeptPlans(SchedulerDriver):
    """Keeps every plan, as an executor in another process or a step in flight may."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.plans: list[tuple[StepPlan, bytes]] = []

    def _launch(self, plan, *rest) -> None:
        self.plans.append((plan, plan_bytes(plan)))
        super()._launch(plan, *rest)


@settings(max_examples=examples(100), deadline=None)
@given(EVERYTHING)
def test_no_plan_changes_once_it_is_made(workload: Workload) -> None:
    drive = KeptPlans(workload)
    drive.run()
    assert all(plan_bytes(plan) == before for plan, before in drive.plans)


@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_decode_are_in_lockstep(depth: int) -> None:
    """From the second step on in which they decode, over every page, to the last."""
    come = tuple(Arrival(i, 0, make_request(i, 3 + i, 40)) for i in (1, 2, 3))
    drive = SchedulerDriver(Workload(come, make_layout(4), 64, SchedulerSettings(32, 4, None, depth))).run()
    assert drive.lockstep == 38
    assert drive.grown_in_lockstep == 28


# Bugs in the fast path: the laws that `SchedulerDriver` checks notice each of them.

FAULTS = Faults()


@FAULTS.fault(DecodingRows, "due")
def no_row_gets_a_page_in_lockstep(real):
    return property(lambda self: np.empty(0, np.intp))


@FAULTS.fault(DecodingRows, "due")
def a_page_comes_a_step_late(real):
    def due(self):
        self._steps -= 1
        late = real.fget(self)
        self._steps += 1
        return late

    return property(due)


@FAULTS.fault(Lockstep, "next_step", cancels=True)
def lockstep_goes_on_without_a_row_that_left(real):
    def next_step(self, now, step):
        if self.decoding is not None:
            self.decoding.rows = self._policy.running(self._rows, now)
        return real(self, now, step)

    return next_step


@FAULTS.fault(Lockstep, "next_step")
def lockstep_outlives_a_step_of_another_kind(real):
    def next_step(self, now, step):
        before = self.decoding
        found = real(self, now, step)
        if before is not None and found is None:
            before.rows, self.decoding = self._policy.running(self._rows, now), before
        return found

    return next_step


@FAULTS.fault(Lockstep, "next_step", roomy=True)
def nobody_is_admitted_while_rows_are_in_lockstep(real):
    def next_step(self, now, step):
        queue, self._queue = self._queue, ()
        try:
            return real(self, now, step)
        finally:
            self._queue = queue

    return next_step


@FAULTS.fault(DecodingRows, "advance")
def lockstep_goes_on_past_the_last_token(real):
    def advance(self):
        real(self)
        self.steps_left += 1

    return advance


@FAULTS.fault(DecodingRows, "advance", depths=(2,))
def the_plan_in_flight_moves_on_too(real):
    def advance(self):
        before = self.slices
        real(self)
        before[:], self.slices = self.slices, before

    return advance


@FAULTS.fault(DecodingRows, "advance")
def a_step_in_lockstep_computes_its_token_again(real):
    def advance(self):
        before = self.slices
        real(self)
        self.slices = before

    return advance


@FAULTS.fault(Rows, "advance_all")
def only_the_tokens_computed_are_counted(real):
    def advance_all(self, step):
        real(self, step)
        self.length[:] -= 1

    return advance_all


@FAULTS.fault(Rows, "advance_all", depths=(2,))
def rows_in_lockstep_are_said_to_be_in_no_step(real):
    def advance_all(self, step):
        before = self.last_step.copy()
        real(self, step)
        self.last_step[:] = before

    return advance_all


@pytest.mark.parametrize("name", planted(FAULTS, rare=["nobody_is_admitted_while_rows_are_in_lockstep"]))
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught(FAULTS[name], monkeypatch)


def test_pages_filled_in_lockstep_are_published_with_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later breaks no law of a single run. The comparison sees it."""

    def stand_in(real):
        return lambda self, flown: real(self, flown) if flown.filling is None else None

    plant(monkeypatch, Results, "_publish", stand_in)
    once = settings(max_examples=1000, deadline=None, database=None, phases=[Phase.generate])
    find(
        EVERYTHING, lambda workload: SchedulerDriver(workload).run().trace != anew(workload).run().trace, settings=once
    )
