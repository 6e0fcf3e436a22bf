"""Block allocator: hands out fixed-size KV pages and counts their holders.

A page is free, held (count > 0: page tables and steps in flight) or cached (count 0, content still named by the prefix
index). The allocator knows nothing of sequences, tokens or time; `cache_manager.manager` does. After Kwon et al.,
PagedAttention, SOSP 2023.

What does not balance is not done: a page that is dropped without a holder, or freed twice, is set aside, with a note,
and never given out again. Two sequences in one page would be worse than a page less.
"""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class LedgerError(RuntimeError):
    """The books of the page pool do not balance: a bug in Quire, never a client's fault."""


class PageAllocator:
    """Pages 0 .. size - 1. `counts[page]` is the number of its holders. free: pages on the free list.

    shared: pages with two holders or more. suspects: why each page that was set aside was.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least 1 page, got {size}")
        self.counts = np.zeros(size, np.int32)
        # A stack with the lowest ids on top: long prompts get ascending runs, which are read as one stream.
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._listed = np.ones(size, np.bool_)  # is on the stack
        self.free = size
        self.shared = 0
        self.suspects: dict[int, str] = {}

    @property
    def size(self) -> int:
        return len(self.counts)

    def take(self, n: int) -> Pages | None:
        """n free pages, each with count 1, or None (and nothing taken) where fewer are free."""
        if n > self.free:
            return None
        pages = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        places = pages.astype(np.intp)  # else numpy converts them at each use
        self._listed[places] = False
        self.counts[places] = 1
        return pages

    def hold(self, pages: Pages) -> None:
        """One more holder for each of these distinct pages, held or cached. Raises LedgerError for a free one."""
        if self._listed[pages].any():
            raise LedgerError(f"pages {pages[self._listed[pages]].tolist()} are free and cannot be shared")
        self.counts[pages] += 1
        self.shared += int(np.count_nonzero(self.counts[pages] == 2))

    def drop(self, pages: Pages) -> Pages:
        """One holder less for each of these distinct pages. Returns those that have none left: free or keep them."""
        places = pages.astype(np.intp)
        left = self.counts[places] - 1
        if not np.count_nonzero(left):
            self.counts[places] = 0
            return pages
        if left.min() < 0:
            self.set_aside(pages[left < 0], "dropped without a holder")
            pages, left = pages[left >= 0], left[left >= 0]
        self.counts[pages] = left
        self.shared -= int(np.count_nonzero(left == 1))
        return pages[left == 0]

    def put_back(self, pages: Pages) -> None:
        """Frees these distinct pages, which have no holder and no name."""
        places = pages.astype(np.intp)
        if np.count_nonzero(self.counts[places]) or np.count_nonzero(self._listed[places]):
            wrong = (self.counts[pages] > 0) | self._listed[pages]
            self.set_aside(pages[wrong], "freed while held or free")
            pages = pages[~wrong]
        if self.suspects:
            pages = pages[[page not in self.suspects for page in pages.tolist()]]
        # Reversed: the next to take them gets the same ascending run.
        self._stack[self.free : self.free + len(pages)] = pages[::-1]
        self._listed[pages] = True
        self.free += len(pages)

    def set_aside(self, pages: Pages, why: str) -> None:
        """Never gives these pages out again. Who holds one keeps it."""
        for page in pages.tolist():
            self.suspects.setdefault(page, why)
        listed = self._stack[: self.free]
        kept = listed[~np.isin(listed, pages)]
        self.free = len(kept)
        self._stack[: self.free] = kept
        self._listed[pages] = False

    def recount(self) -> None:
        """After counts were put right."""
        self.shared = int(np.count_nonzero(self.counts > 1))

    def free_pages(self) -> Pages:
        """Ids of the free pages, in no particular order."""
        return self._stack[: self.free].copy()
