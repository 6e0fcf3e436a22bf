"""The prefix cache: published pages, those of them without a holder, and the order in which these are evicted.

A page without a holder keeps its block hash and its content until the pool needs the page. No memory is set apart for
the cache: cached pages count as available.

Order of eviction:
    1. Pages that left the window of a running sequence, longest ago first. They serve only a sequence that continues
       from exactly that position.
    2. Pages that the eviction policy chooses.
    3. Pages that the policy cannot reach, since pages that come after them are held.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, Pages
from cache_manager.eviction import EvictionPolicy
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.runs import Nodes

LIFETIMES = (.1, .5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)  # fmt: skip
"""Upper bounds, in seconds, of the histogram of lifetimes; one more class lies above them."""
BOUNDS = np.array(LIFETIMES)


class Cause(StrEnum):
    """Why a page lost its block hash."""

    CAPACITY = "capacity"
    RESET = "reset"
    FAULT = "fault"


class PrefixCache:
    """Published pages without a holder, and their eviction.

    Writes `slid`, the counters below and the policy's offers. Removes nodes from the index; `PublishedPages` adds them.
    Reads the allocator's counts and never writes them.

    Args:
        index: Block hashes of the pages.
        policy: Chooses what is evicted.
        counts: [pages] int32. The allocator's array of holder counts.
        anchor: A group without a window. Every node has a page in it, and a holder of a page of a node holds this
            one. None where all groups have windows.
        on_evicted: Called with each run of nodes that was evicted for capacity, the last node of the sequence first.

    Attributes:
        slid: Cached pages that left the window of a sequence that went on, in that order; a dict as an ordered set.
        cached: Number of pages with a block hash and no holder.
        evicted: Number of pages that lost their block hashes, by cause.
        lifetimes: [classes] int64. Pages evicted for capacity, by the time from publication to eviction; bounds are
            `LIFETIMES`.
        lifetime_seconds: Sum of these times.
    """

    def __init__(
        self,
        index: PrefixIndex,
        policy: EvictionPolicy,
        counts: NDArray[np.int32],
        anchor: int | None = 0,
        on_evicted: Callable[[Nodes], None] | None = None,
    ) -> None:
        self._on_evicted = on_evicted
        self.index, self.policy, self._counts, self.anchor = index, policy, counts, anchor
        self.slid: dict[int, None] = {}
        self.cached = 0
        self.evicted = Counter(dict.fromkeys(Cause, 0))
        self.lifetimes = np.zeros(len(LIFETIMES) + 1, np.int64)
        self.lifetime_seconds = 0.0

    def held(self, nodes: Sequence[int] | NDArray[np.integer]) -> NDArray[np.bool_]:
        """Returns [n] whether a page of each node is held."""
        if self.anchor is not None:
            return self._counts[self.index.pages[self.anchor][nodes]] > 0
        pages = self.index.pages[:, nodes]
        return ((self._counts[pages] > 0) & (pages != NONE)).any(axis=0)

    def _is_held(self, node: int) -> bool:
        if self.anchor is None:
            return bool(self.held([node])[0])
        # The anchor's page is held where any page of the node is: one look, 0.3 us instead of 6.
        return bool(self._counts[self.index.pages[self.anchor, node]] > 0)

    def recount(self) -> None:
        """Derives `cached` again, after the allocator's counts were corrected."""
        self.cached = int(np.count_nonzero((self._counts == 0) & (self.index.node_of != NONE)))

    def settle(self, pages: Pages) -> Pages:
        """Sorts pages that have lost their last holder: those with a block hash become cached pages.

        Args:
            pages: [n] pages with count 0.

        Returns:
            The pages without a block hash, which are free.
        """
        if not len(self.index):
            return pages
        nodes = self.index.node_of[pages]
        published = nodes != NONE
        kept = int(np.count_nonzero(published))
        if not kept:
            return pages
        self.cached += kept
        free = pages[:0]
        if kept < len(pages):
            nodes, free = nodes[published], pages[~published]
        for node in set(nodes[self.index.children[nodes] == 0].tolist()):
            self._offer_if_leaf(node)
        return free

    def settle_slid(self, pages: Pages) -> Pages:
        """Does as `settle` for pages that left the window of a sequence that goes on; they are evicted first."""
        free = self.settle(pages)
        self.slid.update(dict.fromkeys(pages[self.index.node_of[pages] != NONE].tolist()))
        return free

    def revive(self, nodes: Sequence[int], pages: Pages) -> None:
        """Takes pages out of the cached state before they get a holder. Call before the counts rise.

        Args:
            nodes: Nodes of the pages, consecutive ones of a sequence.
            pages: Their pages of all groups, without those that have left a window.
        """
        idle = int(np.count_nonzero(self._counts[pages] == 0))
        # Where all pages are held already, none of their nodes is offered to the policy.
        if idle:
            self.cached -= idle
            for node in np.array(nodes)[self.index.children[nodes] == 0].tolist():
                self.policy.withdraw(node)
            self._not_slid(pages)

    def _not_slid(self, pages: Pages) -> None:
        for page in pages.tolist() if self.slid else ():
            self.slid.pop(page, None)

    def evict(self, count: int, now: float, ahead: int = 0) -> Pages:
        """Evicts at least `count` cached pages.

        Args:
            count: Pages needed, at most `cached`.
            now: Seconds on the scheduler's clock.
            ahead: Most pages beyond these that go along, where they are in the run that the policy chooses last. None
                do where pages that left a window suffice.

        Returns:
            The pages, which are free: more than `count` by up to `ahead`, and by the other groups' pages of a node.

        Raises:
            LedgerError: `cached` counts pages that do not exist.
        """
        evicted: list[Pages] = []
        born: list[NDArray[np.float64]] = []
        left = count
        while left > 0:
            # The birth times of pages are read before their nodes are removed, which are used again.
            if self.slid:
                pages = np.array(list(islice(self.slid, left)), np.int32)
                born.append(self.index.born[self.index.node_of[pages]])
                self._evict_slid(pages)
            elif len(self.policy):
                run = self._idle_run(self.policy.choose(-(-(left + ahead) // len(self.index.pages))))
                pages = self.index.pages_of(run[::-1])
                born.append(self.index.born[self.index.node_of[pages]])
                self._not_slid(pages)
                self._lost_child(self._remove(run))
            else:
                self._reach_all()  # fills `slid`, which the next turn takes from
                continue
            evicted.append(pages)
            left -= len(pages)
        pages = evicted[0] if len(evicted) == 1 else np.concatenate(evicted)
        self.cached -= len(pages)
        self.evicted[Cause.CAPACITY] += len(pages)
        self._count_lifetimes(now - (born[0] if len(born) == 1 else np.concatenate(born)))
        return pages

    def _count_lifetimes(self, lived: NDArray[np.float64]) -> None:
        """Adds lifetimes to the histogram.

        Args:
            lived: [n] float64 seconds, n at least 1.
        """
        if len(lived) == 1:  # most evictions for decoding rows
            self.lifetime_seconds += lived.item()
            self.lifetimes[bisect_left(LIFETIMES, lived.item())] += 1
            return
        self.lifetime_seconds += float(lived.sum())
        shortest, longest = (bisect_left(LIFETIMES, float(end)) for end in (lived.min(), lived.max()))
        # Pages of a run were published together, so mostly all fall into one class.
        if shortest == longest:
            self.lifetimes[shortest] += len(lived)
        else:
            self.lifetimes += np.bincount(np.searchsorted(BOUNDS, lived), minlength=len(self.lifetimes))

    def _remove(self, nodes: Nodes) -> int:
        """Removes nodes from the index for capacity.

        Args:
            nodes: [n] as in `PrefixIndex.remove`.

        Returns:
            The parent of the last one.
        """
        self.policy.evicted(nodes, self.index.remove(nodes))
        if self._on_evicted is not None:
            self._on_evicted(nodes)
        return int(self.index.parent[nodes[-1]])

    def _evict_slid(self, pages: Pages) -> None:
        """Takes pages from their nodes. The nodes stay: pages of other groups, or later nodes, need them."""
        self._not_slid(pages)
        nodes = set(self.index.unbind(pages).tolist())
        # With an anchor each node keeps the anchor's page, so none is left empty.
        for node in nodes if self.anchor is None else ():
            self._lost_child(node)

    def _lost_child(self, node: int) -> None:
        """Updates a node that has lost a child or its pages.

        Removes it where it has neither pages nor children, then its parent likewise. A node that is a leaf now and is
        not held is offered to the policy.

        Args:
            node: The node, or NONE, which changes nothing.
        """
        while self.anchor is None and node != NONE and self._empty_leaf(node):
            self.policy.withdraw(node)
            node = self._remove(np.array([node]))
        self._offer_if_leaf(node)

    def _empty_leaf(self, node: int) -> bool:
        return not self.index.children[node] and bool((self.index.pages[:, node] == NONE).all())

    def _reach_all(self) -> None:
        """Makes every cached page evictable, where the policy has no leaf to choose.

        The remaining cached pages belong to groups with windows, on nodes before nodes that are held.

        Raises:
            LedgerError: No page is cached, though `cached` says so.
        """
        pages = np.flatnonzero((self._counts == 0) & (self.index.node_of != NONE))
        if not len(pages):
            raise LedgerError(f"{self.cached} pages are counted as cached, none is")
        self.slid.update(dict.fromkeys(pages.tolist()))

    def _idle_run(self, chosen: Nodes) -> Nodes:
        """Cuts a policy's choice down to the nodes that may be evicted.

        Args:
            chosen: [n] a leaf, then nodes that go with it, as `EvictionPolicy.choose` returns them.

        Returns:
            [1 .. n] the leaf, then the nodes after it that are not held and have no other child than the one before.
        """
        if len(chosen) == 1:  # only leaves without holders are offered
            return chosen
        kept = (self.index.children[chosen] != 1) | self.held(chosen)
        kept[0] = False
        kept[1:] |= self.index.parent[chosen[:-1]] != chosen[1:]
        return chosen[: int(kept.argmax())] if np.count_nonzero(kept) else chosen

    def _offer_if_leaf(self, node: int) -> None:
        if node != NONE and not self.index.children[node] and not self._is_held(node):
            self.policy.offer(node)

    def forget(self, nodes: Sequence[int], cause: Cause) -> Pages:
        """Removes nodes, and all nodes that come after them, from the index.

        Args:
            nodes: Nodes to remove.
            cause: Why; counted in `evicted`.

        Returns:
            Their pages without a holder, which are free. Pages with a holder stay with it, without a block hash.
        """
        doomed = self.index.under(nodes)  # children first, as `PrefixIndex.remove` demands
        pages = self.index.pages_of(doomed)
        self._not_slid(pages)
        for node in doomed:
            if not self.index.children[node]:
                self.policy.withdraw(node)
            self.policy.evicted(np.array([node]), self.index.remove([node]))
        for parent in set(self.index.parent[nodes].tolist()) - set(doomed):
            self._lost_child(parent)
        free = pages[self._counts[pages] == 0]
        self.cached -= len(free)
        self.evicted[cause] += len(pages)
        return free

    def reset(self) -> Pages:
        """Removes all nodes; returns their pages without a holder, which are free."""
        return self.forget([n for n in self.index.all() if self.index.parent[n] == NONE], Cause.RESET)


PolicyMaker = Callable[[int], EvictionPolicy]
"""Makes a policy for a pool, from its number of pages."""
