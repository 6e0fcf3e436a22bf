"""Preemption for waiting sequences: rows give way where the policy puts a sequence before them that finds no room.

`RunningWork` preempts for pages that running rows lack. Here rows are preempted before a step is planned, so that
admission finds their room in it, or once the steps in flight have let go of their pages.
"""

import numpy as np

from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from scheduler.admission import Admission
from scheduler.policy import SchedulingPolicy
from scheduler.preemption_cause import PreemptionCause
from scheduler.rows import Index, Sequence
from scheduler.running import NO_ROWS, Running
from scheduler.settings import SchedulerSettings


class Preemption:
    """Makes way for the first in line. A sequence that was preempted `max_preemptions` times never gives way to it."""

    def __init__(
        self,
        settings: SchedulerSettings,
        running: Running,
        cache: CacheManager,
        admission: Admission,
        policy: SchedulingPolicy,
    ) -> None:
        self._settings, self._running, self._rows = settings, running, running.rows
        self._cache, self._admission, self._policy = cache, admission, policy

    def make_way(self, now: float, step: int) -> None:
        """Preempts rows for the first in line where that gives it all the rows, pages and budget that it lacks.

        One sequence a step. Hypotheses that wait in rows for others go first: admission suspends them.
        """
        queue, rows = self._running.queue, self._rows
        if not len(queue) or not self._policy.wants_room(queue, rows, now):
            return
        found = self._admission.next_in_line(now, step)
        if found is None:
            return
        sequence, match = found
        those = self._policy.gives_way(sequence, rows, now).tolist()
        unprotected = [row for row in those if rows.preemptions(row) < self._settings.max_preemptions]
        for row in self._enough(sequence, match, unprotected):
            self._running.preempt(row, PreemptionCause.PRIORITY)
            self._admission.made_way_for = sequence.key

    def _enough(self, sequence: Sequence, match: Match, those: list[int]) -> list[int]:
        """Returns as many of the first rows as give the sequence what it lacks; none where all do not."""
        lack, chosen, holders = self._admission.lacking(sequence, match), list[int](), dict[int, int]()
        matched = np.concatenate(self._cache.lookup.pages_of(match)) if match.tokens else NO_ROWS
        for row in those:
            if not lack.rows and not lack.pages:
                break
            chosen.append(row)
            lack = lack.less(*self._room_of(row, matched, holders))
        if lack.rows or lack.pages or not self._leaves_budget(sequence, match, chosen):
            return []
        return chosen

    def _room_of(self, row: int, matched: Index, holders: dict[int, int]) -> tuple[int, int]:
        """Returns the rows and pages that the end of a row frees, those that are kept free for it included.

        Args:
            row: The row, which ends after others that were asked for with the same `holders`.
            matched: Pages that the waiting sequence goes on from: they stay held, by it.
            holders: Rows that still hold a page, by page, of the pages that the ended rows shared.
        """
        pages = self._cache.tables.row(row)
        pages = pages[~np.isin(pages, matched)]
        counts = self._cache.allocator.counts[pages]
        freed = int(np.count_nonzero(counts == 1))
        shared = counts > 1
        for page, count in zip(pages[shared].tolist(), counts[shared].tolist(), strict=True):
            holders[page] = holders.get(page, count) - 1
            freed += not holders[page]
        return 1 + int(self._rows.siblings[row]), freed + self._admission.spare(np.array([row], np.int32))

    def _leaves_budget(self, sequence: Sequence, match: Match, chosen: list[int]) -> bool:
        """Whether the other rows leave budget: a prompt that takes all of it goes on, and none gives way in vain."""
        rows, most = self._rows, self._settings.step_tokens
        paced = self._settings.target_itl is not None
        others: Index = np.setdiff1d(rows.active(), np.array(chosen, np.int32))
        need = np.minimum(rows.length[others], rows.max_length[others] - 1) - rows.scheduled[others]
        if paced and np.count_nonzero(need > 1):
            return False  # a prefill takes all of the time that the target leaves
        left = most - int(np.clip(need, 0, self._settings.chunk).sum())
        return min(left, self._settings.chunk) >= max(1, sequence.request.scope.bidirectional - match.tokens)
