"""Names full pages whose KV has been computed, so that other sequences go on from them, and takes names back.

Where two rows have computed the same page, the second takes over the first one's: a content is named once, and who
holds a page holds all before it (naming as in vLLM).
"""

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from cache_manager.matching import Awaited, Frontiers, last_in_common
from cache_manager.page_names import Name, PageChain
from cache_manager.pool import PagePool
from cache_manager.prefix import NONE
from cache_manager.tables import PageTables

Ints = NDArray[np.int32]

CLOSED = 2**30  # in `named`: nothing more of this row is published


class PublishedNames:
    """Of the rows of these tables. anchor: a group without a window, None where all have one.

    named: [rows] pages of each row that are published. chains: [rows] names of each row's pages; None where nothing of
    it is published. frontiers: the page that each row computes next.
    """

    def __init__(self, layout: KVLayout, tables: PageTables, pool: PagePool, rows: int, anchor: int | None) -> None:
        self.layout, self.tables, self.pool = layout, tables, pool
        self.allocator, self.prefix = pool.allocator, pool.prefix
        self.named = np.full(rows, CLOSED, np.int32)
        self.chains: list[PageChain | None] = [None] * rows
        self.frontiers = Frontiers()
        self._anchor = anchor
        self._windowed = any(window is not None for window in layout.windows)

    # Rows that come and go

    def open(self, row: int, chain: PageChain | None, published: int) -> None:
        """So many pages of the row's table are published already."""
        self.chains[row] = chain
        self.named[row] = CLOSED if chain is None else published
        self._set_frontier(row, published)

    def fork(self, parent: int, child: int) -> PageChain | None:
        """Returns the chain that the child goes on with."""
        chain = self.chains[parent]
        self.chains[child] = None if chain is None else chain.copy()
        self.named[child] = self.named[parent]
        return self.chains[child]

    def leave(self, row: int) -> None:
        """Before the row's pages are let go."""
        if self.chains[row] is not None and len(nodes := self._nodes_of(row)):
            self.prefix.policy.released(nodes)
        self._close(row, int(self.named[row]))
        self.chains[row] = None

    # Pages to come

    def awaited(self, chain: PageChain, index: int, most: int) -> Awaited | None:
        """Where a row is computing the page of this index: the last one, below `most`, that they have in common."""
        row = self.frontiers.row_of.get(chain.names[index]) if index < most else None
        other = None if row is None else self.chains[row]
        if row is None or other is None:
            return None
        last = last_in_common(chain, other, index, most)
        while last >= index and self.prefix.index.complete(chain.names[last]):
            last -= 1  # here already, though what comes before it is not
        if last < index:
            return None
        return Awaited(row, last, chain.names[last])

    def is_computing(self, awaited: Awaited) -> bool:
        """Whether that page is still to come, from that row or from another that was quicker."""
        chain, index = self.chains[awaited.row], awaited.index
        same = chain is not None and index < len(chain.names) and chain.names[index] == awaited.name
        return same and bool(self.named[awaited.row] <= index) and not self.prefix.index.complete(awaited.name)

    # Names

    def publish(self, row: int, computed: int, after_step: int | None) -> None:
        """Names the row's full pages below position `computed`, whose KV is computed; its chain must reach so far.

        after_step: the last step in flight that may read what rows give up because another row published the same
        content, None without one.
        """
        chain, index = self.chains[row], self.prefix.index
        start, full = int(self.named[row]), computed // self.layout.page_size
        if chain is None or full <= start:
            return
        end = self._trusted(row, start, full)
        node = self._last_node(row, start)
        if node is None:
            self._close(row, start)
            return
        self._forget_frontier(row, start)
        while start < end:
            known = index.child(node, chain, start)
            if known is None:
                self._close(row, start)
                return
            if known == NONE:
                pages = self.tables.between(row, start, end)
                if self._anchor is None and node != NONE:
                    self.prefix.policy.withdraw(node)  # nobody may hold it; it is no end any more
                nodes = index.add(node, chain, start, pages, self.pool.now)  # one at least: its hash is not taken
                stop = start + len(nodes)
                self.prefix.policy.published(nodes, chain.names[start:stop])
                node, start = nodes[-1], stop
            elif self._take_over(row, start, known, after_step):
                node, start = known, start + 1
            else:
                end = full = start  # the rest is published with the row's next step
        self.named[row] = end
        if end < full:
            self._close(row, end)
        self._set_frontier(row, end)

    def publish_next(self, rows: Ints, full: Ints) -> list[int]:
        """As `publish`, at once for all of these distinct rows, of which so many pages are full, where one page has no
        name yet and nothing stands in the way. Returns which of them, by place, are left for `publish`.
        """
        index, left = self.prefix.index, list[int]()
        if self._windowed or self.allocator.suspects:
            return list(range(len(rows)))
        parents, named, under = index.node_of[self.tables.pages[0, rows, full - 2]], dict[Name, bytes](), list[int]()
        each = zip(rows.tolist(), full.tolist(), self.named[rows].tolist(), parents.tolist(), strict=True)
        for i, (row, pages, start, parent) in enumerate(each):
            chain = self.chains[row]
            name = chain.names[start] if chain is not None and 0 < start == pages - 1 < len(chain.names) else b""
            if chain is None or not name or name in index or name in named or parent == NONE:
                left.append(i)
                continue
            named[name] = chain.contents[start]
            under.append(parent)
            self.frontiers.forget(row, chain, start)
            self.frontiers.set(row, chain, pages)
        if left:
            rows, full = np.delete(rows, left), np.delete(full, left)
        if named:
            nodes = index.add_each(under, list(named.items()), self.tables.pages[:, rows, full - 1], self.pool.now)
            self.prefix.policy.published(nodes, list(named))
            self.named[rows] = full
        return left

    def _take_over(self, row: int, index: int, node: int, after_step: int | None) -> bool:
        """Replaces the row's pages of this index by the node's, which have the same content.

        Where the node has lost its page, the row's becomes the node's. Forks that share the row's page get the node's
        too: they may share pages that come after it, and must hold what comes before these. False, and nothing changed,
        where a step in flight of a row that left holds the row's page: that row's later pages wait for the step too.
        """
        own, pages = self.tables.between(row, index, index + 1)[:, 0], self.prefix.index.pages[:, node]
        lost = pages == NONE
        groups = np.flatnonzero((own != pages) & (own != NONE) & ~lost).tolist()
        sharing = [self.tables.rows_with(group, index, own[group]).tolist() for group in groups]
        if [len(rows) for rows in sharing] != self.allocator.counts[own[groups]].tolist():
            return False
        if lost.any():
            self.prefix.index.bind(node, np.where(lost, own, NONE))
        for group, rows in zip(groups, sharing, strict=True):
            page = self.prefix.index.pages[group : group + 1, node]
            for one in rows:
                self.pool.hold([node], page)
                before = self.tables.replace(group, one, index, page)
                self.pool.changes.grew(group, one, index, page)
                self.pool.let_go(before, after_step)
        return True

    def distrust(self, row: int) -> None:
        """What this row computed or read may be wrong: none of its pages keeps its name, nor any that came after."""
        index, chain = self.prefix.index, self.chains[row]
        nodes = set(self._nodes_of(row).tolist())
        if chain is not None and self._anchor is None:  # behind all windows it may have had others
            nodes.update(index.find(chain, min(int(self.named[row]), len(chain.names))))
        if chain is not None and self.pool.tier is not None:
            self.pool.tier.forget(chain.names)
        pages = np.concatenate((self.tables.row(row), index.pages_of(index.under(nodes))))
        self.pool.forget(list(nodes))
        for other in np.flatnonzero(self.named != CLOSED).tolist():
            forks = np.isin(self.tables.row(other), pages).any()  # they hold pages that it had, or that came after
            if other == row or forks or self._last_node(other, int(self.named[other])) is None:
                self._close(other, int(self.named[other]))

    def reset(self) -> int:
        """All that is published. Returns how many pages that were. Running rows publish no more of theirs."""
        for row in np.flatnonzero(self.named != CLOSED).tolist():
            self._close(row, int(self.named[row]))
        return self.pool.forget_all()

    # Places in the index

    def _nodes_of(self, row: int) -> NDArray[np.int32]:
        """Nodes of all published pages that the row has or had, in order."""
        index = self.prefix.index
        nodes = index.node_of[self.tables.of(self._anchor or 0, row)]
        nodes = nodes[nodes != NONE]
        if self._anchor is not None or not len(nodes):
            return nodes
        return np.array(index.path(int(nodes[-1])), np.int32)

    def _last_node(self, row: int, named: int) -> int | None:
        """The node of the last of so many pages of a row that are published; None where it was forgotten."""
        chain = self.chains[row]
        if not named:
            return NONE
        if self._anchor is None and chain is not None and self.tables.first[0, row] >= named:
            # The row has gone on from copies, all further on than the last of the nodes that these came after.
            nodes = self.prefix.index.find(chain, named)
            return nodes[-1] if len(nodes) == named else None
        node = int(self.prefix.index.node_of[self.tables.pages[self._anchor or 0, row, named - 1]])
        return None if node == NONE else node

    def _trusted(self, row: int, start: int, end: int) -> int:
        """Up to which index none of the row's pages from `start` on was set aside."""
        if not self.allocator.suspects:
            return end
        wrong = np.isin(self.tables.pages[:, row, start:end], list(self.allocator.suspects)).any(axis=0)
        return start + int(wrong.argmax()) if wrong.any() else end

    def _set_frontier(self, row: int, index: int) -> None:
        """The page of this index is the row's next; others may wait for it."""
        chain = self.chains[row]
        if chain is not None and self.named[row] != CLOSED:
            self.frontiers.set(row, chain, index)

    def _forget_frontier(self, row: int, index: int) -> bool:
        """Whether others may have waited for the row."""
        chain = self.chains[row]
        return chain is not None and self.frontiers.forget(row, chain, index)

    def _close(self, row: int, start: int) -> None:
        """The row, whose pages up to index `start` are published, publishes no more. Its forks, and other rows that
        compute the same page, go on: sequences that wait for the page wait for one of these then.
        """
        self.named[row] = CLOSED
        if self._forget_frontier(row, start):
            for other in np.flatnonzero(self.named == start).tolist():
                self._set_frontier(other, start)
