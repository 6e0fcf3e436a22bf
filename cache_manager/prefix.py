"""Prefix index: which page has the keys and values of which tokens. It names pages, it does not hold them.

A trie of nodes, one for each named place in some sequence; a node has a page in every layer group, but for groups with
a window, where a page that left it may be gone before its node. Nodes are numbers into flat lists. A lookup goes by
name, one dict probe a page, and is then confirmed: each node must have the content asked for and the node before it as
its parent. So even where two contents have one name, nobody gets another's page.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.name_log import NameLog
from cache_manager.page_names import Name, PageChain

NONE = -1  # no node, no page: the parent of a first page


class PrefixIndex:
    """For a pool of `pages` pages. windows: some groups have windows. node_of: [pages] the node of each page, NONE for
    one without a name.

    By node: pages [groups, nodes], NONE where there is none; parent [nodes], the node before it; children [nodes], how
    many come after it; born [nodes], when it was published, in seconds on the scheduler's clock.
    """

    def __init__(self, groups: int, pages: int, windows: bool = False) -> None:
        self._windows = windows
        self.node_of = np.full(pages, NONE, np.int32)
        self.pages = np.full((groups, 64), NONE, np.int32)
        self.children = np.zeros(64, np.int32)
        self.born = np.zeros(64)
        self.parent = np.full(64, NONE)
        self._contents = [b""] * 64
        self._names: list[Name] = [b""] * 64
        self._node_named: dict[Name, int] = {}
        # A stack with the lowest numbers on top. Runs come back as they were taken, so most new runs are consecutive.
        self._unused = np.arange(63, -1, -1)
        self._unused_count = 64
        self.log: NameLog | None = None
        """What is told of names that are given and taken; None: nobody wants to know."""

    def __len__(self) -> int:
        """Named places."""
        return len(self._node_named)

    def __contains__(self, name: Name) -> bool:
        return name in self._node_named

    def content(self, node: int) -> bytes:
        return self._contents[node]

    def complete(self, name: Name) -> bool:
        """Whether this name is given, to a page in every group."""
        node = self._node_named.get(name)
        return node is not None and not (self._windows and (self.pages[:, node] == NONE).any())

    def find(self, chain: PageChain, most: int) -> list[int]:
        """Nodes of the chain's pages from its first one on, at most so many, up to the first that is not here."""
        get, found = self._node_named.get, list[int]()
        if not most or chain.names[0] not in self._node_named:
            return found
        for name in islice(chain.names, most):
            node = get(name)
            if node is None:
                break
            found.append(node)
        contents = self._contents
        same = [contents[node] for node in found] == chain.contents[: len(found)]
        nodes = np.fromiter(found, np.intp, len(found))
        if same and self.parent[found[0]] == NONE and not np.count_nonzero(self.parent[nodes[1:]] != nodes[:-1]):
            return found
        return found[: self._confirmed(found, chain)]

    def _confirmed(self, found: list[int], chain: PageChain) -> int:
        before = NONE
        for i, node in enumerate(found):
            if self._contents[node] != chain.contents[i] or self.parent[node] != before:
                return i
            before = node
        return len(found)

    def run(self, names: Iterable[Name]) -> list[int]:
        """Nodes of these names, each the parent of the next and with its page in every group; up to the first that is
        not here like that.
        """
        found = list[int]()
        for name in names:
            node = self._node_named.get(name)
            if node is None or (found and self.parent[node] != found[-1]) or (self.pages[:, node] == NONE).any():
                break
            found.append(node)
        return found

    def path(self, node: int) -> list[int]:
        """From the first node to this one; nothing for NONE."""
        path = list[int]()
        while node != NONE:
            path.append(node)
            node = int(self.parent[node])
        return path[::-1]

    def apart(self, nodes: NDArray[np.intp]) -> NDArray[np.bool_]:
        """nodes: [n]. Returns [n - 1] which of the nodes after the first are not the parent of the one before."""
        return self.parent[nodes[:-1]] != nodes[1:]

    def child(self, parent: int, chain: PageChain, index: int) -> int | None:
        """The node of the chain's page of this index under `parent`; NONE where there is none yet, None where its name
        stands for something else, so that it cannot be published.
        """
        node = self._node_named.get(chain.names[index])
        if node is None:
            return NONE
        return node if bool(self.parent[node] == parent) and self._contents[node] == chain.contents[index] else None

    def names(self, nodes: Sequence[int]) -> list[Name]:
        """Block hashes of these nodes."""
        if len(nodes) == 1:  # `itemgetter` returns the item itself then
            return [self._names[nodes[0]]]
        return list(itemgetter(*nodes)(self._names)) if nodes else []

    def pages_of(self, nodes: Sequence[int] | NDArray[np.integer]) -> Pages:
        """Their pages, group by group."""
        pages = self.pages[:, nodes].reshape(-1)
        return pages[pages != NONE] if self._windows else pages

    def bind(self, node: int, pages: Pages) -> None:
        """pages: [groups], NONE where the node has one. These, which have no name, are the node's from now on."""
        new = pages != NONE
        self.pages[new, node] = pages[new]
        self.node_of[pages[new]] = node

    def unbind(self, pages: Pages) -> NDArray[np.int32]:
        """Takes the names from these pages, whose nodes keep them. Returns the nodes."""
        nodes = self.node_of[pages]
        groups, which = np.nonzero(self.pages[:, nodes] == pages)
        self.pages[groups, nodes[which]] = NONE
        self.node_of[pages] = NONE
        return nodes

    def add(self, parent: int, chain: PageChain, start: int, pages: Pages, now: float) -> list[int]:
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
        nodes = index.tolist()
        names = chain.names[start : start + len(nodes)]
        if (taken := self._give(names, nodes)) < len(nodes):
            self._return_nodes(index[taken:])
            index, nodes, names, pages = index[:taken], nodes[:taken], names[:taken], pages[:, :taken]
        if not nodes:
            return nodes
        if self.log is not None:
            self.log.given(names)
        if parent != NONE:
            self.children[parent] += 1
        contents = chain.contents[start : start + len(nodes)]
        first, end = nodes[0], nodes[0] + len(nodes)
        if nodes[-1] == end - 1 and (index[1:] > index[:-1]).all():  # slices: 2 us for 512 nodes instead of 40
            self._names[first:end], self._contents[first:end] = names, contents
        else:
            for node, name, content in zip(nodes, names, contents, strict=True):
                self._names[node], self._contents[node] = name, content
        self.parent[index[1:]] = index[:-1]
        self.parent[first] = parent
        self.children[index] = 1
        self.children[nodes[-1]] = 0
        self.born[index] = now
        self.pages[:, index] = pages
        if self._windows:
            self.node_of[pages[pages != NONE]] = np.broadcast_to(index, pages.shape)[pages != NONE]
        else:
            self.node_of[pages] = index
        return nodes

    def _give(self, names: list[Name], nodes: list[int]) -> int:
        """Enters these block hashes, up to the first that is taken, by another node or by one before it in the list.

        Returns:
            The number of hashes that were entered.
        """
        # Hashes collide next to never: all are entered in one pass, and what follows a collision is undone.
        entered = list(map(self._node_named.setdefault, names, nodes))
        if entered == nodes:
            return len(nodes)
        same = [one == other for one, other in zip(entered, nodes, strict=True)]
        first = same.index(False)
        for name, ours in zip(names[first:], same[first:], strict=True):
            if ours:
                del self._node_named[name]
        return first

    def add_each(self, parents: list[int], named: list[tuple[Name, bytes]], pages: Pages, now: float) -> list[int]:
        """As `add`, for n sequences: one page under each of these parents, with these names, which are not given yet,
        and contents. pages: [groups, n].
        """
        index = self._new_nodes(len(parents))
        nodes = index.tolist()
        for node, (name, content) in zip(nodes, named, strict=True):
            self._names[node], self._contents[node] = name, content
            self._node_named[name] = node
        if self.log is not None:
            self.log.given(name for name, _ in named)
        before = np.array(parents)
        np.add.at(self.children, before[before != NONE], 1)
        self.parent[index], self.children[index], self.born[index] = before, 0, now
        self.pages[:, index] = pages
        self.node_of[pages] = index
        return nodes

    def _new_nodes(self, count: int) -> NDArray[np.intp]:
        if count > self._unused_count:
            self._widen(max(count - self._unused_count, len(self._names)))
        self._unused_count -= count
        return self._unused[self._unused_count : self._unused_count + count][::-1].copy()

    def _return_nodes(self, nodes: NDArray[np.intp]) -> None:
        """nodes: in order of the tokens."""
        self._unused[self._unused_count : self._unused_count + len(nodes)] = nodes[::-1]
        self._unused_count += len(nodes)

    def _widen(self, extra: int) -> None:
        room = len(self._names)
        for values in (self._names, self._contents):
            values.extend([b""] * extra)
        self.parent = np.pad(self.parent, (0, extra), constant_values=NONE)
        self.pages = np.pad(self.pages, ((0, 0), (0, extra)), constant_values=NONE)
        self.children = np.pad(self.children, (0, extra))
        self.born = np.pad(self.born, (0, extra))
        below = np.arange(room + extra - 1, room - 1, -1)
        self._unused = np.concatenate((below, self._unused))
        self._unused_count += extra

    def remove(self, nodes: Sequence[int] | NDArray[np.intp]) -> list[Name]:
        """Takes back the block hashes of nodes.

        Args:
            nodes: [n] A node without children, then each the parent of the one before it, with no other child.

        Returns:
            [n] the hashes.
        """
        index = np.asarray(nodes)
        run = index.tolist()
        names, named = self.names(run), self._node_named
        for name in names:
            del named[name]
        if self.log is not None:
            self.log.taken(names)
        self.node_of[self.pages_of(index)] = NONE
        self.children[index] = NONE  # what is gone is no leaf
        parent = int(self.parent[run[-1]])
        if parent != NONE:
            self.children[parent] -= 1
        self._return_nodes(index[::-1])
        return names

    def under(self, nodes: Iterable[int]) -> list[int]:
        """These nodes and all that come after them, children before parents. Takes time of the size of the index."""
        after: dict[int, list[int]] = {}
        for node in self._node_named.values():
            after.setdefault(int(self.parent[node]), []).append(node)
        asked, order = set(nodes), list[int]()
        stack = [node for node in asked if not self._comes_after(node, asked)]
        while stack:
            order.append(stack.pop())
            stack.extend(after.get(order[-1], ()))
        return order[::-1]

    def _comes_after(self, node: int, nodes: set[int]) -> bool:
        while (node := int(self.parent[node])) != NONE:
            if node in nodes:
                return True
        return False

    def all(self) -> list[int]:
        return list(self._node_named.values())
