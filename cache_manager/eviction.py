"""Which cached page goes first: what an eviction policy is told and asked, and least recently used.

Only leaves are offered: a node goes before the nodes that its sequence needs to reach it, tail before head. So a policy
ranks the ends of sequences, and what is asked of it for each page is cheap.
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.page_names import Name


class EvictionPolicy(Protocol):
    """Ranks nodes of the prefix index. Numbers of nodes are used again once `evicted`."""

    name: str

    def __len__(self) -> int:
        """Nodes that are offered."""

    def published(self, nodes: Sequence[int], names: Sequence[Name]) -> None:
        """New nodes, whose pages are held by the request that computed them."""

    def released(self, nodes: NDArray[np.int32]) -> None:
        """A request that held these nodes, in order of its tokens, has left."""

    def offer(self, node: int) -> None:
        """Nobody holds this node, none comes after it: it may be chosen."""

    def withdraw(self, node: int) -> None:
        """It may not any more."""

    def choose(self) -> int:
        """The offered node that goes first, which is offered no more. There is one."""

    def going(self, run: Sequence[int]) -> int:
        """run: the node just chosen, then each the parent of the one before it. How many of these, 1 at least, go
        before every node that is offered.
        """

    def evicted(self, run: Sequence[int], names: Sequence[Name]) -> None:
        """Their pages are somebody else's now."""


class LeastRecentlyUsed:
    """The node whose last request left longest ago goes first."""

    name = "lru"

    def __init__(self, pages: int) -> None:
        self._used = np.zeros(pages, np.int64)  # by node; there are seldom more of them than pages
        self._requests = 0
        self._offered: set[int] = set()
        self._queue: list[tuple[int, int]] = []  # entries of nodes that were withdrawn stay until they are met

    def __len__(self) -> int:
        return len(self._offered)

    def published(self, nodes: Sequence[int], names: Sequence[Name]) -> None:  # noqa: ARG002
        if max(nodes) >= len(self._used):
            self._used = np.pad(self._used, (0, max(nodes)))

    def released(self, nodes: NDArray[np.int32]) -> None:
        self._requests += 1
        self._used[nodes] = self._requests

    def offer(self, node: int) -> None:
        self._offered.add(node)
        heapq.heappush(self._queue, (int(self._used[node]), node))
        if len(self._queue) > 64 + 2 * len(self._offered):
            self._queue = [entry for entry in set(self._queue) if self._valid(entry)]
            heapq.heapify(self._queue)

    def withdraw(self, node: int) -> None:
        self._offered.discard(node)

    def choose(self) -> int:
        while not self._valid(entry := heapq.heappop(self._queue)):
            pass
        self._offered.remove(entry[1])
        return entry[1]

    def going(self, run: Sequence[int]) -> int:
        while self._queue and not self._valid(self._queue[0]):
            heapq.heappop(self._queue)
        if not self._queue:
            return len(run)
        later = np.flatnonzero(self._used[run] > self._queue[0][0])
        return max(1, int(later[0])) if len(later) else len(run)

    def _valid(self, entry: tuple[int, int]) -> bool:
        return entry[1] in self._offered and self._used[entry[1]] == entry[0]

    def evicted(self, run: Sequence[int], names: Sequence[Name]) -> None:
        pass
