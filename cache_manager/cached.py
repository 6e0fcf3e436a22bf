"""The prefix cache: published pages, those of them that nobody holds, and the order in which these are given up.

A page without a holder keeps its name, and its content, until its place is needed. Nothing is set apart for it: cached
pages count as available.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.eviction import EvictionPolicy
from cache_manager.prefix import NONE, PrefixIndex

LIFETIMES = (.1, .5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)  # fmt: skip
"""Upper bounds, in seconds, of the classes in which lifetimes are counted; one more class is above them."""


class Cause(Enum):
    """Why a page lost its name."""

    CAPACITY = "capacity"
    RESET = "reset"
    FAULT = "fault"


class PrefixCache:
    """`counts` is the allocator's: holders by page.

    cached: pages that have a name and no holder. evicted: pages that lost their names, by cause. lifetimes: [classes]
    how long those lost for their place had been published.
    """

    def __init__(self, index: PrefixIndex, policy: EvictionPolicy, counts: NDArray[np.int32]) -> None:
        self.index, self.policy, self._counts = index, policy, counts
        self.cached = 0
        self.evicted: Counter[Cause] = Counter()
        self.lifetimes = np.zeros(len(LIFETIMES) + 1, np.int64)
        self.lifetime_seconds = 0.0

    def idle(self, node: int) -> bool:
        """Whether nobody holds the node's pages."""
        return not self._counts[self.index.pages[0, node]]

    def recount(self) -> None:
        """After counts were put right."""
        self.cached = int(np.count_nonzero((self._counts == 0) & (self.index.node_of != NONE)))

    def settle(self, pages: Pages) -> Pages:
        """Pages that have lost their last holder: keeps those with a name, returns the others, which are free."""
        nodes = self.index.node_of[pages]
        named = nodes != NONE
        kept = int(np.count_nonzero(named))
        if not kept:
            return pages
        self.cached += kept
        nodes = nodes[named]
        for node in set(nodes[self.index.children[nodes] == 0].tolist()):
            self._offer_if_leaf(node)
        return pages[~named]

    def revive(self, nodes: Sequence[int]) -> None:
        """These nodes' pages are about to be held (again)."""
        pages = self.index.pages[:, nodes]
        idle = int(np.count_nonzero(self._counts[pages] == 0))
        if idle:
            self.cached -= idle
            for node in np.array(nodes)[self.index.children[nodes] == 0].tolist():
                self.policy.withdraw(node)

    def evict(self, count: int, now: float) -> Pages:
        """Takes the names from at least `count` of the cached pages, of which there are so many; returns them."""
        index, policy = self.index, self.policy
        given: list[Pages] = []
        victims: list[int] = []
        left, groups = count, len(index.pages)
        while left > 0:
            run = self._idle_run(policy.choose(), -(-left // groups))
            run = run[: policy.going(run)]
            given.append(index.pages[:, run[::-1]].reshape(-1))
            policy.evicted(run, index.names(run))
            parent = index.remove(run)
            victims += run
            left -= groups * len(run)
            self._offer_if_leaf(parent)
        pages = np.concatenate(given)
        self.cached -= len(pages)
        self._count(victims, len(pages), Cause.CAPACITY, now)
        return pages

    def _idle_run(self, leaf: int, most: int) -> list[int]:
        """A leaf and those before it, tail first, that nobody holds and that nothing else comes after."""
        parent, run, node = self.index.parent, [leaf], self.index.parent[leaf]
        if node == NONE or self.policy.going([leaf, node]) == 1:
            return run
        while len(run) < most and node != NONE:
            run.append(node)
            node = parent[node]
        nodes = np.array(run)
        kept = (self.index.children[nodes] != 1) | (self._counts[self.index.pages[0, nodes]] > 0)
        kept[0] = False
        return run[: int(kept.argmax())] if kept.any() else run

    def _offer_if_leaf(self, node: int) -> None:
        if node != NONE and not self.index.children[node] and self.idle(node):
            self.policy.offer(node)

    def forget(self, nodes: Sequence[int], cause: Cause, now: float) -> Pages:
        """Takes the names from these nodes and all that come after them; returns those of their pages that nobody
        holds, which are free.
        """
        doomed = self.index.under(nodes)
        pages = self.index.pages[:, doomed].T.reshape(-1)
        for node in doomed:
            if not self.index.children[node]:
                self.policy.withdraw(node)
            self.policy.evicted([node], self.index.names([node]))
            self.index.remove([node])
        for parent in {self.index.parent[node] for node in nodes} - set(doomed):
            self._offer_if_leaf(parent)
        free = pages[self._counts[pages] == 0]
        self.cached -= len(free)
        self._count(doomed, len(pages), cause, now)
        return free

    def reset(self, now: float) -> Pages:
        """As `forget`, of everything."""
        return self.forget([n for n in self.index.all() if self.index.parent[n] == NONE], Cause.RESET, now)

    def _count(self, nodes: Sequence[int], pages: int, cause: Cause, now: float) -> None:
        self.evicted[cause] += pages
        if cause is Cause.CAPACITY:
            lived = now - self.index.born[nodes]
            classes = np.searchsorted(LIFETIMES, lived)
            self.lifetimes += np.bincount(classes, minlength=len(self.lifetimes))
            self.lifetime_seconds += float(lived.sum())


PolicyMaker = Callable[[int], EvictionPolicy]
"""Makes a policy for a pool of so many pages."""
