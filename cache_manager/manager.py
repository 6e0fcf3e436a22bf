"""The one door to the page pool: opens, grows and releases the page tables of batch rows, and keeps the books.

A page's count is page tables + steps in flight. A row that leaves while a step that can touch its pages is in flight
hands them to that step; they are free once it retires. So a late write of a dead sequence never lands in a living one's
page.
"""

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, PageAllocator, Pages
from cache_manager.layout import KVLayout
from cache_manager.tables import PageTables


class PageChanges:
    """What one step plan must tell the executor of page tables: [n, 4] of group, row, index, page."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []

    def grown(self, row: int, index: int, pages: Pages) -> None:
        """pages [groups, n] stand from `index` on in this row's tables."""
        groups, n = pages.shape
        part = np.empty((groups, n, 4), np.int32)
        part[..., 0] = np.arange(groups)[:, None]
        part[..., 1] = row
        part[..., 2] = np.arange(index, index + n)
        part[..., 3] = pages
        self._parts.append(part.reshape(-1, 4))

    def array(self) -> NDArray[np.int32]:
        return np.concatenate(self._parts) if self._parts else np.empty((0, 4), np.int32)


class CacheManager:
    """Pages for up to `rows` running sequences from a pool of `pages`."""

    def __init__(self, layout: KVLayout, pages: int, rows: int) -> None:
        self.layout = layout
        self.allocator = PageAllocator(pages)
        self.tables = PageTables(len(layout.groups), rows)
        self._in_flight: dict[int, list[Pages]] = {}  # pages of rows that left, by the step they wait for
        self.returning = 0
        """Pages that become free as steps in flight retire."""

    @property
    def total(self) -> int:
        return self.allocator.size

    @property
    def free(self) -> int:
        return self.allocator.free

    def open(self, row: int) -> None:
        """Starts an empty table. Raises LedgerError where the row still holds pages."""
        if self.tables.held[row]:
            raise LedgerError(f"row {row} is opened while it holds {self.tables.held[row]} pages")

    def covers(self, rows: NDArray[np.int32], ends: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each row, whether its pages have slots for positions below its end."""
        return self.tables.held[rows] * self.layout.page_size >= ends

    def grow(self, row: int, end: int, into: PageChanges) -> bool:
        """Gives the row slots for all positions below `end`. False, and nothing changed, where pages are lacking."""
        groups = len(self.layout.groups)
        held = int(self.tables.held[row])
        missing = -(-end // self.layout.page_size) - held
        if missing <= 0:
            return True
        taken = self.allocator.take(missing * groups)
        if taken is None:
            return False
        pages = taken.reshape(groups, missing)
        self.tables.append(row, pages)
        into.grown(row, held, pages)
        return True

    def release(self, row: int, after_step: int | None) -> None:
        """Empties the row's table. Its pages are free at once (None), or when `after_step` has retired."""
        pages = self.tables.row(row).reshape(-1).copy()
        self.tables.clear(row)
        if after_step is None:
            self.allocator.drop(pages)
        elif len(pages):
            self._in_flight.setdefault(after_step, []).append(pages)
            self.returning += len(pages)

    def retire(self, step: int) -> None:
        """No step up to and with this one can touch a page any more."""
        for waiting in [s for s in self._in_flight if s <= step]:
            for pages in self._in_flight.pop(waiting):
                self.returning -= len(pages)
                self.allocator.drop(pages)

    def verify(self) -> None:
        """Raises LedgerError, naming pages and holders, unless every count is its page tables + steps in flight."""
        expected = np.zeros(self.total, np.int64)
        holders: dict[int, list[str]] = {}

        def book(pages: Pages, holder: str) -> None:
            np.add.at(expected, pages, 1)
            for page in pages.tolist():
                holders.setdefault(page, []).append(holder)

        for row in np.flatnonzero(self.tables.held).tolist():
            book(self.tables.row(row).reshape(-1), f"row {row}")
        for step, parts in self._in_flight.items():
            for pages in parts:
                book(pages, f"step {step}")
        wrong = np.flatnonzero(expected != self.allocator.counts)
        if len(wrong):
            lines = [
                f"page {p}: count {self.allocator.counts[p]}, held by {holders.get(p, [])}" for p in wrong.tolist()
            ]
            raise LedgerError("the page ledger does not balance: " + "; ".join(lines[:8]))
        free = self.allocator.free_pages()
        if len(np.unique(free)) != len(free) or self.allocator.counts[free].any():
            raise LedgerError("the free list holds a page twice, or a page that is held")
        if len(free) + np.count_nonzero(self.allocator.counts) != self.total:
            raise LedgerError("pages were lost: free and held do not add up to the pool")
