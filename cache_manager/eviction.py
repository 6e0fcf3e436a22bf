"""Which cached page goes first: the protocol of eviction policies, and least recently used.

Only leaves are offered: a node goes before the nodes that its sequence needs to reach it, tail before head. So a policy
ranks the ends of sequences. It names a victim together with the nodes before it that have the same rank.
"""

import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache_manager.page_names import Name
from cache_manager.runs import NodeRuns, Nodes


class EvictionPolicy(Protocol):
    """Ranks nodes of the prefix index. Numbers of nodes are used again once `evicted`.

    Attributes:
        name: For settings and messages.
    """

    name: str

    def __len__(self) -> int:
        """Nodes that are offered."""

    def published(self, nodes: Sequence[int], names: Sequence[Name]) -> None:
        """New nodes, whose pages are held by the requests that computed them.

        Args:
            nodes: [n] each the parent of the next, or one each of n sequences.
            names: [n] their block hashes.
        """

    def released(self, nodes: NDArray[np.int32]) -> None:
        """A request that held nodes has left.

        Args:
            nodes: [n] in order of its tokens, each the parent of the next.
        """

    def offer(self, node: int) -> None:
        """Offers a node, which no request holds and which has no children: it may be chosen."""

    def withdraw(self, node: int) -> None:
        """Takes back the offer of a node, if there is one."""

    def choose(self, most: int) -> Nodes:
        """Takes the node that goes first off the offer. At least one is offered.

        Args:
            most: Nodes to return at most, 1 or more.

        Returns:
            [1 .. most] The chosen node, then those that go before every node that is offered, each the parent of the
            one before it. A policy may always return the chosen node alone. The cache evicts the first one, and those
            after it up to one that is held, has another child, or is not the parent of the one before it.
        """

    def evicted(self, nodes: Nodes, names: Sequence[Name]) -> None:
        """Nodes have lost their pages to others.

        Args:
            nodes: [n] each the parent of the one before it.
            names: [n] their block hashes until now.
        """


class LeastRecentlyUsed:
    """The node whose last request left longest ago goes first."""

    name = "lru"

    def __init__(self, pages: int) -> None:  # noqa: ARG002
        self._runs = NodeRuns()
        self._requests = 0
        self._offered: set[int] = set()
        self._queue: list[tuple[int, int]] = []  # entries of withdrawn nodes stay until they come to the front

    def __len__(self) -> int:
        return len(self._offered)

    def last_used(self, node: int) -> int:
        """Number of the last request that left this node; 0 for none."""
        run = self._runs.run_of(node)
        return 0 if run is None else run.last

    def is_offered(self, node: int) -> bool:
        return node in self._offered

    def published(self, nodes: Sequence[int], names: Sequence[Name]) -> None:
        pass

    def released(self, nodes: NDArray[np.int32]) -> None:
        self._requests += 1
        places = nodes.astype(np.intp)
        self._runs.take_out(places)
        self._runs.put(places, 0, self._requests)

    def offer(self, node: int) -> None:
        self._offered.add(node)
        heapq.heappush(self._queue, (self.last_used(node), node))
        if len(self._queue) > 64 + 2 * len(self._offered):
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
        return entry[1] in self._offered and self.last_used(entry[1]) == entry[0]

    def evicted(self, nodes: Nodes, names: Sequence[Name]) -> None:  # noqa: ARG002
        self._runs.take_out(nodes)
