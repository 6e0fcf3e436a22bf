"""Bugs planted in attempts with several sequences and in searches: the laws that `Drive` checks must notice each."""

from dataclasses import replace

import numpy as np
import pytest

from cache_manager.manager import CacheManager
from scheduler import rows
from scheduler.admission import Admission
from scheduler.attempts import Attempts
from scheduler.beam import BeamSearch
from scheduler.event_intake import EventIntake
from scheduler.results import Results
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.scheduler import Scheduler
from tests.scheduler.planting import Faults, caught
from tests.support.planted import planted

FAULTS = Faults()


def fault(target, name, **workload):
    return FAULTS.fault(target, name, **{"several": True, "kinds": ("full",), **workload})


# Several sequences of one prompt.


@fault(Rows, "take_siblings")
def a_sibling_has_the_index_of_its_parent(real):
    return lambda self, row: [replace(one, index=int(self.index[row])) for one in real(self, row)]


@fault(Scheduler, "_forked")
def a_sibling_draws_nothing(real):
    def forked(self, logits):
        real(self, logits)
        return logits

    return forked


@fault(Scheduler, "_forked")
def a_sibling_draws_from_another_token(real):
    def forked(self, logits):
        drawing = real(self, logits).copy()
        drawing[len(logits) :, 0] -= 1
        return drawing

    return forked


@fault(Rows, "add")
def no_rows_are_kept_for_siblings(real):
    def add(self, sequence):
        row = real(self, sequence)
        self.siblings[row] = min(1, self.siblings[row])
        return row

    return add


@fault(Admission, "_spare", last_turn=0, depths=(2,))
def no_pages_are_kept_for_siblings(real):
    def spare(self):
        siblings, self._rows.siblings = self._rows.siblings, self._rows.siblings * 0
        pages = real(self)
        self._rows.siblings = siblings
        return pages

    return spare


@fault(Attempts, "end")
def more_is_never_to_come(real):
    def end(self, *args, **said):
        real(self, *args, **said)
        self.ends[-1] = replace(self.ends[-1], more=False)

    return end


@fault(Attempts, "end")
def more_is_always_to_come(real):
    def end(self, *args, **said):
        real(self, *args, **said)
        self.ends[-1] = replace(self.ends[-1], more=True)

    return end


@fault(Attempts, "end_all", cancels=True)
def the_end_of_all_forgets_one(real):
    return lambda self, *args, **said: list(real(self, *args, **said))[:-1]


@fault(EventIntake, "_finish", cancels=True)
def one_that_is_finished_ends_all(real):
    return lambda self, event: real(self, replace(event, index=None))


@fault(EventIntake, "_finish", cancels=True)
def one_that_is_finished_goes_on(real):
    return lambda self, event: real(self, event) if event.index is None else None


@fault(Running, "finish", cancels=True, last_turn=0)
def the_first_one_takes_the_prompt_with_it(real):
    return lambda self, attempt, index: self.leave(attempt, index)


@fault(EventIntake, "_submit", resumed=True)
def output_of_one_is_given_to_the_next(real):
    def submit(self, event, now):
        known = event.emitted
        real(self, replace(event, emitted=known[-1:] + known[:-1]), now)

    return submit


@fault(Running, "serve", resumed=True)
def an_attempt_starts_with_each_of_its_sequences(real):
    return lambda self, attempt: None


@fault(Results, "_end_failed", faults=True)
def a_fault_ends_one_sequence_alone(real):
    def end_failed(self, flown, result):
        def end_one(attempt, reason, message=""):
            index = self._attempts.indices(attempt)[0]
            self._running.leave(attempt, index)
            self._attempts.end(attempt, index, reason, message=message)

        self._running.end_attempt = end_one
        real(self, flown, result)
        del self._running.end_attempt

    return end_failed


@fault(CacheManager, "fork")
def a_fork_forgets_that_pages_are_shared(real):
    def fork(self, parent, child, *args):
        chain = real(self, parent, child, *args)
        self.forked[child] = False
        return chain

    return fork


@fault(CacheManager, "_unshare")
def a_page_of_its_own_is_not_filled(real):
    return lambda self, group, row, index, page, written: real(self, group, row, index, page, False)


@fault(CacheManager, "fork")
def a_fork_is_not_told_its_pages(real):
    def fork(self, parent, child, *args):
        chain = real(self, parent, child, *args)
        self.pool.changes.row_left(child)
        return chain

    return fork


@fault(Rows, "add", several=False)
def end_tokens_of_a_former_tenant_stay(real):
    def add(self, sequence):
        before = self._stops.copy()
        row = real(self, sequence)
        own = len(sequence.request.stop_ids)
        self._stops[row, own : before.shape[1]] = before[row, own:]
        return row

    return add


@fault(rows, "_with_columns", roomy=True)
def a_wider_table_of_end_tokens_has_token_0_in_it(real):
    return lambda array, columns, fill: real(array, columns, 0)


# Beam search.


@fault(Running, "drop", cancels=True)
def a_forced_token_outlives_the_row_that_it_was_for(real):
    def drop(self, row):
        given = self.forced.copy()
        real(self, row)
        self.forced = given

    return drop


@fault(Running, "take_forced")
def what_a_hypothesis_goes_on_with_is_not_told(real):
    return lambda self: real(self)[:0]


@fault(Running, "take_forced")
def what_a_hypothesis_goes_on_with_is_told_to_another(real):
    def take_forced(self):
        forced = real(self).copy()
        forced[:, 1] = np.roll(forced[:, 1], 1)
        return forced

    return take_forced


@fault(BeamSearch, "has_offer")
def a_hypothesis_that_has_offered_is_queued(real):
    return lambda self, slot: False


@fault(Running, "preempt")
def a_hypothesis_that_has_offered_is_lost(real):
    def preempt(self, row, cause):
        attempt, slot = int(self.rows.attempt[row]), int(self.rows.index[row])
        real(self, row, cause)
        if attempt in self.beams:
            self.beams[attempt].suspended.pop(slot, None)

    return preempt


@fault(Running, "leave")
def a_dead_hypothesis_keeps_its_row(real):
    return lambda self, attempt, index: None if attempt in self.beams else real(self, attempt, index)


@fault(Running, "idle")
def hypotheses_that_wait_never_give_way(real):
    return lambda self: []


@fault(Admission, "_suspend_for")
def hypotheses_that_wait_give_way_to_running_rows_alone(real):
    return lambda self, sequence: False


@fault(BeamSearch, "_is_decided")
def a_search_is_over_with_its_first_results(real):
    return lambda self, best: len(self.finished) >= self.count


@fault(BeamSearch, "_score", roomy=True)
def the_end_token_counts_for_nothing_in_the_score(real):
    return lambda self, one: real(self, replace(one, length=max(1, one.length - (one.token in self.stop_ids))))


@fault(BeamSearch, "next_round")
def a_hypothesis_goes_on_in_its_sibling_s_slot(real):
    def next_round(self):
        moves = real(self)
        slots = [move.slot for move in moves]
        return [replace(move, token=moves[i - 1].token) for i, move in enumerate(moves)] if len(slots) > 1 else moves

    return next_round


RARE = {
    "a_wider_table_of_end_tokens_has_token_0_in_it",
    "no_pages_are_kept_for_siblings",
    "one_that_is_finished_ends_all",
    "the_end_token_counts_for_nothing_in_the_score",
}


@pytest.mark.parametrize("name", planted(FAULTS, RARE))
@pytest.mark.sample(2)
def test_harness_catches(name, monkeypatch):
    assert caught(FAULTS[name], monkeypatch)
