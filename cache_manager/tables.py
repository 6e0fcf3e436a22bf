"""Page tables: for each batch row and layer group, the pages of its sequence in order of position."""

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.prefix import NONE


class PageTables:
    """`pages[group, row, index]` is the page of positions index x page_size and on. Set are those of the indices from
    `first[group, row]` to `held[group, row]` - 1; those before have left the group's window.

    Columns grow as sequences do, so a long context limit costs nothing. entries: pages in all tables, one that is in
    several of them as often. reach: these and those before `first`.
    """

    def __init__(self, groups: int, rows: int) -> None:
        self.pages = np.zeros((groups, rows, 8), np.int32)
        self.first = np.zeros((groups, rows), np.int32)
        self.held = np.zeros((groups, rows), np.int32)
        self.entries = self.reach = 0

    def start(self, group: int, row: int, index: int, pages: Pages) -> None:
        """pages: [n], the row's first ones, at this index."""
        self.first[group, row] = self.held[group, row] = index
        self.reach += index
        self.append(group, row, pages)

    def append(self, group: int, row: int, pages: Pages) -> None:
        """pages: [n], the next ones of this row."""
        start = int(self.held[group, row])
        end = start + len(pages)
        self._widen(end)
        self.pages[group, row, start:end] = pages
        self.held[group, row] = end
        self._more(len(pages))

    def append_each(self, rows: NDArray[np.int32], pages: Pages) -> None:
        """pages: [groups, n], the next page of each of these n distinct rows, which hold as many in every group."""
        indices = self.held[0, rows]
        self._widen(int(indices.max(initial=0)) + 1)
        self.pages[:, rows, indices] = pages
        self.held[:, rows] = indices + 1
        self._more(pages.size)

    def _more(self, entries: int) -> None:
        self.entries += entries
        self.reach += entries

    def _widen(self, columns: int) -> None:
        have = self.pages.shape[2]
        if columns > have:
            pages = np.zeros((*self.pages.shape[:2], max(columns, 2 * have)), np.int32)
            pages[..., :have] = self.pages
            self.pages = pages

    def replace(self, group: int, row: int, index: int, page: Pages) -> Pages:
        """page: [1], from now on that of this index. Returns the one before."""
        before = self.pages[group, row, index : index + 1].copy()
        self.pages[group, row, index] = page[0]
        return before

    def cut(self, group: int, row: int, first: int) -> Pages:
        """Takes the pages before this index out of the table; returns them."""
        gone = self.pages[group, row, self.first[group, row] : first].copy()
        self.first[group, row] = first
        self.entries -= len(gone)
        return gone

    def of(self, group: int, row: int) -> Pages:
        """[n] pages of this row in a group."""
        return self.pages[group, row, self.first[group, row] : self.held[group, row]]

    def row(self, row: int) -> Pages:
        """[n] pages of this row, group by group."""
        if len(self.pages) == 1:
            return self.of(0, row).copy()
        return np.concatenate([self.of(group, row) for group in range(len(self.pages))])

    def between(self, row: int, start: int, end: int) -> Pages:
        """[groups, n] pages of these indices, NONE where they have left the group's window."""
        pages = self.pages[:, row, start:end].copy()
        if self.reach > self.entries:
            pages[np.arange(start, end) < self.first[:, row, None]] = NONE
        return pages

    def rows_with(self, group: int, index: int, page: int) -> NDArray[np.int64]:
        """Rows whose table of a group has this page at this index."""
        rows = np.flatnonzero(self.pages[group, :, index] == page)
        return rows[(self.first[group, rows] <= index) & (index < self.held[group, rows])]

    def clear(self, row: int) -> None:
        reach = int(self.held[:, row].sum())
        self.reach -= reach
        self.entries -= reach - int(self.first[:, row].sum())
        self.first[:, row] = self.held[:, row] = 0
