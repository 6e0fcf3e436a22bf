"""Page tables: for each batch row and layer group, the pages of its sequence in order of position."""

import numpy as np

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
        if end > self.pages.shape[2]:
            room = np.zeros((*self.pages.shape[:2], max(end, 2 * self.pages.shape[2]) - self.pages.shape[2]), np.int32)
            self.pages = np.concatenate((self.pages, room), axis=2)
        self.pages[:, row, start:end] = pages
        self.held[row] = end

    def row(self, row: int) -> Pages:
        """[groups, held] pages of this row."""
        return self.pages[:, row, : self.held[row]]

    def clear(self, row: int) -> None:
        self.held[row] = 0
