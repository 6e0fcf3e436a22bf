"""Double-entry books of the page pool: each page's count against its holders by name, and what else must add up."""

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
    """A page whose books do not balance."""

    page: int
    why: str


class PageState(IntEnum):
    """What a page is used for."""

    FREE = 0
    HELD = 1
    CACHED = 2
    SET_ASIDE = 3


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """A running sequence, by its attempt, or a step in flight. pages: in order of the tokens, group by group."""

    is_step: bool
    number: int
    pages: Pages

    @property
    def name(self) -> str:
        return f"{'step' if self.is_step else 'attempt'} {self.number}"


@dataclass(frozen=True, slots=True, eq=False)
class PageMap:
    """The pool at one moment. states: [pages] of `PageState`. counts: [pages] holders of each."""

    page_size: int
    states: NDArray[np.uint8]
    counts: NDArray[np.int32]
    holders: tuple[Holder, ...]


def holders(manager: CacheManager) -> Iterator[Holder]:
    """Who holds which pages."""
    for row in np.flatnonzero(manager.tables.held.any(axis=0)).tolist():
        yield Holder(False, int(manager.owners[row]), manager.tables.row(row))
    for step, parts in manager.pool.in_flight.items():
        yield Holder(True, step, np.concatenate(parts))


def page_map(manager: CacheManager) -> PageMap:
    counts = manager.allocator.counts.copy()
    states = np.full(manager.pool.total, PageState.FREE, np.uint8)
    states[manager.prefix.index.node_of != NONE] = PageState.CACHED
    states[counts > 0] = PageState.HELD
    states[list(manager.allocator.suspects)] = PageState.SET_ASIDE
    return PageMap(manager.layout.page_size, states, counts, tuple(holders(manager)))


def imbalances(manager: CacheManager) -> list[Imbalance]:
    """All that is wrong."""
    kept = [] if manager.pool.tier is None else _miskept(manager.pool.tier, manager.prefix.index)
    return _miscounted(manager) + _misnamed(manager) + kept


def _expected_counts(manager: CacheManager) -> NDArray[np.int64]:
    parts = [holder.pages for holder in holders(manager)]
    return np.bincount(np.concatenate(parts) if parts else [], minlength=manager.pool.total)[: manager.pool.total]


def _miscounted(manager: CacheManager) -> list[Imbalance]:
    """Pages whose count is not its page tables + steps in flight, or that are in two states or in none."""
    allocator = manager.allocator
    expected = _expected_counts(manager)
    listed = np.bincount(allocator.free_pages(), minlength=allocator.size)
    named = manager.prefix.index.node_of != NONE
    aside = np.zeros(allocator.size, np.bool_)
    aside[list(allocator.suspects)] = True
    checks = (
        (expected != allocator.counts, "its count is not that of its holders"),
        (listed > 1, "stands on the free list twice"),
        ((listed > 0) & (expected > 0), "is held and on the free list"),
        ((listed > 0) & named, "has a name and is on the free list"),
        ((listed == 0) & (expected == 0) & ~named & ~aside, "is lost: neither free, held nor cached"),
    )
    wrong = {page: why for bad, why in checks for page in np.flatnonzero(bad).tolist()}
    found = [Imbalance(page, why) for page, why in allocator.suspects.items()]
    for page, why in wrong.items():
        by = [holder.name for holder in holders(manager) if page in holder.pages]
        found.append(Imbalance(page, f"{why}; count {allocator.counts[page]}, held by {by}, named {bool(named[page])}"))
    return found


