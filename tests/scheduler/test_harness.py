"""Bugs planted in the scheduler: the laws that `Drive` checks must notice each of them."""

import itertools
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from cache_manager.block_hash import BlockHasher, Scope
from cache_manager.cached import Cause, PrefixCache
from cache_manager.changes import PageChanges
from cache_manager.lookup import PrefixLookup
from cache_manager.manager import CacheManager
from cache_manager.pool import PagePool
from cache_manager.publishing import PublishedPages
from cache_manager.transfers import NO_TRANSFER
from scheduler import scheduler as module
from scheduler.admission import Admission
from scheduler.attempts import Attempts
from scheduler.event_intake import EventIntake
from scheduler.queue import Queue
from scheduler.results import Results
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.scheduler import Scheduler
from scheduler.slices import Slices
from tests.scheduler.planting import Faults, caught

FAULTS = Faults()


def fault(target, name, **workload):
    return FAULTS.fault(target, name, kinds=("full",), **workload)


class Anything:
    """Equal to whatever it is compared with, numpy arrays included."""

    __array_ufunc__ = None
    __hash__ = None

    def __getitem__(self, index):
        return self

    def __eq__(self, other):
        return np.ones(np.shape(other), bool)


@fault(module, "InFlight")
def results_of_former_tenants_count(real):
    return lambda step, now, slices, computed, drawing, _, *rest: real(
        step, now, slices, computed, drawing, Anything(), *rest
    )


@fault(Rows, "remove")
def departures_are_not_counted(real):
    def remove(self, row):
        real(self, row)
        self.departures -= 1

    return remove


@fault(Rows, "add")
def serials_are_used_twice(real):
    def add(self, sequence):
        row = real(self, sequence)
        self.serial[row] = 1
        return row

    return add


@fault(Results, "_end_failed", faults=True, depths=(2,))
def fault_hits_whoever_has_the_row_now(real):
    return lambda self, flown, result: real(self, replace(flown, serials=self.rows.serial), result)


@fault(Results, "_end_failed", faults=True)
def fault_is_not_told(real):
    return lambda self, flown, result: None


@fault(Scheduler, "_plan")
def leaves_are_told_again(real):
    def plan(self, *args):
        made = real(self, *args)
        self._running.leaves = made.leaves.tolist()
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


@fault(Slices, "prefill")
def budget_is_ignored(real):
    def prefill(self, row, start, need, bidirectional=0):
        self.budget = max(self.budget, need)
        real(self, row, start, need, bidirectional)

    return prefill


@fault(Slices, "prefill")
def prefill_chunk_is_ignored(real):
    def prefill(self, row, start, need, bidirectional=0):
        self._chunk = need
        real(self, row, start, need, bidirectional)

    return prefill


@fault(Slices, "decodes")
def only_one_decode_a_step(real):
    return lambda self, rows, starts: real(self, rows[:1], starts[:1])


@fault(Queue, "push")
def preempted_sequence_goes_to_the_back(real):
    def push(self, sequence, *deadline):
        sequence.order += 2**30 * sequence.preempted
        real(self, sequence, *deadline)

    return push


@fault(Queue, "push")
def preempted_sequence_starts_anew(real):
    def push(self, sequence, *deadline):
        sequence.preempted = False
        real(self, sequence, *deadline)

    return push


@fault(Scheduler, "schedule")
def events_amid_a_step_are_lost(real):
    def schedule(self, now, events):
        full = self.steps_in_flight >= self.settings.depth
        return real(self, now, () if full else events)

    return schedule


@fault(Scheduler, "schedule")
def events_amid_a_step_plan_another(real):
    def schedule(self, now, events):
        in_flight, self._in_flight = self._in_flight, deque()
        plan = real(self, now, events)
        self._in_flight = in_flight + self._in_flight
        return plan

    return schedule


@fault(Queue, "in_order")
def latest_goes_first(real):
    return lambda self: real(self)[::-1]


@fault(Queue, "expired", queue_timeout=True)
def deadlines_are_ignored(real):
    return lambda self, now: []


@fault(Queue, "remove")
def queue_forgets_to_count_down(real):
    return lambda self, attempt, index=0: self._waiting.pop((attempt, index), None)


@fault(Running, "preempt")
def oldest_is_the_victim(real):
    return lambda self, row, cause: real(self, int(self.rows.active()[0]), cause)


@fault(Rows, "sequence")
def newest_token_is_lost_in_a_preemption(real):
    def sequence(self, row):
        one = real(self, row)
        one.emitted = one.emitted[:-1]
        return one

    return sequence


@fault(Rows, "append")
def stop_tokens_are_missed(real):
    def append(self, rows, tokens, place=None):
        positions, stopped, full = real(self, rows, tokens, place)
        return positions, stopped & False, full

    return append


@fault(EventIntake, "_submit", resumed=True)
def output_of_an_earlier_attempt_is_forgotten(real):
    return lambda self, event, now: real(self, replace(event, emitted=()), now)


@fault(EventIntake, "_finish", cancels=True)
def finish_reaches_only_the_queue(real):
    def finish(self, event):
        if event.attempt in self._queue.attempts():
            real(self, event)

    return finish


@fault(Attempts, "end")
def end_is_told_twice(real):
    def end(self, *args, **said):
        real(self, *args, **said)
        self.ends.append(self.ends[-1])

    return end


