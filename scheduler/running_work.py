"""Work of running rows in a step, and the pages for it. Rows are preempted where pages are lacking."""

from collections.abc import Mapping

import numpy as np

from cache_manager.manager import CacheManager
from scheduler.drafts import Ints
from scheduler.policy import SchedulingPolicy
from scheduler.preemption_cause import PreemptionCause
from scheduler.running import Running
from scheduler.settings import SchedulerSettings
from scheduler.slices import Slices, Wanted
from scheduler.step_time import Pace


class RunningWork:
    """Finds the tokens that running rows have to compute, and gives the rows pages for them.

    Bound: a sequence is preempted at most `max_preemptions` times, for pages and for waiting sequences together, with
    one exception. Where a row lacks pages and all rows behind the policy's first one have reached the bound, the last
    of them gives way once more. The first row gives way to none: it always goes on, so work that is pending makes
    progress. Hypotheses that wait in their rows for others of their search do nothing, and are suspended without being
    counted.
    """

    def __init__(
        self, settings: SchedulerSettings, running: Running, cache: CacheManager, policy: SchedulingPolicy, drafts: bool
    ) -> None:
        """drafts: rows may have draft tokens."""
        self._settings, self._cache, self._policy, self._drafts = settings, cache, policy, drafts
        self._running, self._rows = running, running.rows

    def make_room(self, now: float) -> tuple[Wanted, bool]:
        """Gives running rows the pages that this step writes; preempts where pages are lacking.

        Returns:
            Rows with work and its extent, and whether a row was preempted.
        """
        rows, cache, wanted = self._rows, self._cache, self._wanted(now)
        ends = wanted.starts + np.minimum(wanted.need, self._settings.chunk)
        covered = cache.covers(wanted.rows, ends)
        (lacking,) = (~covered).nonzero()
        if not len(lacking):
            return wanted, False
        active, ends = wanted.rows[lacking], ends[lacking]
        if cache.lack_a_page(active, ends) and cache.grow_by_page(active):
            return wanted, False
        preempted = False
        for row, end in zip(active.tolist(), ends.tolist(), strict=True):
            start = int(rows.scheduled[row])
            while rows.serial[row] and not cache.grow(row, start, end):
                if cache.pool.returning:
                    break  # pages come back when the step in flight retires: this row sits out one step
                self._running.preempt(*self._victim(now))
                preempted = True
        wanted = self._wanted(now)
        ends = wanted.starts + np.minimum(wanted.need, self._settings.chunk)
        wanted.covered = cache.covers(wanted.rows, ends)
        return wanted, preempted

    def _victim(self, now: float) -> tuple[int, PreemptionCause]:
        """Returns the row that gives way to one that lacks pages, and the cause.

        The last hypothesis that waits for others of its search goes first. Else it is the last row that was preempted
        fewer than `max_preemptions` times, the policy's first row left out. If there is none, it is the last of all.
        """
        last_first = self._policy.running(self._rows, now)[::-1].tolist()
        idle, most = set(self._running.idle()), self._settings.max_preemptions
        if waiting := [row for row in last_first if row in idle]:
            return waiting[0], PreemptionCause.SEARCH
        below = (row for row in last_first[:-1] if self._rows.preemptions(row) < most)
        return next(below, last_first[0]), PreemptionCause.PAGES

    def _wanted(self, now: float) -> Wanted:
        rows = self._rows
        active = self._policy.running(rows, now)
        if self._drafts:
            # The token that a row with drafts in flight goes on with is known once they are checked.
            active = active[rows.drafts[active] == 0]
        if self._running.sitting_out:
            active = active[~np.isin(active, list(self._running.sitting_out))]
        places = active.astype(np.intp)
        starts = rows.scheduled[places]
        need = np.minimum(rows.length[places], rows.max_length[places] - 1) - starts
        some = need > 0
        if np.count_nonzero(some) < len(need):
            active, starts, need = active[some], starts[some], need[some]
        return Wanted(active, starts, need)

    def slices(self, wanted: Wanted, drafts: Mapping[int, Ints], pace: Pace | None = None) -> Slices:
        """Plans work of running rows: decodes, drafts and jumps, then prefills in order while budget and pace allow."""
        slices, active, starts, need = Slices(self._settings, pace), wanted.rows, wanted.starts, wanted.need
        if wanted.covered is None and not drafts and not np.count_nonzero(need != 1):
            slices.decodes(active, starts)
            return slices
        covered = True if wanted.covered is None else wanted.covered
        decodes = covered & (need == 1)
        plain = decodes & (self._rows.drafts[active] == 0) if drafts else decodes
        slices.decodes(active[plain], starts[plain])
        for row, tokens in drafts.items():
            slices.several(row, int(self._rows.scheduled[row]), 1 + len(tokens))
        prefills, jumping = covered & (need > 1), self._running.jumping
        if jumping:
            jumps = prefills & np.isin(active, list(jumping))
            for i in np.flatnonzero(jumps).tolist():
                slices.several(int(active[i]), int(starts[i]), int(need[i]))
            prefills &= ~jumps
        for i in np.flatnonzero(prefills).tolist():
            row = int(active[i])
            slices.prefill(row, int(starts[i]), int(need[i]), int(self._rows.bidirectional[row]))
        return slices
