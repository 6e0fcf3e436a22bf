"""Page changes of one step plan, which its executor applies: table entries, copies, swaps and freed pages.

An executor applies swap-outs first, then table entries, copies and swap-ins, then it computes the slices. So a swap-out
reads a page before the page's next holder writes it. `scheduler.step.StepPlan` has the same arrays.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages

Ints = NDArray[np.int32]


def _nothing(width: int) -> Ints:
    none = np.empty((0, width), np.int32)
    none.flags.writeable = False
    return none


NO_PAIRS, NO_GROWTH = _nothing(2), _nothing(4)
NO_PAGES: Pages = np.empty(0, np.int32)


class PageChanges:
    """Changes of pages, collected while a step is planned and between steps.

    The cache manager's classes add to it; `PagePool.take_changes` hands it to the plan and starts an empty one.
    """

    def __init__(self) -> None:
        self._grown: list[Ints] = []
        # By target, so that each target has one source, and a target that is freed can be found.
        self._copies: dict[int, int] = {}  # target page -> source page
        self._outs: dict[int, int] = {}  # host slot -> source page
        self._ins: dict[int, int] = {}  # target page -> host slot
        self._freed: list[Pages] = []

    def grew(self, group: int, row: int, index: int, pages: Pages) -> None:
        """Records entries of a row's page table.

        Args:
            group: Layer group.
            row: Batch row.
            index: Index of the first entry in the table.
            pages: [n] pages at this index and the following ones.
        """
        n = len(pages)
        part = np.empty((n, 4), np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = group, row, np.arange(index, index + n), pages
        self._grown.append(part)

    def grew_each(self, rows: Ints, indices: Ints, pages: Pages) -> None:
        """Records one entry a row and group.

        Args:
            rows: [n] batch rows.
            indices: [n] index of each row's entry, the same in all groups.
            pages: [groups, n] the entries.
        """
        groups, n = pages.shape
        part = np.empty((groups, n, 4), np.int32)
        for group in range(groups):  # few, so cheaper than one array of their numbers
            part[group, :, 0] = group
        part[..., 1], part[..., 2], part[..., 3] = rows, indices, pages
        self._grown.append(part.reshape(-1, 4))

    def copy(self, sources: Pages, targets: Pages) -> None:
        """Records copies from pages to pages.

        Args:
            sources: [n] pages to read.
            targets: [n] pages to fill.
        """
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            # Copies have no order among them: a source that is a target too is not filled yet, so read its own source.
            self._copies[target] = self._copies.get(source, source)

    def freed(self, pages: Pages) -> None:
        """Records that these pages are free: no row reads them, and no copy into them is needed."""
        if len(pages):
            self._freed.append(pages)
        self.not_copied(pages)

    def not_copied(self, pages: Pages) -> None:
        """Cancels copies and swap-ins into these pages."""
        for page in pages.tolist() if self._copies or self._ins else ():
            self._copies.pop(page, None)
            self._ins.pop(page, None)

    def waiting(self, pages: Pages) -> Pages:
        """Returns the pages among these that a copy or a swap-in is to fill."""
        return pages[np.isin(pages, [*self._copies, *self._ins])] if self._copies or self._ins else pages[:0]

    def swap_out(self, moves: Iterable[tuple[int, int]]) -> None:
        """Records copies to the host. They read the pages before any other change of the plan.

        Args:
            moves: Pairs of page and host slot.
        """
        self._outs.update((slot, page) for page, slot in moves)

    def swap_in(self, moves: Iterable[tuple[int, int]]) -> None:
        """Records copies from the host.

        Args:
            moves: Pairs of host slot and page.
        """
        self._ins.update((page, slot) for slot, page in moves)

    def row_left(self, row: int) -> None:
        """Drops the entries of a row whose sequence left before the plan was taken: the row may get another one."""
        self._grown = [part[part[:, 1] != row] for part in self._grown]

    def grown(self) -> Ints:
        """Returns [n, 4] int32: group, row, index, page."""
        if len(self._grown) < 2:
            return self._grown[0] if self._grown else NO_GROWTH
        return np.concatenate(self._grown)

    def copies(self) -> Ints:
        """Returns [n, 2] int32: source page, target page."""
        return _pairs((source, target) for target, source in self._copies.items()) if self._copies else NO_PAIRS

    def swap_outs(self) -> Ints:
        """Returns [n, 2] int32: page, host slot."""
        return _pairs((page, slot) for slot, page in self._outs.items()) if self._outs else NO_PAIRS

    def swap_ins(self) -> Ints:
        """Returns [n, 2] int32: host slot, page."""
        return _pairs((slot, page) for page, slot in self._ins.items()) if self._ins else NO_PAIRS

    def freed_pages(self) -> Pages:
        return np.concatenate(self._freed) if self._freed else NO_PAGES


def _pairs(moves: Iterable[tuple[int, int]]) -> Ints:
    return np.array(list(moves), np.int32)
