"""Pages that rows hold, may hold and will need: counted anew from what the executor knows of them."""

from dataclasses import dataclass

import numpy as np

from cache_manager.manager import CacheManager
from cache_manager.publishing import CLOSED
from scheduler.settings import SchedulerSettings
from tests.cache_manager.sequences import table
from tests.scheduler.executor import law
from tests.scheduler.oracle import Cached
from tests.scheduler.plan_checker import PlanChecker, Table


@dataclass(eq=False)
class Before:
    """A row as it was before a plan. need: tokens that it had to compute."""

    mirror: PlanChecker
    computed: int
    length: int
    need: int


class Room:
    """For one manager. `ends` are, by row and group, the indices after the last pages that a row has been given."""

    def __init__(self, cache: CacheManager, settings: SchedulerSettings, prefix_cache: bool) -> None:
        self._cache, self._layout, self._settings, self._prefix_cache = cache, cache.layout, settings, prefix_cache
        self._ends: dict[PlanChecker, list[int]] = {}

    def pages(self, tokens: int) -> int:
        return -(-tokens // self._layout.page_size)

    def within(self, window: int) -> int:
        """Most pages that a row may hold of a group with this window: what a page's last token sees, what is ahead."""
        size = self._layout.page_size
        return self.pages(max(window, size) - 1 + self._settings.ahead) + 1

    # Pages that a row holds

    def check_behind_windows(self, row: int, mirror: PlanChecker) -> None:
        """Checks that a row holds, in a group with a window, what the next token sees of known tokens, and no more.

        While it publishes, it also holds the last page that it has published.
        """
        cache = self._cache
        for group, one in enumerate(mirror.tables):
            first, seen = int(cache.tables.first[group, row]), one.seen(mirror.collected)
            last = min(seen, max(0, mirror.collected // one.size - 1)) if self._prefix_cache else seen
            # A row may have stopped to publish since pages were last let go of.
            due = {
                max(one.given, index) for index in ({last, seen} if cache.published.count[row] == CLOSED else {last})
            }
            law(first in due, f"row {row} holds pages of group {group} from index {first} on, not from {due}")

    def held(self, row: int, mirror: PlanChecker) -> set[int]:
        """The row's pages, which the executor must know of."""
        cache, held = self._cache, set[int]()
        for group, (one, pages) in enumerate(zip(mirror.tables, table(cache, row), strict=True)):
            told = one.told[int(cache.tables.first[group, row]) :]
            law(told == pages, f"row {row} has pages {pages} in group {group}, the executor thinks {told}")
            most = len(pages) if one.window is None else self.within(one.window)
            fresh = mirror.cached == mirror.joined and not mirror.collected  # has yet to let go of what its parent held
            law(
                fresh or len(pages) <= most,
                f"row {row} holds {len(pages)} pages of group {group}, its window allows {most}",
            )
            held.update(pages)
        return held

    # How far its tables reach

    def check_ends(self, row: int, mirror: PlanChecker, before: Before | None, scheduled: bool) -> None:
        """A row has slots for all tokens that it came with, where windows do not let go of them, and for what it
        computes next; `before`: where it did not join in this plan.
        """
        ends, chunk = [len(one.told) for one in mirror.tables], self._settings.chunk
        if before is None:
            soon = min(mirror.joined, mirror.cached + self._settings.ahead)
            due = [self.pages(mirror.joined if one.window is None else soon) for one in mirror.tables]
            if not scheduled:
                due = ends  # it has the pages of another sequence, and draws from its logits or sits out
        else:
            wanted = self.pages(before.computed + min(before.need, chunk))
            due = [max(end, wanted) for end in self._ends[mirror]]
            if not scheduled and ends == self._ends[mirror]:
                due = ends  # it sits out for want of pages, or has nothing to compute
        law(ends == due, f"the pages of row {row} reach to the indices {ends}, not {due}")
        self._ends[mirror] = ends

    def lacking(self, before: Before) -> int:
        """Pages that a row lacks to compute what it has to, with one for each that it would write to and shares."""
        wanted = self.pages(before.computed + min(before.need, self._settings.chunk))
        counts, first = self._cache.allocator.counts, before.computed // self._layout.page_size
        shared = [page for one in before.mirror.tables for page in one.told[first:] if counts[page] > 1]
        return len(shared) + sum(max(0, wanted - len(one.told)) for one in before.mirror.tables)

    # Pages that must stay free

    def _to_come(self, one: Table, row: int, group: int, length: int, own: bool) -> int:
        """Pages that a table takes on until `length` tokens are computed, at any one time beyond those that it has.

        own: of these only the ones that no other row has, since others do not come back as the row goes on.
        """
        if one.window is None:
            return 0
        cache, end = self._cache, len(one.told)
        first = int(cache.tables.first[group, row])
        if not own:
            return max(0, min(self.pages(length) - first, self.within(one.window)) - (end - first))
        has = int(np.count_nonzero(cache.allocator.counts[cache.tables.pages_of(group, row)] == 1))
        return max(0, min(self.pages(length) - end, self.within(one.window) - has))

    def spare(
        self, lengths: dict[int, tuple[PlanChecker, int]], each: int = 1, own: bool = True, siblings: int = 0
    ) -> int:
        """Pages that stay free for rows of these lengths: `each` in every group, also for the `siblings` that
        are to go on from their prompts, and what windows take on for prompts.
        """
        promised = sum(
            self._to_come(one, row, group, length, own)
            for row, (mirror, length) in lengths.items()
            for group, one in enumerate(mirror.tables)
        )
        return each * (len(lengths) + siblings) * len(self._layout.groups) + promised

    def check_newcomers(
        self, newcomers: list[int], before: dict[int, Before], rows: dict[int, PlanChecker], siblings: int
    ) -> None:
        """Checks that the last newcomer from the queue left enough for those that ran, and had enough for itself."""
        if not newcomers:
            return
        lengths = {
            row: (mirror, before[row].length if row in before else mirror.joined) for row, mirror in rows.items()
        }
        last = newcomers[-1]
        others = {
            row: one
            for row, one in lengths.items()
            if row != last and (one[0].seed != rows[last].seed or row in before or row in newcomers)
        }
        due = self.spare(others, own=False, siblings=siblings)
        due += self.spare({last: lengths[last]}, each=0, own=False)
        law(
            self._cache.pool.free >= due,
            f"row {last} joins and leaves {self._cache.pool.free} pages, {due} are to stay free",
        )

    def needed(self, tokens: list[int], cached: Cached) -> int:
        """Pages that a sequence of these tokens takes out of those that are free at most."""
        counts, need = self._cache.allocator.counts, 0
        for group, pages in enumerate(cached.used):
            window = self._layout.window(group)
            taken = self.pages(len(tokens)) - cached.count + int(np.count_nonzero(counts[list(pages)] == 0))
            need += taken if window is None else min(taken, self.within(window))
        return need
