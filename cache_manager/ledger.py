"""The audit of the page pool: compares each page's count with its holders, and checks the index and the host tier.

Reads all arrays of the cache manager and writes none, but for `audit`, which quarantines wrong pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, Pages
from cache_manager.manager import CacheManager
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.tier import FIRST, HostTier

MOST_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Imbalance:
    """A page whose books do not balance.

    Attributes:
        page: Page, or `NONE` where the fault is of no single page.
        why: The fault.
    """

    page: int
    why: str


class PageState(IntEnum):
    """Use of a page."""

    FREE = 0
    HELD = 1
    CACHED = 2
    SET_ASIDE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A running sequence or a step in flight.

    Attributes:
        is_step: Whether the holder is a step.
        number: Attempt of the sequence, or number of the step.
        pages: [n] int32. A sequence's pages group by group, in order of the tokens; a step's in no order.
    """

    is_step: bool
    number: int
    pages: Pages

    @property
    def name(self) -> str:
        return f"{'step' if self.is_step else 'attempt'} {self.number}"


@dataclass(frozen=True, slots=True, eq=False)
class PageMap:
    """The pool at one moment.

    Attributes:
        page_size: Tokens a page.
        states: [pages] uint8 of `PageState`.
        counts: [pages] int32. Holders of each page.
        holders: Running sequences and steps in flight that hold pages.
    """

    page_size: int
    states: NDArray[np.uint8]
    counts: NDArray[np.int32]
    holders: tuple[Holder, ...]


def holders(manager: CacheManager) -> Iterator[Holder]:
    """Yields the rows and the steps in flight that hold pages."""
    for row in np.flatnonzero(manager.tables.held.any(axis=0)).tolist():
        yield Holder(False, int(manager.owners[row]), manager.tables.row(row))
    for step, parts in manager.pool.in_flight.items():
        yield Holder(True, step, np.concatenate(parts))


def page_map(manager: CacheManager) -> PageMap:
    """Returns a snapshot of the pool."""
    counts = manager.allocator.counts.copy()
    # Each line overrides those before it: a published page may be held, and a page that was set aside too.
    states = np.full(manager.pool.total, PageState.FREE, np.uint8)
    states[manager.prefix.index.node_of != NONE] = PageState.CACHED
    states[counts > 0] = PageState.HELD
    states[list(manager.allocator.pages_set_aside)] = PageState.SET_ASIDE
    return PageMap(manager.layout.page_size, states, counts, tuple(holders(manager)))


def imbalances(manager: CacheManager) -> list[Imbalance]:
    """Returns all faults of counts, prefix index and host tier."""
    kept = [] if manager.pool.tier is None else _tier_faults(manager.pool.tier, manager.prefix.index)
    return _count_faults(manager) + _index_faults(manager) + kept


def _expected_counts(manager: CacheManager) -> NDArray[np.int64]:
    """Returns [pages] the number of page tables and steps in flight that hold each page."""
    parts = [holder.pages for holder in holders(manager)]
    return np.bincount(np.concatenate(parts) if parts else [], minlength=manager.pool.total)[: manager.pool.total]


def _count_faults(manager: CacheManager) -> list[Imbalance]:
    """Finds pages whose count is not page tables + steps in flight, and pages in two states or in none."""
    allocator = manager.allocator
    expected = _expected_counts(manager)
    listed = np.bincount(allocator.free_pages(), minlength=allocator.size)
    published = manager.prefix.index.node_of != NONE
    aside = np.zeros(allocator.size, np.bool_)
    aside[list(allocator.pages_set_aside)] = True
    checks = (
        (expected != allocator.counts, "its count is not that of its holders"),
        (listed > 1, "stands on the free list twice"),
        ((listed > 0) & (expected > 0), "is held and on the free list"),
        ((listed > 0) & published, "has a block hash and is on the free list"),
        ((listed == 0) & (expected == 0) & ~published & ~aside, "is lost: neither free, held nor cached"),
    )
    wrong = {page: why for bad, why in checks for page in np.flatnonzero(bad).tolist()}
    found = [Imbalance(page, why) for page, why in allocator.pages_set_aside.items()]
    for page, why in wrong.items():
        by = [holder.name for holder in holders(manager) if page in holder.pages]
        found.append(
            Imbalance(page, f"{why}; count {allocator.counts[page]}, held by {by}, published {bool(published[page])}")
        )
    return found


