"""Pages that leave a window: who lets go of them when, and that they are the first to lose their place."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cache_manager.prefix import NONE
from tests.cache_manager.device import Table
from tests.cache_manager.histories import tables
from tests.cache_manager.holders import Holders
from tests.cache_manager.windows import first_needed, first_seen, most_held


class Sliding(Holders):
    """slides: how often rows slid. last_resorts: how often pages went of nodes that stayed, as nothing else could."""

    slides = last_resorts = 0

    def slide(self, rows: list[int], computed: list[int]) -> None:
        """Steps have computed these rows up to there, and that is published."""
        self.manager.slide(np.array(rows, np.int32), np.array(computed, np.int32))
        self.slides += 1
        for row, end in zip(rows, computed, strict=True):
            story, now = self.story(row), tables(self.manager, row)
            for group, window in enumerate(self.windows.by_group):
                before, after = story.table[group], now[group]
                gone = before.between(before.first, after.first)
                assert before.pages == gone + after.pages, f"row {row} had {before}, has {after}"
                self._check_first(row, window, before, after, end)
                story.past.update((page, self.births[page]) for page in gone)
                self._drop(gone)
                self._queue_up(gone)
            story.table = now
        self._balance()

    def _check_first(self, row: int, window: int | None, before: Table, after: Table, computed: int) -> None:
        needed = first_needed(window, computed, self.size)
        if self._waits_to_publish(row, computed):  # the row goes on from the last page that it has published
            needed = min(needed, max(int(self.manager.published.count[row]) - 1, 0))
        least = max(before.first, needed)
        most = max(before.first, first_seen(window, computed) // self.size)  # for who need not go on from a page
        assert least <= after.first <= most, f"pages from {after.first} on are held, {least} to {most} was due"

    def _waits_to_publish(self, row: int, computed: int) -> bool:
        """Whether the row's next full page has a published twin that it cannot take over yet: a step in flight of a row
        that left still touches the page.
        """
        named = int(self.manager.published.count[row])
        if named >= computed // self.size:
            return False
        own = set(self.manager.tables.pages[:, row, named].tolist())
        return any(own & set(pages) for _, pages in self.waiting)

    def _queue_up(self, pages: list[int]) -> None:
        node_of = self.manager.prefix.index.node_of
        for page in pages:
            if not self.counts[page] and node_of[page] != NONE:
                self.line[page] = self.slides

    @contextmanager
    def _evicting(self) -> Iterator[None]:
        """Around what takes names from cached pages: first go those that left a window, in this order; then ends of
        sequences; and where all of these are gone, any page without a holder.
        """
        index = self.manager.prefix.index
        before = index.node_of.copy()
        yield
        lost = np.flatnonzero((before != NONE) & (index.node_of == NONE)).tolist()
        places = {page: self.line.pop(page) for page in lost if page in self.line}
        if places and self.line:
            assert max(places.values()) <= min(self.line.values()), "a page that left a window later went first"
        others = [page for page in lost if page not in places]
        assert not others or not self.line, f"pages {others} went before those that left a window, {self.line}"
        if others:
            self._check_last_resort(set(before[others].tolist()))

    def _check_last_resort(self, nodes: set[int]) -> None:
        """nodes: have lost pages that had not left a window. If some are still there, all that can be had is."""
        index = self.manager.prefix.index
        alive = index.all()
        if nodes.isdisjoint(alive):
            return
        self.last_resorts += 1
        ends = set(alive) - {index.parent[node] for node in alive}
        for node in ends:
            assert any(self.counts[page] for page in index.pages_of([node])), "the end of a sequence could have gone"
        idle = [page for page in np.flatnonzero(index.node_of != NONE).tolist() if not self.counts[page]]
        self.line = dict.fromkeys(idle, self.slides)

    def _leave_line(self) -> None:
        """Pages have lost their names, of whatever place."""
        node_of = self.manager.prefix.index.node_of
        self.line = {page: place for page, place in self.line.items() if node_of[page] != NONE}

    def _check_promised(self) -> None:
        """Checks that windows took on no less than what came to pass, and at most a page more."""
        rows = [row for row in self.running() if not self._lags(row)]
        tokens = [len(self.story(row).tokens) for row in rows]
        promised = self.manager.pages_still_to_take(np.array(rows, np.int32), np.array(tokens, np.int32))
        least = groups = 0
        for story, end in zip(map(self.story, rows), tokens, strict=True):
            for table, window in zip(story.table, self.windows.by_group, strict=True):
                if window is not None:
                    held = (table.first, table.end, story.computed, end)
                    most = most_held(window, self.size, self.windows.ahead, *held)
                    least, groups = least + max(0, most - len(table.pages)), groups + 1
        assert least <= promised <= least + groups, f"{promised} pages are promised, {least} will be taken on"

    def _lags(self, row: int) -> bool:
        """Whether it holds pages that it could have let go."""
        story = self.story(row)
        return any(
            table.first < first_needed(window, story.computed, self.size)
            for table, window in zip(story.table, self.windows.by_group, strict=True)
        )