def _misnamed(manager: CacheManager) -> list[Imbalance]:
    """What is wrong in the prefix index and in what is counted of it."""
    found = _misplaced(manager)
    index, counts = manager.prefix.index, manager.allocator.counts
    cached = int(np.count_nonzero((counts == 0) & (index.node_of != NONE)))
    if cached != manager.prefix.cached:
        found.append(Imbalance(NONE, f"{cached} pages are cached, {manager.prefix.cached} are counted"))
    shared = int(np.count_nonzero(counts > 1))
    slid = list(manager.prefix.slid)
    if counts[slid].any() or (index.node_of[slid] == NONE).any():
        found.append(Imbalance(NONE, "pages that left a window are held, or have no name, and may be evicted"))
    if shared != manager.allocator.shared:
        found.append(Imbalance(NONE, f"{shared} pages are shared, {manager.allocator.shared} are counted"))
    return found


def _misplaced(manager: CacheManager) -> list[Imbalance]:
    """Nodes whose pages, parents, holders or numbers of children are wrong: who holds a page holds all before it in
    groups without a window.
    """
    index, held = manager.prefix.index, manager.prefix.held
    nodes = index.all()
    children = dict.fromkeys(nodes, 0)
    found = []
    for node in nodes:
        pages, parent = index.pages_of([node]), index.parent[node]
        page = int(pages[0]) if len(pages) else NONE
        if (index.node_of[pages] != node).any():
            found.append(Imbalance(page, f"node {node} names pages that do not know it"))
        gone = [g for g in range(len(index.pages)) if index.pages[g, node] == NONE and manager.layout.window(g) is None]
        if gone:
            found.append(Imbalance(page, f"node {node} has no page in groups {gone}, which have no window"))
        if not held([node])[0] and manager.allocator.counts[pages].any():
            found.append(Imbalance(page, f"node {node} is held without its page in a group that has no window"))
        if parent == NONE:
            continue
        if parent not in children:
            found.append(Imbalance(page, f"node {node} comes after node {parent}, which is gone"))
            continue
        children[parent] += 1
        if manager.prefix.anchor is not None and held([node])[0] and not held([parent])[0]:
            found.append(Imbalance(page, f"node {node} is held, node {parent} before it is not"))
    for node, n in children.items():
        if n != index.children[node]:
            page = int(index.pages[manager.prefix.anchor or 0, node])
            found.append(Imbalance(page, f"node {node} has {n} children, counts {index.children[node]}"))
        if not n and not len(index.pages_of([node])):
            found.append(Imbalance(NONE, f"node {node} has neither pages nor children"))
    return found


def _miskept(tier: HostTier, index: PrefixIndex) -> list[Imbalance]:
    """Host slots that are in two places or in none, and copies that nobody can come to."""
    slots = tier.free_slots() + [slot for copy in tier.copies.values() for slot in copy.slots if slot != NONE]
    times = np.bincount(slots, minlength=tier.slots)
    found = [Imbalance(NONE, f"host slot {slot} is in {times[slot]} places") for slot in np.flatnonzero(times != 1)]
    for name, copy in tier.copies.items():
        if copy.parent != FIRST and copy.parent not in tier.copies and copy.parent not in index:
            found.append(Imbalance(NONE, f"the copy {name.hex()[:8]} comes after one that is neither cached nor kept"))
    return found


def explain(found: list[Imbalance]) -> str:
    lines = [f"page {i.page}: {i.why}" for i in found[:MOST_SHOWN]]
    more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return "the page ledger does not balance: " + "; ".join(lines) + more


def verify(manager: CacheManager) -> None:
    """Raises LedgerError, naming pages and holders, unless all books balance."""
    found = imbalances(manager)
    if found:
        raise LedgerError(explain(found))


def audit(manager: CacheManager) -> str:
    """Counts alone, which is quick: what is newly wrong, "" where nothing is. The pages concerned are set aside, with
    counts that fit their holders, so that the rest goes on.
    """
    found = [i for i in _miscounted(manager) if i.page not in manager.pool.quarantined]
    if not found:
        return ""
    pages = np.unique([i.page for i in found]).astype(np.int32)
    manager.pool.quarantine(pages, _expected_counts(manager)[pages])
    return explain(found)
