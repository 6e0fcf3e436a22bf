"""Block allocator: hands out fixed-size KV pages and counts their holders.

A page is free (count 0) or held (count > 0: page tables and steps in flight). The allocator knows nothing of sequences,
tokens or time; `cache_manager.manager` does. After Kwon et al., PagedAttention, SOSP 2023.
"""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class LedgerError(RuntimeError):
    """The books of the page pool do not balance: a bug in Quire, never a client's fault."""


class PageAllocator:
    """Pages 0 .. size - 1. `counts[page]` is the number of its holders."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least 1 page, got {size}")
        self.counts = np.zeros(size, np.int32)
        # A stack with the lowest ids on top: long prompts get ascending runs, which are read as one stream.
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self.free = size

    @property
    def size(self) -> int:
        return len(self.counts)

    def take(self, n: int) -> Pages | None:
        """n free pages, each with count 1, or None (and nothing taken) where fewer are free."""
        if n > self.free:
            return None
        pages = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        self.counts[pages] = 1
        return pages

    def hold(self, pages: Pages) -> None:
        """One more holder for each of these held pages. Raises LedgerError for a free page."""
        if (self.counts[pages] < 1).any():
            raise LedgerError(f"pages {pages[self.counts[pages] < 1].tolist()} are free and cannot be shared")
        self.counts[pages] += 1

    def drop(self, pages: Pages) -> None:
        """One holder less for each of these pages (distinct ids); count 0 frees. Raises LedgerError for a free page."""
        if (self.counts[pages] < 1).any():
            raise LedgerError(f"pages {pages[self.counts[pages] < 1].tolist()} are dropped but have no holder")
        self.counts[pages] -= 1
        freed = pages[self.counts[pages] == 0][::-1]  # reversed: the next to take them gets the same ascending run
        self._stack[self.free : self.free + len(freed)] = freed
        self.free += len(freed)

    def free_pages(self) -> Pages:
        """Ids of the free pages, in no particular order."""
        return self._stack[: self.free].copy()
