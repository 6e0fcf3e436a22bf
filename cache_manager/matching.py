"""Prefix matches: the pages of a prompt that are at hand, and the running row that computes the next ones."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, HashChain
from cache_manager.layout import KVLayout
from cache_manager.prefix import NONE


@dataclass(frozen=True, slots=True)
class Awaited:
    """A page that a running row is computing.

    Attributes:
        row: The row.
        index: Index of the page in its sequence.
        block_hash: Hash that the page will have.
    """

    row: int
    index: int
    block_hash: BlockHash


@dataclass(frozen=True, slots=True, eq=False)
class Match:
    """The longest available prefix of a prompt: pages in the pool, then in the host tier, then transferred ones.

    Attributes:
        tokens: Length of the prefix, a multiple of the page size.
        nodes: Nodes of the pages in the pool, each the parent of the next.
        kept: Block hashes of the following pages, which have copies in the host tier.
        transferred: Block hashes of the pages after these, whose content came from another engine.
        firsts: By table, index of the first entry of the prefix that is used. () where all use all.
        awaited: The last page that the prompt has in common with a row which is computing the next page; None without
            such a row.
    """

    tokens: int = 0
    nodes: list[int] = field(default_factory=list)
    kept: list[BlockHash] = field(default_factory=list)
    transferred: list[BlockHash] = field(default_factory=list)
    firsts: tuple[int, ...] = ()
    awaited: Awaited | None = None


NO_MATCH = Match()


def valid_pages(pages: NDArray[np.int32], layout: KVLayout) -> int:
    """Finds the longest prefix of which every group has the pages that the next token sees.

    Args:
        pages: [groups, n] int32. Pages of a prefix, NONE where a group has lost one.
        layout: Windows of the groups. Groups without a window lack no page.

    Returns:
        Number of pages of the prefix.
    """
    counts = np.arange(1, pages.shape[1] + 1)
    valid = np.ones(len(counts), np.bool_)
    if layout.recurrent:  # the next token reads the state after the prefix
        valid = (pages[layout.state_tables] != NONE).all(axis=0)
    for group, window in enumerate(layout.windows[: len(layout.groups)]):
        if window is not None:
            lacking = pages[group] == NONE
            run = counts - np.maximum.accumulate(np.where(lacking, counts, 0))  # pages since the last that is lacking
            valid &= run >= np.minimum(counts, layout.pages_before(window))
    return int(counts[valid].max(initial=0))


def firsts(layout: KVLayout, pages: int) -> tuple[int, ...]:
    """Returns by table the index of the first entry that the next token sees; () without windows.

    Args:
        layout: Windows of the tables.
        pages: Pages before the next token; with recurrent layers, those before a checkpoint.
    """
    windows = layout.windows[: len(layout.groups)]
    seen = (pages if window is None else layout.pages_before(window) for window in windows)
    last = max(0, pages * layout.page_size // layout.interval - 1) if layout.recurrent else 0
    return (*(max(0, pages - before) for before in seen), *(last for _ in layout.state_tables))


class Frontiers:
    """The page that each row computes next, found by its future block hash.

    If several rows compute the same page, the first has the entry.

    Attributes:
        row_of: Row that computes the page with this hash.
    """

    def __init__(self) -> None:
        self.row_of: dict[BlockHash, int] = {}

    def set(self, row: int, chain: HashChain, index: int) -> None:
        """Enters the chain's page of this index as the row's next, if all its tokens are known by now."""
        if index < len(chain.hashes):
            self.row_of.setdefault(chain.hashes[index], row)

    def forget(self, row: int, chain: HashChain, index: int) -> bool:
        """Removes a row's entry; returns whether the row had it."""
        if index < len(chain.hashes) and self.row_of.get(chain.hashes[index]) == row:
            del self.row_of[chain.hashes[index]]
            return True
        return False


def last_in_common(one: HashChain, other: HashChain, index: int, most: int) -> int:
    """Returns the index of the last page that two chains have in common.

    Args:
        one: Chain with at least `most` pages.
        other: Chain with the same page of `index`.
        index: A common page.
        most: Pages to compare at most.
    """
    # Hashes are chained: two chains are equal up to some index and nowhere after it, so a binary search finds the end.
    end = min(most, len(other.hashes))
    return bisect_left(range(end), True, lo=index + 1, key=lambda i: one.hashes[i] != other.hashes[i]) - 1
