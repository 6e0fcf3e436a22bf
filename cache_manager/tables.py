"""Page tables: for each batch row and layer group, the pages of its sequence in order of position.

An entry stands for a page's tokens. In a table of recurrent states it stands for as many tokens as `KVLayout.interval`
says, and its page holds the state after them, so it belongs to the last of their pages.
"""

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.prefix import NONE


class PageTables:
    """Page tables, in arrays that this class alone writes.

    `pages[group, row, index]` is the page of positions index x tokens of an entry and following. Entries are valid from
    `first[group, row]` to `held[group, row]` - 1; pages before these have left the group's window. Columns are added as
    sequences grow, so a long context limit costs no memory.

    Attributes:
        pages: [groups, rows, columns] int32. Entries of the tables.
        first: [groups, rows] int32. Index of the first valid entry.
        held: [groups, rows] int32. Index after the last valid entry.
        entries: Number of valid entries in all tables. A page counts once for each table that has it.
        reach: `entries`, and the number of indices before `first`.

    Args:
        groups: Page tables of a row.
        rows: Rows of the batch.
        states: How many of these, the last ones, are tables of states.
        span: Pages that an entry of a state's table stands for.
    """

    def __init__(self, groups: int, rows: int, states: int = 0, span: int = 1) -> None:
        self._states, self._span = groups - states, span  # first table of states
        self.pages = np.zeros((groups, rows, 8), np.int32)
        self.first = np.zeros((groups, rows), np.int32)
        self.held = np.zeros((groups, rows), np.int32)
        self.entries = self.reach = 0

    def start(self, group: int, row: int, index: int, pages: Pages) -> None:
        """Starts a row's empty table.

        Args:
            group: Layer group.
            row: Batch row.
            index: Index of the first entry.
            pages: [n] the first entries.
        """
        self.first[group, row] = self.held[group, row] = index
        self.reach += index
        self.append(group, row, pages)

    def append(self, group: int, row: int, pages: Pages) -> None:
        """Appends pages to a row's table.

        Args:
            group: Layer group.
            row: Batch row.
            pages: [n] the next entries.
        """
        start = int(self.held[group, row])
        end = start + len(pages)
        self._widen(end)
        self.pages[group, row, start:end] = pages
        self.held[group, row] = end
        self._more(len(pages))

    def append_each(self, rows: NDArray[np.int32], pages: Pages) -> NDArray[np.int32]:
        """Appends one page to each of several rows' tables.

        Args:
            rows: [n] int32 distinct rows, n at least 1, each with equally many pages in every group.
            pages: [groups, n] the next entry of each.

        Returns:
            [n] int32. Index of each row's entry, the same in all groups.
        """
        places = rows.astype(np.intp)  # else numpy converts them at each use
        indices = self.held[0][places]
        try:
            self.pages[:, places, indices] = pages
        except IndexError:  # a table longer than any before it: numpy has checked all places before it writes
            self._widen(int(indices.max()) + 1)
            self.pages[:, places, indices] = pages
        self.held[:, places] = indices + 1
        self._more(pages.size)
        return indices

    def _more(self, entries: int) -> None:
        self.entries += entries
        self.reach += entries

    def _widen(self, columns: int) -> None:
        """Makes room for at least `columns` entries a table, doubling so that growth is rare."""
        have = self.pages.shape[2]
        if columns > have:
            pages = np.zeros((*self.pages.shape[:2], max(columns, 2 * have)), np.int32)
            pages[..., :have] = self.pages
            self.pages = pages

    def replace(self, group: int, row: int, index: int, page: Pages) -> Pages:
        """Replaces an entry.

        Args:
            group: Layer group.
            row: Batch row.
            index: Index of the entry.
            page: [1] the new page.

        Returns:
            [1] the page until now.
        """
        before = self.pages[group, row, index : index + 1].copy()
        self.pages[group, row, index] = page[0]
        return before

    def cut(self, group: int, row: int, first: int) -> Pages:
        """Removes the entries before index `first`; returns their pages."""
        gone = self.pages[group, row, self.first[group, row] : first].copy()
        self.first[group, row] = first
        self.entries -= len(gone)
        return gone

    def truncate(self, group: int, row: int, end: int) -> Pages:
        """Removes the entries from index `end` on; returns their pages."""
        gone = self.pages[group, row, end : self.held[group, row]].copy()
        self.held[group, row] = end
        self._more(-len(gone))
        return gone

    def pages_of(self, group: int, row: int) -> Pages:
        """Returns [n] the pages of a row in a group: a view of the array."""
        return self.pages[group, row, self.first[group, row] : self.held[group, row]]

    def row(self, row: int) -> Pages:
        """Returns [n] the pages of a row, group by group: a copy."""
        if len(self.pages) == 1:
            return self.pages_of(0, row).copy()
        return np.concatenate([self.pages_of(group, row) for group in range(len(self.pages))])

    def between(self, row: int, start: int, end: int) -> Pages:
        """Returns [groups, n] the pages of indices start .. end - 1, NONE where they have left the group's window."""
        if self._states < len(self.pages):
            return self._between_with_states(row, start, end)
        pages = self.pages[:, row, start:end].copy()
        if self.reach > self.entries:  # else no table has an index before its `first`
            pages[np.arange(start, end) < self.first[:, row, None]] = NONE
        return pages

    def _between_with_states(self, row: int, start: int, end: int) -> Pages:
        """Returns what `between` does. States are at the last page of their tokens, NONE at all others."""
        pages = np.full((len(self.pages), end - start), NONE, np.int32)
        tokens = slice(self._states)
        pages[tokens] = self.pages[tokens, row, start:end]
        pages[tokens][np.arange(start, end) < self.first[tokens, row, None]] = NONE
        first = -(-(start + 1) // self._span)  # checkpoints, by number from 1
        entries = np.arange(first, end // self._span + 1) - 1
        if len(entries):
            there = self.pages[self._states :, row][:, entries]
            there = np.where(self._has(slice(self._states, None), row, entries), there, NONE)
            pages[self._states :, (entries + 1) * self._span - 1 - start] = there
        return pages

    def _has(self, tables: slice, row: int, entries: NDArray[np.int64]) -> NDArray[np.bool_]:
        return (self.first[tables, row, None] <= entries) & (entries < self.held[tables, row, None])

    def entry_of(self, group: int, index: int) -> int:
        """Returns the entry of a table for the page of an index; for a state, the last page of its tokens."""
        return index if group < self._states else (index + 1) // self._span - 1

    def rows_with(self, group: int, index: int, page: int) -> NDArray[np.int64]:
        """Returns the rows whose table of a group has a page at an index."""
        rows = np.flatnonzero(self.pages[group, :, index] == page)
        # Columns outside first .. held - 1 have entries of the past.
        return rows[(self.first[group, rows] <= index) & (index < self.held[group, rows])]

    def clear(self, row: int) -> None:
        """Empties the tables of a row, in all groups."""
        reach = sum(self.held[:, row].tolist())  # few groups: quicker than numpy's sum
        self.reach -= reach
        self.entries -= reach - sum(self.first[:, row].tolist())
        self.first[:, row] = self.held[:, row] = 0
