"""What one step plan must tell its executor of pages: places in page tables, pages to copy in the pool, to the host and
from there, pages that were freed.
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


class PageChanges:
    """Collected while a step is planned, and between steps."""

    def __init__(self) -> None:
        self._grown: list[Ints] = []
        self._copies: dict[int, int] = {}  # from which page, by the page to copy to
        self._outs: dict[int, int] = {}  # from which page, by the host slot to copy to
        self._ins: dict[int, int] = {}  # from which host slot, by the page to copy to
        self._freed: list[Pages] = []

    def grew(self, group: int, row: int, index: int, pages: Pages) -> None:
        """pages [n] stand from `index` on in this row's table of a group."""
        n = len(pages)
        part = np.empty((n, 4), np.int32)
        part[:, 0], part[:, 1], part[:, 2], part[:, 3] = group, row, np.arange(index, index + n), pages
        self._grown.append(part)

    def grew_each(self, rows: Ints, indices: Ints, pages: Pages) -> None:
        """pages [groups, n] stand in the tables of these n rows, each at its index."""
        groups, n = pages.shape
        part = np.empty((groups, n, 4), np.int32)
        part[..., 0] = np.arange(groups)[:, None]
        part[..., 1], part[..., 2], part[..., 3] = rows, indices, pages
        self._grown.append(part.reshape(-1, 4))

    def copy(self, sources: Pages, targets: Pages) -> None:
        """A page that is copied to in this step is copied on from where its content comes from."""
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._copies[target] = self._copies.get(source, source)

    def freed(self, pages: Pages) -> None:
        """Nobody reads what these pages hold any more, or would be copied to them."""
        if len(pages):
            self._freed.append(pages)
        self.not_copied(pages)

    def not_copied(self, pages: Pages) -> None:
        """Nobody needs a copy in these pages any more."""
        for page in pages.tolist() if self._copies or self._ins else ():
            self._copies.pop(page, None)
            self._ins.pop(page, None)

    def waiting(self, pages: Pages) -> Pages:
        """Those of these pages that something is to be copied to."""
        return pages[np.isin(pages, [*self._copies, *self._ins])] if self._copies or self._ins else pages[:0]

    def swap_out(self, moves: Iterable[tuple[int, int]]) -> None:
        """moves: page, host slot. What the page holds now goes there, before anything else is done."""
        self._outs.update((slot, page) for page, slot in moves)

    def swap_in(self, moves: Iterable[tuple[int, int]]) -> None:
        """moves: host slot, page."""
        self._ins.update((page, slot) for slot, page in moves)

    def left(self, row: int) -> None:
        """The row's sequence has left before the plan: its tables are of no interest any more."""
        self._grown = [part[part[:, 1] != row] for part in self._grown]

    def grown(self) -> Ints:
        """[n, 4] of group, row, index, page."""
        if len(self._grown) < 2:
            return self._grown[0] if self._grown else NO_GROWTH
        return np.concatenate(self._grown)

    def copies(self) -> Ints:
        """[n, 2] of from, to."""
        return _pairs((source, target) for target, source in self._copies.items()) if self._copies else NO_PAIRS

    def swap_outs(self) -> Ints:
        """[n, 2] of page, host slot."""
        return _pairs((page, slot) for slot, page in self._outs.items()) if self._outs else NO_PAIRS

    def swap_ins(self) -> Ints:
        """[n, 2] of host slot, page."""
        return _pairs((slot, page) for page, slot in self._ins.items()) if self._ins else NO_PAIRS

    def freed_pages(self) -> Pages:
        return np.concatenate(self._freed) if self._freed else np.empty(0, np.int32)


def _pairs(moves: Iterable[tuple[int, int]]) -> Ints:
    return np.array(list(moves), np.int32)
