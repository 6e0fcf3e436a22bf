"""Page tables: for each batch row and layer group, the pages of its sequence in order of position."""

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages


class PageTables:
    """`pages[group, row, index]` is the page of positions index x page_size and on; `held[row]` says how many are set.

    All groups of a row hold equally many pages. Columns grow as sequences do, so a long context limit costs nothing.
    """

    def __init__(self, groups: int, rows: int) -> None:
        self.pages = np.zeros((groups, rows, 8), np.int32)
        self.held = np.zeros(rows, np.int32)

    def append(self, row: int, pages: Pages) -> None:
        """pages: [groups, n], the next n pages of this row in every group."""
        start = int(self.held[row])
        end = start + pages.shape[1]
        self._widen(end)
        self.pages[:, row, start:end] = pages
        self.held[row] = end

    def append_each(self, rows: NDArray[np.int32], pages: Pages) -> None:
        """pages: [groups, n], the next page of each of these n distinct rows in every group."""
        self._widen(int(self.held[rows].max(initial=0)) + 1)
        self.pages[:, rows, self.held[rows]] = pages
        self.held[rows] += 1

    def _widen(self, columns: int) -> None:
        have = self.pages.shape[2]
        if columns > have:
            room = max(columns, 2 * have) - have
            self.pages = np.pad(self.pages, ((0, 0), (0, 0), (0, room)))

    def replace(self, row: int, index: int, pages: Pages) -> Pages:
        """pages: [groups], from now on those of this index. Returns the ones before."""
        before = self.pages[:, row, index].copy()
        self.pages[:, row, index] = pages
        return before

    def row(self, row: int) -> Pages:
        """[groups, held] pages of this row."""
        return self.pages[:, row, : self.held[row]]

    def clear(self, row: int) -> None:
        self.held[row] = 0
