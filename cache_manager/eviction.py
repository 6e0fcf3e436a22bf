"""Eviction: the protocol of policies, and least recently used.

Only leaves of the prefix index are offered to a policy: a node can be found only through the nodes before it, so the
tail of a sequence is evicted before its head. A policy ranks the ends of sequences. It chooses a victim together with
the nodes before it that have the same rank.
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash
from cache_manager.runs import NodeRuns, Nodes


class EvictionPolicy(Protocol):
    """Ranks nodes of the prefix index. Numbers of nodes are used again once `evicted`.

    Attributes:
        name: Name of the policy in settings and messages.
    """

    name: str

    def __len__(self) -> int:
        """Returns the number of nodes that are offered."""

    def published(self, nodes: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Observes new nodes, whose pages are held by the requests that computed them.

        Args:
            nodes: [n] each the parent of the next, or one each of n sequences.
            hashes: [n] their block hashes.
        """

    def released(self, nodes: NDArray[np.int32]) -> None:
        """Observes that a request which held nodes has left.

        Args:
            nodes: [n] in order of its tokens, each the parent of the next.
        """

    def offer(self, node: int) -> None:
        """Lets `choose` return a node, which no request holds and which has no children."""

    def withdraw(self, node: int) -> None:
        """Takes back the offer of a node, if there is one."""

    def choose(self, most: int) -> Nodes:
        """Chooses a victim and takes back its offer. At least one node is offered.

        Args:
            most: Nodes to return at most, 1 or more.

        Returns:
            [1 .. most] the chosen node, then nodes that rank before every offered node, each the parent of the one
            before it. A policy may always return the chosen node alone. The cache evicts the first one. It evicts the
            following ones up to the first that is held, has another child, or is not the parent of the one before it.
        """

    def evicted(self, nodes: Nodes, hashes: Sequence[BlockHash]) -> None:
        """Observes that nodes were removed from the index.

        Args:
            nodes: [n] each the parent of the one before it.
            hashes: [n] their block hashes until now.
        """


class LeastRecentlyUsed:
    """Evicts the node whose last request left longest ago.

    Time is the number of requests that have left.

    Args:
        pages: Pages of the pool; not used.
    """

    name = "lru"

    def __init__(self, pages: int) -> None:  # noqa: ARG002
        self._runs = NodeRuns()
        self._requests = 0
        self._offered: set[int] = set()
        # A heap of (last use, node). A withdrawn node's entry stays until it comes to the front: a heap cannot find it.
        self._queue: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._offered)

    def last_used(self, node: int) -> int:
        """Returns the number of the last request that left this node; 0 for none."""
        run = self._runs.run_of(node)
        return 0 if run is None else run.last

    def is_offered(self, node: int) -> bool:
        return node in self._offered

    def published(self, nodes: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        pass

    def released(self, nodes: NDArray[np.int32]) -> None:
        self._requests += 1
        places = nodes.astype(np.intp)
        self._runs.take_out(places)
        self._runs.put(places, 0, self._requests)

    def offer(self, node: int) -> None:
        self._offered.add(node)
        heapq.heappush(self._queue, (self.last_used(node), node))
        if len(self._queue) > 64 + 2 * len(self._offered):  # mostly stale entries: bounds the memory
            self._queue = [entry for entry in set(self._queue) if self._valid(entry)]
            heapq.heapify(self._queue)

    def withdraw(self, node: int) -> None:
        self._offered.discard(node)

    def choose(self, most: int) -> Nodes:
        while not self._valid(entry := heapq.heappop(self._queue)):
            pass
        self._offered.remove(entry[1])
        return self._runs.tail(entry[1], most)

    def _valid(self, entry: tuple[int, int]) -> bool:
        """Whether an entry of the queue still describes an offered node."""
        return entry[1] in self._offered and self.last_used(entry[1]) == entry[0]

    def evicted(self, nodes: Nodes, hashes: Sequence[BlockHash]) -> None:  # noqa: ARG002
        self._runs.take_out(nodes)
