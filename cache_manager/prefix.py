"""Prefix index: which page has the keys and values of which tokens. It names pages, it does not hold them.

A trie of nodes, one for each named place in some sequence; a node has a page in every layer group, but for groups with
a window, where a page that left it may be gone before its node. Nodes are numbers into flat lists. A lookup goes by
name, one dict probe a page, and is then confirmed: each node must have the content asked for and the node before it as
its parent. So even where two contents have one name, nobody gets another's page.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import Pages
from cache_manager.name_log import NameLog
from cache_manager.page_names import Name, PageChain

NONE = -1  # no node, no page: the parent of a first page


class PrefixIndex:
    """For a pool of `pages` pages. windows: some groups have windows. node_of: [pages] the node of each page, NONE for
    one without a name.

    By node: pages [groups, nodes], NONE where there is none; parent, the node before it; children [nodes], how many
    come after it; born [nodes], when it was published, in seconds on the scheduler's clock.
    """

    def __init__(self, groups: int, pages: int, windows: bool = False) -> None:
        self._windows = windows
        self.node_of = np.full(pages, NONE, np.int32)
        self.pages = np.full((groups, 64), NONE, np.int32)
        self.children = np.zeros(64, np.int32)
        self.born = np.zeros(64)
        self.parent: list[int] = []
        self._contents: list[bytes] = []
        self._names: list[Name] = []
        self._node_named: dict[Name, int] = {}
        self._unused: list[int] = []
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
        contents, parents = self._contents, self.parent
        same = [contents[node] for node in found] == chain.contents[: len(found)]
        if same and [parents[node] for node in found] == [NONE, *found[:-1]][: len(found)]:
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
            node = self.parent[node]
        return path[::-1]

    def child(self, parent: int, chain: PageChain, index: int) -> int | None:
        """The node of the chain's page of this index under `parent`; NONE where there is none yet, None where its name
        stands for something else, so that it cannot be published.
        """
        node = self._node_named.get(chain.names[index])
        if node is None:
            return NONE
        return node if self.parent[node] == parent and self._contents[node] == chain.contents[index] else None

    def names(self, nodes: Iterable[int]) -> list[Name]:
        return [self._names[node] for node in nodes]

    def pages_of(self, nodes: Sequence[int] | NDArray[np.int32]) -> Pages:
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

    def unnamed_until(self, chain: PageChain, start: int, end: int) -> int:
        """Up to which index the chain's names from `start` on, which is free, can be given, each once."""
        names = chain.names[start:end]
        new = set(names)
        if len(new) == len(names) and self._node_named.keys().isdisjoint(new):
            return end
        new.clear()
        for index, name in enumerate(names, start):
            if name in self._node_named or name in new:
                return index
            new.add(name)
        return end

    def add(self, parent: int, chain: PageChain, start: int, pages: Pages, now: float) -> list[int]:
        """Names the chain's pages from index `start` on, which `child` has not found. pages: [groups, n], NONE where
        there is none; none of these may have a name. Returns their nodes, each the parent of the next.
        """
        n = pages.shape[1]
        nodes = self._new_nodes(n)
        names, contents = chain.names[start : start + n], chain.contents[start : start + n]
        self._node_named.update(zip(names, nodes, strict=True))
        if self.log is not None:
            self.log.given(names)
        if parent != NONE:
            self.children[parent] += 1
        for node, name, content in zip(nodes, names, contents, strict=True):
            self._names[node], self._contents[node], self.parent[node] = name, content, parent
            parent = node
        index = np.array(nodes)
        self.children[index] = 1
        self.children[parent] = 0
        self.born[index] = now
        self.pages[:, index] = pages
        if self._windows:
            self.node_of[pages[pages != NONE]] = np.broadcast_to(index, pages.shape)[pages != NONE]
        else:
            self.node_of[pages] = index
        return nodes

    def add_each(self, parents: list[int], named: list[tuple[Name, bytes]], pages: Pages, now: float) -> list[int]:
        """As `add`, for n sequences: one page under each of these parents, with these names, which are not given yet,
        and contents. pages: [groups, n].
        """
        nodes = self._new_nodes(len(parents))
        for node, parent, (name, content) in zip(nodes, parents, named, strict=True):
            self._names[node], self._contents[node], self.parent[node] = name, content, parent
            self._node_named[name] = node
        if self.log is not None:
            self.log.given(name for name, _ in named)
        index, before = np.array(nodes), np.array(parents)
        np.add.at(self.children, before[before != NONE], 1)
        self.children[index], self.born[index] = 0, now
        self.pages[:, index] = pages
        self.node_of[pages] = index
        return nodes

    def _new_nodes(self, n: int) -> list[int]:
        reused = self._unused[-n:]
        del self._unused[-n:]
        have, room = len(self._names), self.pages.shape[1]
        more = n - len(reused)
        for values in (self._names, self._contents):
            values.extend([b""] * more)
        self.parent.extend([NONE] * more)
        if have + more > room:
            extra = max(have + more, 2 * room) - room
            self.pages = np.pad(self.pages, ((0, 0), (0, extra)), constant_values=NONE)
            self.children = np.pad(self.children, (0, extra))
            self.born = np.pad(self.born, (0, extra))
        return reused + list(range(have, have + more))

    def remove(self, run: list[int]) -> int:
        """Takes the names from the pages of these nodes: one without children, and then each the parent of the one
        before it, with no other child. Returns the node before the last of them.
        """
        names = self.names(run)
        deque(map(self._node_named.__delitem__, names), maxlen=0)  # a loop, as C runs it
        if self.log is not None:
            self.log.taken(names)
        self.node_of[self.pages_of(run)] = NONE
        self.children[run] = NONE  # what is gone is no leaf
        parent = self.parent[run[-1]]
        if parent != NONE:
            self.children[parent] -= 1
        self._unused.extend(run)
        return parent

    def under(self, nodes: Iterable[int]) -> list[int]:
        """These nodes and all that come after them, children before parents. Takes time of the size of the index."""
        after: dict[int, list[int]] = {}
        for node in self._node_named.values():
            after.setdefault(self.parent[node], []).append(node)
        asked, order = set(nodes), list[int]()
        stack = [node for node in asked if not self._comes_after(node, asked)]
        while stack:
            order.append(stack.pop())
            stack.extend(after.get(order[-1], ()))
        return order[::-1]

    def _comes_after(self, node: int, nodes: set[int]) -> bool:
        while (node := self.parent[node]) != NONE:
            if node in nodes:
                return True
        return False

    def all(self) -> list[int]:
        return list(self._node_named.values())