def _index_faults(manager: CacheManager) -> list[Imbalance]:
    """Finds faults of the prefix index and of the counters derived from it."""
    found = _node_faults(manager)
    index, counts = manager.prefix.index, manager.allocator.counts
    cached = int(np.count_nonzero((counts == 0) & (index.node_of != NONE)))
    if cached != manager.prefix.cached:
        found.append(Imbalance(NONE, f"{cached} pages are cached, {manager.prefix.cached} are counted"))
    shared = int(np.count_nonzero(counts > 1))
    slid = list(manager.prefix.slid)
    if counts[slid].any() or (index.node_of[slid] == NONE).any():
        found.append(Imbalance(NONE, "pages that left a window are held, or have no block hash, and may be evicted"))
    if shared != manager.allocator.shared:
        found.append(Imbalance(NONE, f"{shared} pages are shared, {manager.allocator.shared} are counted"))
    return found


def _node_faults(manager: CacheManager) -> list[Imbalance]:
    """Finds nodes with wrong pages, parents, holders or child counts.

    Invariant: in groups without a window, a holder of a page holds all pages before it.
    """
    index, held = manager.prefix.index, manager.prefix.held
    nodes = np.array(index.all(), np.intp)
    if not len(nodes):
        return []
    # All nodes at once: tests verify the books after each step, and a loop over nodes took as long as the step.
    pages, parents, is_held, anchored = index.pages[:, nodes], index.parent[nodes], held(nodes), manager.prefix.anchor
    has_page, known = pages != NONE, np.isin(parents, nodes)
    everywhere = [manager.layout.window(group) is None for group in range(len(pages))]
    counted = np.bincount(parents[known], minlength=len(index.children))[nodes]
    after_held = np.isin(parents, nodes[is_held])
    of_another = has_page & (index.node_of[pages] != nodes)
    holds = has_page & (manager.allocator.counts[pages] != 0)
    checks = (
        (of_another.any(axis=0), "has pages of another node"),
        (~has_page[everywhere].all(axis=0), "lacks its page in a group that has no window"),
        (~is_held & holds.any(axis=0), "is held without its page in a group that has no window"),
        ((parents != NONE) & ~known, "comes after node {parent}, which is gone"),
        (is_held & known & ~after_held & (anchored is not None), "is held, node {parent} before it is not"),
        (counted != index.children[nodes], "has {counted} children, counts {children}"),
        ((counted == 0) & ~has_page.any(axis=0), "has neither pages nor children"),
    )
    found = []
    for bad, why in checks:
        for i in np.flatnonzero(bad).tolist():
            page = max(pages[:, i].tolist()) if anchored is None else int(pages[anchored, i])
            values = {"parent": parents[i], "counted": counted[i], "children": index.children[nodes[i]]}
            found.append(Imbalance(page, f"node {nodes[i]} {why.format(**values)}"))
    return found


def _tier_faults(tier: HostTier, index: PrefixIndex) -> list[Imbalance]:
    """Finds host slots that are in two places or in none, and copies whose predecessor is gone."""
    slots = tier.free_slots() + [slot for copy in tier.copies.values() for slot in copy.slots if slot != NONE]
    times = np.bincount(slots, minlength=tier.slots)
    found = [Imbalance(NONE, f"host slot {slot} is in {times[slot]} places") for slot in np.flatnonzero(times != 1)]
    for block_hash, copy in tier.copies.items():
        if copy.parent != FIRST and copy.parent not in tier.copies and copy.parent not in index:
            found.append(
                Imbalance(NONE, f"the copy {block_hash.hex()[:8]} comes after one that is neither cached nor kept")
            )
    return found


def explain(found: list[Imbalance]) -> str:
    """Words the first `MOST_SHOWN` faults for an error or a log."""
    lines = [f"page {i.page}: {i.why}" for i in found[:MOST_SHOWN]]
    more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return "the page ledger does not balance: " + "; ".join(lines) + more


def verify(manager: CacheManager) -> None:
    """Checks all books.

    Raises:
        LedgerError: The books do not balance; the message has pages and holders.
    """
    found = imbalances(manager)
    if found:
        raise LedgerError(explain(found))


def audit(manager: CacheManager) -> str:
    """Checks the counts alone, which is quick, and quarantines wrong pages so that serving goes on.

    The counts of these pages are corrected to their holders.

    Returns:
        Faults that were not reported before; "" where there are none.
    """
    found = [i for i in _count_faults(manager) if i.page not in manager.pool.quarantined]
    if not found:
        return ""
    pages = np.unique([i.page for i in found]).astype(np.int32)
    manager.pool.quarantine(pages, _expected_counts(manager)[pages])
    return explain(found)
