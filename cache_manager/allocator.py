"""Block allocator: hands out fixed-size KV pages and counts their holders.

A page is free, held (count > 0: page tables and steps in flight) or cached (count 0, its block hash still in the prefix
index). The allocator knows nothing of sequences, tokens or time; `cache_manager.manager` does. After Kwon et al.,
PagedAttention, SOSP 2023.

The allocator refuses an operation that does not balance. A page that is dropped without a holder, or freed twice, is
set aside with the reason and never handed out again: two sequences in one page would be worse than one page less.
"""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int32]


class LedgerError(RuntimeError):
    """Raised where the books of the page pool do not balance: a bug in Quire, never a client's fault."""


class PageAllocator:
    """Free list and holder counts of pages 0 .. size - 1.

    Invariant: a page on the free list has count 0 and is not set aside. The allocator is the only writer of the free
    list, and of `counts` but for `PagePool.quarantine`, which corrects them.

    Attributes:
        size: Number of pages.
        counts: [size] int32. Holders of each page: page tables and steps in flight.
        free: Number of pages on the free list.
        shared: Number of pages with at least two holders.
        pages_set_aside: Pages that were set aside, each with the reason.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least 1 page, got {size}")
        self.size = size
        self.counts = np.zeros(size, np.int32)
        # A stack with the lowest ids on top: long prompts get ascending runs, which are read as one stream.
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._listed = np.ones(size, np.bool_)  # whether each page is on the stack
        self.free = size
        self.shared = 0
        self.pages_set_aside: dict[int, str] = {}

    def take(self, n: int) -> Pages | None:
        """Takes n pages off the free list; each gets count 1.

        Returns:
            [n] the pages, or None where fewer are free; then nothing is taken.
        """
        if n > self.free:
            return None
        pages = self._stack[self.free - n : self.free][::-1].copy()
        self.free -= n
        places = pages.astype(np.intp)  # else numpy converts them at each use
        self._listed[places] = False
        self.counts[places] = 1
        return pages

    def hold(self, pages: Pages) -> None:
        """Adds a holder to each of these distinct pages, which are held or cached.

        Raises:
            LedgerError: A page is on the free list.
        """
        if self._listed[pages].any():
            raise LedgerError(f"pages {pages[self._listed[pages]].tolist()} are free and cannot be shared")
        self.counts[pages] += 1
        self.shared += int(np.count_nonzero(self.counts[pages] == 2))

    def drop(self, pages: Pages) -> Pages:
        """Removes a holder from each of these distinct pages.

        A page without a holder is set aside instead.

        Returns:
            The pages without a holder now. The caller caches them or gives them to `put_back`.
        """
        places = pages.astype(np.intp)
        left = self.counts[places] - 1
        # The common case, a sequence that shares nothing: all counts were 1, so no page is wrong and none was shared.
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
        """Puts these distinct pages, which have no holder and no block hash, on the free list.

        A page that is held or free already is set aside instead; a page that was set aside stays off the list.
        """
        places = pages.astype(np.intp)
        if np.count_nonzero(self.counts[places]) or np.count_nonzero(self._listed[places]):
            wrong = (self.counts[pages] > 0) | self._listed[pages]
            self.set_aside(pages[wrong], "freed while held or free")
            pages, places = pages[~wrong], places[~wrong]
        if self.pages_set_aside:
            kept = [page not in self.pages_set_aside for page in pages.tolist()]
            pages, places = pages[kept], places[kept]
        # Reversed: the next `take` returns them as the same ascending run.
        self._stack[self.free : self.free + len(pages)] = pages[::-1]
        self._listed[places] = True
        self.free += len(pages)

    def set_aside(self, pages: Pages, why: str) -> None:
        """Takes these pages out of circulation for good. Their holders keep them; a first reason stands."""
        for page in pages.tolist():
            self.pages_set_aside.setdefault(page, why)
        listed = self._stack[: self.free]
        kept = listed[~np.isin(listed, pages)]
        self.free = len(kept)
        self._stack[: self.free] = kept
        self._listed[pages] = False

    def recount(self) -> None:
        """Derives `shared` from `counts` again, after `counts` were corrected from outside."""
        self.shared = int(np.count_nonzero(self.counts > 1))

    def free_pages(self) -> Pages:
        """Returns the free pages, in no particular order."""
        return self._stack[: self.free].copy()
