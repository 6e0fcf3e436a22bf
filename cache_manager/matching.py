"""What the prefix cache has of a prompt, and which running sequence computes what it lacks."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from cache_manager.page_names import Name, PageChain
from cache_manager.prefix import NONE


@dataclass(frozen=True, slots=True)
class Awaited:
    """A page that is being computed: of this index and name, by this row."""

    row: int
    index: int
    name: Name


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """What the prefix cache has of a prompt. tokens: a multiple of the page size. nodes: of the prefix index.

    kept: names of pages after these that have copies in the host tier, brought: of those after them whose content came
    from another engine; both are counted in tokens. firsts: by group, from which
    of all these on its pages are used; () where all groups use all. awaited: where a row is
    computing what comes next, the last page that it has in common with the prompt.
    """

    tokens: int = 0
    nodes: list[int] = field(default_factory=list)
    kept: list[Name] = field(default_factory=list)
    brought: list[Name] = field(default_factory=list)
    firsts: tuple[int, ...] = ()
    awaited: Awaited | None = None


NO_MATCH = Match()


def valid_pages(pages: NDArray[np.int32], layout: KVLayout) -> int:
    """pages: [groups, n] what is there of a prefix, page by page, NONE where a group has lost it. How many of these
    make a prefix of which every group with a window has the pages that the next token sees.
    """
    counts = np.arange(1, pages.shape[1] + 1)
    valid = np.ones(len(counts), np.bool_)
    for group, window in enumerate(layout.windows):
        if window is not None:
            lacking = pages[group] == NONE
            run = counts - np.maximum.accumulate(np.where(lacking, counts, 0))  # pages since the last that is lacking
            valid &= run >= np.minimum(counts, layout.pages_before(window))
    return int(counts[valid].max(initial=0))


def firsts(layout: KVLayout, pages: int) -> tuple[int, ...]:
    """By group, the first page that is seen from the one after so many; () without windows."""
    seen = (pages if window is None else layout.pages_before(window) for window in layout.windows)
    return tuple(max(0, pages - before) for before in seen)


class Frontiers:
    """The page that each row computes next, by the name that it will have."""

    def __init__(self) -> None:
        self.row_of: dict[Name, int] = {}

    def set(self, row: int, chain: PageChain, index: int) -> None:
        """It is the chain's page of this index, if its tokens are known by now. The first row to say so has it."""
        if index < len(chain.names):
            self.row_of.setdefault(chain.names[index], row)

    def forget(self, row: int, chain: PageChain, index: int) -> bool:
        """Whether the row had it."""
        if index < len(chain.names) and self.row_of.get(chain.names[index]) == row:
            del self.row_of[chain.names[index]]
            return True
        return False


def last_in_common(one: PageChain, other: PageChain, index: int, most: int) -> int:
    """The index, below `most`, of the last page that two chains share which share that of `index`."""
    # Names are chained: two chains are equal up to some index, and nowhere after it.
    end = min(most, len(other.names))
    return bisect_left(range(end), True, lo=index + 1, key=lambda i: one.names[i] != other.names[i]) - 1
