"""The prefix cache: published pages, those of them that nobody holds, and the order in which these are given up.

A page without a holder keeps its name, and its content, until its place is needed. Nothing is set apart for it: cached
pages count as available.

Where a group of layers has a window, its pages that left the window of a running sequence go first, those that left
longest ago before the others: they are of use only to who goes on from right there. Then the policy says. A page that
it cannot reach yet, since what comes after it is held, goes last.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, Pages
from cache_manager.eviction import EvictionPolicy
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.runs import Nodes

LIFETIMES = (.1, .5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)  # fmt: skip
"""Upper bounds, in seconds, of the classes in which lifetimes are counted; one more class is above them."""
BOUNDS = np.array(LIFETIMES)


class Cause(Enum):
    """Why a page lost its name."""

    CAPACITY = "capacity"
    RESET = "reset"
    FAULT = "fault"


class PrefixCache:
    """`counts` is the allocator's: holders by page. anchor: a group without a window, so that every node has a page in
    it, and who holds a page of any group holds this one; None where all groups have windows. gone: is told of each run
    of nodes that made place for others, the last one first.

    slid: cached pages that left the window of a sequence that went on, in that order. cached: pages that have a name
    and no holder. evicted: pages that lost their names, by cause. lifetimes: [classes] how long what those lost for
    their place hold had been published.
    """

    def __init__(
        self,
        index: PrefixIndex,
        policy: EvictionPolicy,
        counts: NDArray[np.int32],
        anchor: int | None = 0,
        gone: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._gone = gone
        self.index, self.policy, self._counts, self.anchor = index, policy, counts, anchor
        self.slid: dict[int, None] = {}
        self.cached = 0
        self.evicted: Counter[Cause] = Counter()
        self.lifetimes = np.zeros(len(LIFETIMES) + 1, np.int64)
        self.lifetime_seconds = 0.0

    def held(self, nodes: Sequence[int] | NDArray[np.integer]) -> NDArray[np.bool_]:
        """Whether somebody holds a page of each."""
        if self.anchor is not None:
            return self._counts[self.index.pages[self.anchor][nodes]] > 0
        pages = self.index.pages[:, nodes]
        return ((self._counts[pages] > 0) & (pages != NONE)).any(axis=0)

    def _is_held(self, node: int) -> bool:
        if self.anchor is None:
            return bool(self.held([node])[0])
        return bool(self._counts[self.index.pages[self.anchor, node]] > 0)  # 0.3 us instead of 6

    def recount(self) -> None:
        """After counts were put right."""
        self.cached = int(np.count_nonzero((self._counts == 0) & (self.index.node_of != NONE)))

    def settle(self, pages: Pages) -> Pages:
        """Pages that have lost their last holder: keeps those with a name, returns the others, which are free."""
        if not len(self.index):
            return pages
        nodes = self.index.node_of[pages]
        named = nodes != NONE
        kept = int(np.count_nonzero(named))
        if not kept:
            return pages
        self.cached += kept
        free = pages[:0]
        if kept < len(pages):
            nodes, free = nodes[named], pages[~named]
        for node in set(nodes[self.index.children[nodes] == 0].tolist()):
            self._offer_if_leaf(node)
        return free

    def settle_slid(self, pages: Pages) -> Pages:
        """As `settle`, of pages that left the window of a sequence that goes on."""
        free = self.settle(pages)
        self.slid.update(dict.fromkeys(pages[self.index.node_of[pages] != NONE].tolist()))
        return free

    def revive(self, nodes: Sequence[int], pages: Pages) -> None:
        """These pages of these nodes, which have them in all groups but for what left a window, are about to be held
        (again).
        """
        idle = int(np.count_nonzero(self._counts[pages] == 0))
        if idle:
            self.cached -= idle
            for node in np.array(nodes)[self.index.children[nodes] == 0].tolist():
                self.policy.withdraw(node)
            self._not_slid(pages)

    def _not_slid(self, pages: Pages) -> None:
        for page in pages.tolist() if self.slid else ():
            self.slid.pop(page, None)

    def evict(self, count: int, now: float) -> Pages:
        """Takes the names from at least `count` of the cached pages, of which there are so many; returns them."""
        given: list[Pages] = []
        born: list[NDArray[np.float64]] = []
        left = count
        while left > 0:
            if self.slid:
                pages = np.array(list(islice(self.slid, left)), np.int32)
                born.append(self.index.born[self.index.node_of[pages]])
                self._evict_slid(pages)
            elif len(self.policy):
                run = self._idle_run(self.policy.choose(-(-left // len(self.index.pages))))
                pages = self.index.pages_of(run[::-1])
                born.append(self.index.born[self.index.node_of[pages]])
                self._not_slid(pages)
                self._lost_child(self._remove(run))
            else:
                self._reach_all()
                continue
            given.append(pages)
            left -= len(pages)
        pages = np.concatenate(given)
        self.cached -= len(pages)
        self.evicted[Cause.CAPACITY] += len(pages)
        self._count_lifetimes(now - np.concatenate(born))
        return pages

    def _count_lifetimes(self, lived: NDArray[np.float64]) -> None:
        """lived: [n] seconds, n at least 1."""
        self.lifetime_seconds += float(lived.sum())
        shortest, longest = np.searchsorted(BOUNDS, (lived.min(), lived.max())).tolist()
        if shortest == longest:  # pages come in runs, so most of the time
            self.lifetimes[shortest] += len(lived)
        else:
            self.lifetimes += np.bincount(np.searchsorted(BOUNDS, lived), minlength=len(self.lifetimes))

    def _remove(self, nodes: Nodes) -> int:
        """Takes nodes out of the index for others' sake; `nodes` as in `PrefixIndex.remove`. Returns their parent."""
        self.policy.evicted(nodes, self.index.remove(nodes))
        if self._gone is not None:
            self._gone(nodes.tolist())
        return int(self.index.parent[nodes[-1]])

    def _evict_slid(self, pages: Pages) -> None:
        self._not_slid(pages)
        nodes = set(self.index.unbind(pages).tolist())
        for node in nodes if self.anchor is None else ():
            self._lost_child(node)

    def _lost_child(self, node: int) -> None:
        """Something that came after this node is gone, or its pages are: of nodes without pages only those stay through
        which others are found.
        """
        while self.anchor is None and node != NONE and self._empty_leaf(node):
            self.policy.withdraw(node)
            node = self._remove(np.array([node]))
        self._offer_if_leaf(node)

    def _empty_leaf(self, node: int) -> bool:
        return not self.index.children[node] and bool((self.index.pages[:, node] == NONE).all())

    def _reach_all(self) -> None:
        """Pages of groups with windows that nobody holds, before others that somebody does."""
        pages = np.flatnonzero((self._counts == 0) & (self.index.node_of != NONE))
        if not len(pages):
            raise LedgerError(f"{self.cached} pages are counted as cached, none is")
        self.slid.update(dict.fromkeys(pages.tolist()))

    def _idle_run(self, chosen: Nodes) -> Nodes:
        """The part of what a policy chose that may go.

        Args:
            chosen: [n] a leaf, then nodes that go with it, as `EvictionPolicy.choose` returns them.

        Returns:
            [1 .. n] The leaf and those after it that are not held, each the parent and nothing else of the one before.
        """
        if len(chosen) == 1:
            return chosen
        kept = (self.index.children[chosen] != 1) | self.held(chosen)
        kept[0] = False
        kept[1:] |= self.index.apart(chosen)
        return chosen[: int(kept.argmax())] if np.count_nonzero(kept) else chosen

    def _offer_if_leaf(self, node: int) -> None:
        if node != NONE and not self.index.children[node] and not self._is_held(node):
            self.policy.offer(node)

    def forget(self, nodes: Sequence[int], cause: Cause) -> Pages:
        """Takes the names from these nodes and all that come after them, as `PrefixIndex.under` says; returns those of
        their pages that nobody holds, which are free.
        """
        doomed = self.index.under(nodes)
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
        """As `forget`, of everything."""
        return self.forget([n for n in self.index.all() if self.index.parent[n] == NONE], Cause.RESET)


PolicyMaker = Callable[[int], EvictionPolicy]
"""Makes a policy for a pool of so many pages."""