@fault(CacheManager, "release", depths=(2,))
def pages_are_free_under_a_step_in_flight(real):
    return lambda self, row, after_step: real(self, row, None)


@fault(Scheduler, "_retire", depths=(2,))
def step_in_flight_counts_as_retired(real):
    return lambda self, step: real(self, step + 1)


@fault(CacheManager, "release")
def pages_of_a_row_that_leaves_are_lost(real):
    return lambda self, row, after_step: self.tables.clear(row)


@fault(PageChanges, "grown")
def newest_page_is_not_told(real):
    return lambda self: real(self)[:-1]


@fault(Admission, "admit")
def admission_depends_on_something_outside(real):
    calls = itertools.count()

    def admit(self, *args):
        if next(calls) % 3:
            real(self, *args)

    return admit


# The prefix cache. Most of its bugs show where prompts start alike: thousands of other workloads show none of them.


@fault(Scheduler, "_plan")
def pages_are_published_before_they_are_computed(real):
    def plan(self, *args):
        made = real(self, *args)
        self._results._publish(self._in_flight[-1])
        return made

    return plan


@fault(PublishedPages, "distrust", faults=True, alike=True, last_turn=20)
def pages_of_a_row_that_faulted_keep_their_names(real):
    return lambda self, row: None


@fault(PrefixCache, "forget", faults=True, alike=True, last_turn=20)
def a_fault_takes_only_the_newest_name(real):
    def forget(self, nodes, cause):
        return real(self, nodes[-1:] if cause is Cause.FAULT else nodes, cause)

    return forget


@fault(PrefixLookup, "match", alike=True)
def all_of_a_prompt_is_found(real):
    return lambda self, chain, most, transferred=NO_TRANSFER: real(self, chain, most + 1, transferred)


@fault(PrefixLookup, "match", alike=True)
def nobody_waits_for_a_page(real):
    return lambda self, chain, most, transferred=NO_TRANSFER: replace(
        real(self, chain, most, transferred), awaited=None
    )


@fault(PublishedPages, "is_computing", alike=True)
def a_page_is_waited_for_without_end(real):
    return lambda self, awaited: True


@fault(Queue, "in_order", alike=True, last_turn=2)
def those_behind_one_that_waits_are_held_up(real):
    def in_order(self):
        line = real(self)
        waits = next((i for i, one in enumerate(line) if one.awaited is not None), len(line))
        return line[: waits + 1]

    return in_order


@fault(Slices, "prefill")
def cached_tokens_are_computed_all_the_same(real):
    return lambda self, row, start, need, bidirectional=0: real(self, row, 0, start + need, bidirectional)


@fault(Admission, "_start", resumed=True)
def cached_output_is_told_as_prompt(real):
    def start(self, now, step, sequence, match):
        row = real(self, now, step, sequence, match)
        self._started[-1:] = [(attempt, when, match.tokens) for attempt, when, _ in self._started[-1:]]
        return row

    return start


@fault(Admission, "_start")
def hits_of_a_preempted_sequence_count_again(real):
    def start(self, now, step, sequence, match):
        row = real(self, now, step, sequence, match)
        self._counters.hits += match.tokens * sequence.preempted
        return row

    return start


@fault(Running, "preempt")
def all_of_a_preempted_sequence_counts_as_computed_again(real):
    def preempt(self, row, cause):
        self._counters.recomputed += int(self.rows.scheduled[row])
        real(self, row, cause)

    return preempt


@fault(Admission, "_match", alike=True)
def prompts_are_not_named(real):
    def match(self, sequence):
        sequence.chain = sequence.chain or self._hasher.chain(sequence.request.scope)
        return self._cache.lookup.match(sequence.chain, sequence.length - 1)

    return match


@fault(Rows, "hash_pages", alike=True)
def output_is_named_as_something_else(real):
    def hash_pages(self, row, computed, page_size):
        outputs, self._outputs = self._outputs, np.roll(self._outputs, 1, axis=1)
        real(self, row, computed, page_size)
        self._outputs = outputs

    return hash_pages


@fault(Rows, "hash_next", alike=True)
def the_next_page_is_named_as_something_else(real):
    def hash_next(self, rows, full, page_size):
        outputs, self._outputs = self._outputs, np.roll(self._outputs, 1, axis=1)
        real(self, rows, full, page_size)
        self._outputs = outputs

    return hash_next


@fault(BlockHasher, "chain")
def salts_are_ignored(real):
    return lambda self, scope: real(self, Scope())


@fault(PageChanges, "row_left", alike=True)
def pages_of_a_row_that_left_are_told(real):
    return lambda self, row: None


@fault(PagePool, "drop")
def cached_pages_are_told_as_freed(real):
    def drop(self, pages):
        real(self, pages)
        self.changes.freed(pages)

    return drop


@fault(PublishedPages, "_take_over", depths=(2,), alike=True)
def exchanged_page_is_free_under_a_step_in_flight(real):
    return lambda self, row, index, node, after_step: real(self, row, index, node, None)


@fault(PublishedPages, "_take_over", alike=True)
def exchanged_page_is_not_told(real):
    def take_over(self, *args):
        before = len(self.pool.changes._grown)
        taken = real(self, *args)
        del self.pool.changes._grown[before:]
        return taken

    return take_over


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.sample(2)
def test_harness_catches(name, monkeypatch):
    assert caught(FAULTS[name], monkeypatch)
