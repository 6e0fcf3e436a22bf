"""Prefix index: finds published pages by block hash. It is no holder of the pages.

A trie of nodes, one for each published position in a sequence, in steps of a page. A node has a page in every layer
group. In groups with a window the page may be evicted before its node. Nodes are numbers into flat arrays.

A lookup probes one dict a page by block hash, then confirms the result: each node must have the wanted content, and the
node before it as its parent. So even where hashes collide, no sequence gets a page of another content.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.block_hash import BlockHash, HashChain
from cache_manager.kv_events import KVEventLog

Value = TypeVar("Value")

NONE = -1  # no node, no page: the parent of a first page


class PrefixIndex:
    """Trie of published pages, in arrays that it alone writes.

    Invariant: `node_of[pages[g, node]] == node` for each page of a node, and a node's parent is in the index.

    Args:
        groups: Layer groups.
        pages: Pages of the pool.
        windows: Whether some groups have windows, so that nodes may lack pages.

    Attributes:
        node_of: [pages] int32. Node of each page, NONE for a page without a block hash.
        pages: [groups, nodes] int32. Pages of each node, NONE where a group has none.
        children: [nodes] int32. Number of nodes that come after each; NONE for a removed node.
        born: [nodes] float64. Time of publication, in seconds on the scheduler's clock.
        parent: [nodes] int. Node before each, NONE for the first page of a sequence.
        log: Gets the events of block hashes; None without a reader.
    """

    def __init__(self, groups: int, pages: int, windows: bool = False) -> None:
        self._windows = windows
        self.node_of = np.full(pages, NONE, np.int32)
        self.pages = np.full((groups, 64), NONE, np.int32)
        self.children = np.zeros(64, np.int32)
        self.born = np.zeros(64)
        self.parent = np.full(64, NONE)
        self._numbers = list(range(64))  # by node, itself: a slice of it makes no new numbers
        self._contents = [b""] * 64
        self._hashes: list[BlockHash] = [b""] * 64
        self._node_of_hash: dict[BlockHash, int] = {}
        # A stack with the lowest numbers on top. Runs come back as they were taken, so most new runs are consecutive.
        self._unused = np.arange(63, -1, -1)
        self._unused_count = 64
        self.log: KVEventLog | None = None

    def __len__(self) -> int:
        """Returns the number of nodes."""
        return len(self._node_of_hash)

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._node_of_hash

    def content(self, node: int) -> bytes:
        return self._contents[node]

    def complete(self, block_hash: BlockHash) -> bool:
        """Whether this hash has a node with a page in every group."""
        node = self._node_of_hash.get(block_hash)
        return node is not None and not (self._windows and (self.pages[:, node] == NONE).any())

    def find(self, chain: HashChain, most: int) -> list[int]:
        """Finds the longest published prefix of a chain.

        Args:
            chain: Block hashes and contents of a sequence.
            most: Nodes to return at most.

        Returns:
            Nodes of the chain's first pages, each the parent of the next. They may lack pages in groups with windows.
        """
        get, found = self._node_of_hash.get, list[int]()
        if not most or chain.hashes[0] not in self._node_of_hash:
            return found
        for block_hash in islice(chain.hashes, most):
            node = get(block_hash)
            if node is None:
                break
            found.append(node)
        # One comparison confirms all nodes, since collisions next to never happen. Else `_confirmed` finds the first.
        contents = self._contents
        same = [contents[node] for node in found] == chain.contents[: len(found)]
        nodes = np.fromiter(found, np.intp, len(found))
        if same and self.parent[found[0]] == NONE and not np.count_nonzero(self.parent[nodes[1:]] != nodes[:-1]):
            return found
        return found[: self._confirmed(found, chain)]

    def _confirmed(self, found: list[int], chain: HashChain) -> int:
        """Returns the number of leading nodes with the chain's contents, each the parent of the next."""
        before = NONE
        for i, node in enumerate(found):
            if self._contents[node] != chain.contents[i] or self.parent[node] != before:
                return i
            before = node
        return len(found)

    def run(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Finds consecutive nodes by hash alone, for a transfer of their pages.

        Args:
            hashes: Block hashes of consecutive pages of a sequence, from any of its pages on.

        Returns:
            Their nodes, each the parent of the next, up to the first that is not so. They may lack pages in groups with
            windows.
        """
        found = list[int]()
        for block_hash in hashes:
            node = self._node_of_hash.get(block_hash)
            if node is None or (found and self.parent[node] != found[-1]):
                break
            found.append(node)
        return found

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the first page of a sequence to this one; none for NONE."""
        path = list[int]()
        while node != NONE:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    def child(self, parent: int, chain: HashChain, index: int) -> int | None:
        """Finds the node of a chain's page under a parent.

        Args:
            parent: Node of the page before, NONE for the first page.
            chain: Block hashes and contents of the sequence.
            index: Index of the page.

        Returns:
            The node. NONE where the hash is not taken. None where it belongs to another content or parent, so that the
            page cannot be published.
        """
        node = self._node_of_hash.get(chain.hashes[index])
        if node is None:
            return NONE
        return node if bool(self.parent[node] == parent) and self._contents[node] == chain.contents[index] else None

    def hashes(self, nodes: Sequence[int]) -> list[BlockHash]:
        """Returns [n] the block hashes of n nodes."""
        if len(nodes) == 1:  # `itemgetter` returns the item itself then
            return [self._hashes[nodes[0]]]
        return list(itemgetter(*nodes)(self._hashes)) if nodes else []

    def pages_of(self, nodes: Sequence[int] | NDArray[np.integer] | slice) -> Pages:
        """Returns the pages of nodes, group by group, without NONE."""
        pages = self.pages[:, nodes].reshape(-1)
        return pages[pages != NONE] if self._windows else pages

    def bind(self, node: int, pages: Pages) -> None:
        """Gives pages to a node that lacks them.

        Args:
            node: The node.
            pages: [groups] pages without a block hash; NONE in groups where the node has a page.
        """
        new = pages != NONE
        self.pages[new, node] = pages[new]
        self.node_of[pages[new]] = node

    def unbind(self, pages: Pages) -> NDArray[np.int32]:
        """Takes published pages from their nodes, which keep their block hashes.

        Returns:
            [n] the node of each page.
        """
        nodes = self.node_of[pages]
        groups, which = np.nonzero(self.pages[:, nodes] == pages)
        self.pages[groups, nodes[which]] = NONE
        self.node_of[pages] = NONE
        return nodes

    def add(self, parent: int, chain: HashChain, start: int, pages: Pages, now: float) -> list[int]:
        """Publishes the chain's pages from index `start` on, up to the first whose block hash is taken.

        Args:
            parent: Node before the first of them, NONE for the first page of a sequence.
            chain: Block hashes and contents.
            start: Index in the chain. `child` has not found this page.
            pages: [groups, n]. NONE where a group has no page; none of them is published.
            now: Seconds on the scheduler's clock.

        Returns:
            Their nodes, at most n, each the parent of the next.
        """
        index = self._new_nodes(pages.shape[1])
        pieces = _pieces(index)
        nodes = _joined(self._numbers, pieces)
        hashes = chain.hashes[start : start + len(nodes)]
        if (taken := self._enter_hashes(hashes, nodes)) < len(nodes):
            self._return_nodes(index[taken:])
            index, nodes, hashes, pages = index[:taken], nodes[:taken], hashes[:taken], pages[:, :taken]
            if not nodes:
                return nodes
            pieces = _pieces(index)
        if self.log is not None:
            self.log.stored(hashes)
        if parent != NONE:
            self.children[parent] += 1
        contents = chain.contents[start : start + len(nodes)]
        start = 0
        for piece in pieces:
            end = start + piece.stop - piece.start
            self._hashes[piece], self._contents[piece] = hashes[start:end], contents[start:end]
            start = end
        places = pieces[0] if len(pieces) == 1 else index
        self.parent[index[1:]] = index[:-1]
        self.parent[nodes[0]] = parent
        self.children[places] = 1  # each has the next one as its child, but for the last
        self.children[nodes[-1]] = 0
        self.born[places] = now
        self.pages[:, places] = pages
        if self._windows:
            self.node_of[pages[pages != NONE]] = np.broadcast_to(index, pages.shape)[pages != NONE]
        else:
            self.node_of[pages] = index
        return nodes

    def _enter_hashes(self, hashes: list[BlockHash], nodes: list[int]) -> int:
        """Enters these block hashes, up to the first that is taken, by another node or by one before it in the list.

        Returns:
            The number of hashes that were entered.
        """
        # Hashes collide next to never: all are entered in one pass, and what follows a collision is undone.
        entered = list(map(self._node_of_hash.setdefault, hashes, nodes))
        if entered == nodes:
            return len(nodes)
        same = [one == other for one, other in zip(entered, nodes, strict=True)]
        first = same.index(False)
        for block_hash, ours in zip(hashes[first:], same[first:], strict=True):
            if ours:
                del self._node_of_hash[block_hash]
        return first

    def add_each(self, parents: list[int], contents: Mapping[BlockHash, bytes], pages: Pages, now: float) -> list[int]:
        """Publishes one page of each of n sequences.

        Args:
            parents: [n] node before each page, never NONE. Forks have the same.
            contents: [n] content of each page by its block hash; no hash is taken.
            pages: [groups, n] the pages, none of which is published.
            now: Seconds on the scheduler's clock.

        Returns:
            [n] their nodes.
        """
        index = self._new_nodes(len(parents))
        nodes = index.tolist()
        # Mostly a few nodes, whose items take less time one by one than as arrays.
        for node, parent, (block_hash, content) in zip(nodes, parents, contents.items(), strict=True):
            self._hashes[node], self._contents[node] = block_hash, content
            self._node_of_hash[block_hash] = node
            self.parent[node], self.children[node], self.born[node] = parent, 0, now
            self.children[parent] += 1
        if self.log is not None:
            self.log.stored(contents)
        self.pages[:, index] = pages
        self.node_of[pages] = index
        return nodes

    def _new_nodes(self, count: int) -> NDArray[np.intp]:
        """Takes [count] unused numbers, and widens the arrays where there are too few."""
        if count > self._unused_count:
            self._widen(max(count - self._unused_count, len(self._hashes)))
        self._unused_count -= count
        return self._unused[self._unused_count : self._unused_count + count][::-1].copy()

    def _return_nodes(self, nodes: NDArray[np.intp]) -> None:
        """Makes the numbers of nodes unused.

        Args:
            nodes: [n] in order of the tokens; the next run gets them in the same order.
        """
        self._unused[self._unused_count : self._unused_count + len(nodes)] = nodes[::-1]
        self._unused_count += len(nodes)

    def _widen(self, extra: int) -> None:
        """Adds `extra` numbers to all arrays."""
        room = len(self._hashes)
        self._numbers.extend(range(room, room + extra))
        for values in (self._hashes, self._contents):
            values.extend([b""] * extra)
        self.parent = np.pad(self.parent, (0, extra), constant_values=NONE)
        self.pages = np.pad(self.pages, ((0, 0), (0, extra)), constant_values=NONE)
        self.children = np.pad(self.children, (0, extra))
        self.born = np.pad(self.born, (0, extra))
        below = np.arange(room + extra - 1, room - 1, -1)
        self._unused = np.concatenate((below, self._unused))
        self._unused_count += extra

    def remove(self, nodes: Sequence[int] | NDArray[np.intp]) -> list[BlockHash]:
        """Removes nodes, whose pages lose their block hash.

        Args:
            nodes: [n] A node without children, then each the parent of the one before it, with no other child.

        Returns:
            [n] their block hashes until now. Parents, pages and contents of the nodes stay readable until new nodes get
            their numbers.
        """
        index = np.asarray(nodes)[::-1]
        pieces = _pieces(index)
        places = pieces[0] if len(pieces) == 1 else index
        hashes = _joined(self._hashes, pieces)
        hashes.reverse()
        node_of_hash = self._node_of_hash
        for block_hash in hashes:
            del node_of_hash[block_hash]
        if self.log is not None:
            self.log.removed(hashes)
        self.node_of[self.pages_of(places)] = NONE
        self.children[places] = NONE  # not 0: a removed node is no leaf
        parent = self.parent.item(index[0])
        if parent != NONE:
            self.children[parent] -= 1
        self._return_nodes(index)
        return hashes

    def under(self, nodes: Iterable[int]) -> list[int]:
        """Returns these nodes and all that come after them, children before parents.

        Takes time proportional to the size of the index, since nodes do not list their children.
        """
        after: dict[int, list[int]] = {}
        for node in self._node_of_hash.values():
            after.setdefault(int(self.parent[node]), []).append(node)
        asked, order = set(nodes), list[int]()
        stack = [node for node in asked if not self._comes_after(node, asked)]
        while stack:
            order.append(stack.pop())
            stack.extend(after.get(order[-1], ()))
        return order[::-1]

    def _comes_after(self, node: int, nodes: set[int]) -> bool:
        """Whether a node has one of these nodes before it."""
        while (node := int(self.parent[node])) != NONE:
            if node in nodes:
                return True
        return False

    def all(self) -> list[int]:
        """Returns all nodes."""
        return list(self._node_of_hash.values())


def _pieces(nodes: NDArray[np.intp]) -> list[slice]:
    """Cuts nodes into pieces of consecutive numbers, as slices of arrays and lists by node.

    Mostly a run has a few pieces, since numbers are taken as they came back: 100 nodes a piece with prompts of 1 to 500
    pages. Slices of lists take 2 us for 512 nodes instead of 40.

    Args:
        nodes: [n] distinct nodes, n at least 1.
    """
    first = nodes.item(0)
    if len(nodes) == 1:  # most evictions for decoding rows
        return [slice(first, first + 1)]
    # Ascending numbers that span their own count are one piece, which is quicker to find out than where pieces end.
    if nodes.item(-1) - first == len(nodes) - 1 and not np.count_nonzero(nodes[1:] < nodes[:-1]):
        return [slice(first, first + len(nodes))]
    (last,) = (nodes[1:] - nodes[:-1] != 1).nonzero()  # of each piece but the last one
    pieces, start = list[slice](), 0
    for end in [*(last + 1).tolist(), len(nodes)]:
        first = nodes.item(start)
        pieces.append(slice(first, first + end - start))
        start = end
    return pieces


def _joined(values: list[Value], pieces: list[slice]) -> list[Value]:
    """Returns a new list of the values in all pieces."""
    joined = values[pieces[0]]
    for piece in pieces[1:]:
        joined += values[piece]
    return joined
