"""Bugs planted in the scheduler: the laws that `Drive` checks must notice each of them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from cache_manager.manager import CacheManager, PageChanges
from scheduler import scheduler as module
from scheduler.queue import Queue
from scheduler.rows import Rows
from scheduler.scheduler import Scheduler, _Slices
from tests.scheduler.drive import BROKEN, Drive
from tests.scheduler.workloads import workloads

FAULTS = {}


def fault(target, name, **workload):
    """Registers a stand-in for target.name, made from the original by the decorated function, and what shows it."""

    def register(make):
        FAULTS[make.__name__] = (target, name, make, workload)
        return make

    return register


class Anything:
    """Equal to whatever it is compared with, numpy arrays included."""

    __array_ufunc__ = None
    __hash__ = None

    def __getitem__(self, index):
        return self

    def __eq__(self, other):
        return np.ones(np.shape(other), bool)


@fault(module, "_InFlight")
def results_of_former_tenants_count(real):
    return lambda step, now, drawing, serials, tokens: real(step, now, drawing, Anything(), tokens)


@fault(Rows, "add")
def serials_are_used_twice(real):
    def add(self, sequence):
        row = real(self, sequence)
        self.serial[row] = 1
        return row

    return add


@fault(Scheduler, "_fault", faults=True, depths=(2,))
def fault_hits_whoever_has_the_row_now(real):
    return lambda self, flown, row, message: real(self, replace(flown, serials=self.rows.serial), row, message)


@fault(Scheduler, "_fault", faults=True)
def fault_is_not_told(real):
    return lambda self, flown, row, message: None


@fault(Scheduler, "_plan")
def leaves_are_told_again(real):
    def plan(self, *args):
        made = real(self, *args)
        self._leaves = made.leaves.tolist()
        return made

    return plan


@fault(Scheduler, "_plan")
def leaves_are_not_told(real):
    return lambda self, *args: replace(real(self, *args), leaves=np.empty(0, np.int32))


@fault(Scheduler, "_plan")
def draws_are_counted_twice(real):
    def plan(self, *args):
        made = real(self, *args)
        self.rows.length[made.logits[:, 1]] += 1
        return made

    return plan


@fault(_Slices, "prefill")
def budget_is_ignored(real):
    def prefill(self, row, start, need):
        self.budget = max(self.budget, need)
        real(self, row, start, need)

    return prefill


@fault(_Slices, "prefill")
def prefill_chunk_is_ignored(real):
    def prefill(self, row, start, need):
        self._chunk = need
        real(self, row, start, need)

    return prefill


@fault(_Slices, "decodes")
def only_one_decode_a_step(real):
    return lambda self, rows, starts: real(self, rows[:1], starts[:1])


@fault(Queue, "push_front")
def preempted_sequence_goes_to_the_back(real):
    def push_front(self, sequence):
        real(self, sequence)
        self._waiting.move_to_end(sequence.attempt)

    return push_front


@fault(Queue, "push_front")
def preempted_sequence_starts_anew(real):
    def push_front(self, sequence):
        sequence.preempted = False
        real(self, sequence)

    return push_front


@fault(Queue, "head")
def latest_goes_first(real):
    return lambda self: next(reversed(self._waiting.values()), None)


@fault(Queue, "expired", patience=True)
def deadlines_are_ignored(real):
    return lambda self, now: []


@fault(Queue, "remove")
def queue_forgets_to_count_down(real):
    return lambda self, attempt: self._waiting.pop(attempt, None)


@fault(Scheduler, "_preempt")
def oldest_is_the_victim(real):
    return lambda self, row: real(self, int(self.rows.active()[0]))


@fault(Rows, "sequence")
def newest_token_is_lost_in_a_preemption(real):
    def sequence(self, row):
        one = real(self, row)
        one.emitted = one.emitted[:-1]
        return one

    return sequence


@fault(Rows, "add")
def row_keeps_what_was_computed_before(real):
    def add(self, sequence):
        before = self.scheduled.copy()
        row = real(self, sequence)
        self.scheduled[row] = min(before[row], sequence.length - 1)
        return row

    return add


@fault(Rows, "append")
def stop_tokens_are_missed(real):
    def append(self, rows, tokens):
        positions, stopped, full = real(self, rows, tokens)
        return positions, stopped & False, full

    return append


@fault(Scheduler, "_submit", resumed=True)
def output_of_an_earlier_attempt_is_forgotten(real):
    return lambda self, event, now: real(self, replace(event, emitted=()), now)


@fault(Scheduler, "_finish", cancels=True)
def finish_reaches_only_the_queue(real):
    def finish(self, event):
        if event.attempt in self.queue:
            real(self, event)

    return finish


@fault(Scheduler, "_end_row")
def end_is_told_twice(real):
    def end_row(self, row, end):
        real(self, row, end)
        self._ends.append(end)

    return end_row


@fault(CacheManager, "release", depths=(2,))
def pages_are_free_under_a_step_in_flight(real):
    return lambda self, row, after_step: real(self, row, None)


@fault(Scheduler, "_retire", depths=(2,))
def step_in_flight_counts_as_retired(real):
    return lambda self, step: real(self, step + 1)


@fault(CacheManager, "release")
def pages_of_a_row_that_leaves_are_lost(real):
    return lambda self, row, after_step: self.tables.clear(row)


@fault(PageChanges, "array")
def newest_page_is_not_told(real):
    return lambda self: real(self)[:-1]


@fault(Scheduler, "_admit")
def admission_depends_on_something_outside(real):
    calls = itertools.count()

    def admit(self, *args):
        if next(calls) % 3:
            real(self, *args)

    return admit


@pytest.mark.parametrize("name", FAULTS)
def test_harness_catches(name, monkeypatch):
    target, method, make, workload = FAULTS[name]
    monkeypatch.setattr(target, method, make(getattr(target, method)))

    # Nothing but searching: the failure need not be made small, and the same search runs each time.
    @settings(max_examples=500, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(workloads(**workload))
    def search(drawn):
        assert Drive(drawn).run().trace == Drive(drawn).run().trace

    with pytest.raises(BROKEN):
        search()
