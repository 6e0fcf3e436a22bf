"""Publishes full, computed pages of rows under their block hashes, so that other sequences continue from them.

If two rows have computed the same page, the second one takes over the first one's. So a content is published once,
and a holder of a page holds all pages before it (as in vLLM).
"""

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, HashChain
from cache_manager.layout import KVLayout
from cache_manager.matching import Awaited, Frontiers, last_in_common
from cache_manager.pool import PagePool
from cache_manager.prefix import NONE
from cache_manager.tables import PageTables

Ints = NDArray[np.int32]

CLOSED = 2**30  # in `count`: no more pages of this row are published


class PublishedPages:
    """Publication state of the rows.

    Invariant: the first `count[row]` pages of a row are those of a path of nodes from the root of the index. Pages that
    left a window may be gone.

    Writes `count`, `chains` and `frontiers`, adds nodes to the index, and replaces duplicate pages in the tables.

    Args:
        layout: Shape of the KV cache.
        tables: Page tables of the rows.
        pool: The pages.
        rows: Rows of the batch.
        anchor: A group without a window; None where all groups have one.

    Attributes:
        count: [rows] int32. Published pages of each row, CLOSED where no more are published.
        chains: [rows] block hashes of each row's pages; None for a row that publishes nothing.
        frontiers: The page that each row computes next.
    """

    def __init__(self, layout: KVLayout, tables: PageTables, pool: PagePool, rows: int, anchor: int | None) -> None:
        self.layout, self.tables, self.pool = layout, tables, pool
        self.allocator, self.prefix = pool.allocator, pool.prefix
        self.count = np.full(rows, CLOSED, np.int32)
        self.chains: list[HashChain | None] = [None] * rows
        self.frontiers = Frontiers()
        self._anchor = anchor
        self._windowed = any(window is not None for window in layout.windows)
        self._span = max(1, layout.interval // layout.page_size)

    # Rows that come and go

    def open(self, row: int, chain: HashChain | None, published: int) -> None:
        """Starts a row.

        Args:
            row: Batch row.
            chain: Block hashes of its pages; None publishes nothing.
            published: Leading pages of its table that are published.
        """
        self.chains[row] = chain
        self.count[row] = CLOSED if chain is None else published
        self._set_frontier(row, published)

    def fork(self, parent: int, child: int) -> HashChain | None:
        """Starts a row that shares all pages of another one; returns its chain."""
        chain = self.chains[parent]
        self.chains[child] = None if chain is None else chain.copy()
        self.count[child] = self.count[parent]
        return self.chains[child]

    def leave(self, row: int) -> None:
        """Ends a row. Call before its pages are released: the policy learns which nodes the request used."""
        if self.chains[row] is not None and len(nodes := self._nodes_of(row)):
            self.prefix.policy.released(nodes)
        self._close(row, int(self.count[row]))
        self.chains[row] = None

    # Pages to come

    def awaited(self, chain: HashChain, index: int, most: int) -> Awaited | None:
        """Finds the row that is computing a page of a chain.

        Args:
            chain: Block hashes of the sequence that would wait.
            index: Index of the first page that it lacks.
            most: Pages that it can use.

        Returns:
            The row, and the last missing page that it has in common with the chain. None without such a row.
        """
        row = self.frontiers.row_of.get(chain.hashes[index]) if index < most else None
        other = None if row is None else self.chains[row]
        if row is None or other is None:
            return None
        last = last_in_common(chain, other, index, most)
        last = (last + 1) // self._span * self._span - 1  # with states, a sequence goes on from a checkpoint
        while last >= index and self.prefix.index.complete(chain.hashes[last]):
            last -= self._span  # published already, though pages before it are not: nothing to wait for
        if last < index:
            return None
        return Awaited(row, last, chain.hashes[last])

    def is_computing(self, awaited: Awaited) -> bool:
        """Whether that row still computes the page, and no other row has published it first."""
        chain, index = self.chains[awaited.row], awaited.index
        same = chain is not None and index < len(chain.hashes) and chain.hashes[index] == awaited.block_hash
        return same and bool(self.count[awaited.row] <= index) and not self.prefix.index.complete(awaited.block_hash)

    # Publication

    def publish(self, row: int, computed: int, after_step: int | None) -> None:
        """Publishes a row's full pages below a position.

        Args:
            row: Batch row, whose chain reaches `computed`.
            computed: Position below which the row's KV is computed.
            after_step: Last step in flight that may read pages which the row exchanges for another row's equal ones;
                None without one.
        """
        chain, index = self.chains[row], self.prefix.index
        start, full = int(self.count[row]), computed // self.layout.page_size
        if chain is None or full <= start:
            return
        end = self._trusted(row, start, full)
        node = self._last_node(row, start)
        if node is None:  # the last published page was removed from the index: no node to continue from
            self._close(row, start)
            return
        self._forget_frontier(row, start)
        while start < end:
            known = index.child(node, chain, start)
            if known is None:  # a collision: the hash belongs to another content or parent
                self._close(row, start)
                return
            if known == NONE:
                pages = self.tables.between(row, start, end)
                if self._anchor is None and node != NONE:
                    # Without an anchor the node may be unheld, so offered; with a child it is no leaf any more.
                    self.prefix.policy.withdraw(node)
                nodes = index.add(node, chain, start, pages, self.pool.now)  # at least one: the first hash is free
                stop = start + len(nodes)
                self.prefix.policy.published(nodes, chain.hashes[start:stop])
                node, start = nodes[-1], stop
            elif self._take_over(row, start, known, after_step):
                node, start = known, start + 1
            else:
                end = full = start  # the rest is published with the row's next step
        self.count[row] = end
        if end < full:  # a page that was set aside: neither it nor pages after it may be shared
            self._close(row, end)
        self._set_frontier(row, end)

    def publish_next(self, rows: NDArray[np.intp], full: Ints) -> list[int]:
        """Publishes the one new full page of each of many rows: a fast path of `publish` for decoding rows.

        Legal for a row with one new full page whose hash is not taken, on a parent that is in the index. Windows and
        pages that were set aside need the checks of `publish`.

        Args:
            rows: [n] intp distinct rows.
            full: [n] int32. Full pages of each row.

        Returns:
            Places in `rows` of those that are left for `publish`.
        """
        index, left = self.prefix.index, list[int]()
        if self._windowed or self.allocator.pages_set_aside:
            return list(range(len(rows)))
        # A step fills the pages of few rows: up to 16 of them, single items take less time than arrays.
        page_of, node_of, published = self.tables.pages.item, index.node_of.item, self.count.item
        parents, contents = list[int](), dict[BlockHash, bytes]()
        for i, (row, pages) in enumerate(zip(rows.tolist(), full.tolist(), strict=True)):
            chain, start = self.chains[row], pages - 1
            if chain is None or not 0 < start == published(row) < len(chain.hashes):
                left.append(i)
                continue
            block_hash, parent = chain.hashes[start], node_of(page_of(0, row, start - 1))
            if parent == NONE or block_hash in index or block_hash in contents:
                left.append(i)
                continue
            contents[block_hash] = chain.contents[start]
            parents.append(parent)
            self.frontiers.forget(row, chain, start)
            self.frontiers.set(row, chain, pages)
        if left:
            rows, full = np.delete(rows, left), np.delete(full, left)
        if contents:
            nodes = index.add_each(parents, contents, self.tables.pages[:, rows, full - 1], self.pool.now)
            self.prefix.policy.published(nodes, list(contents))
            self.count[rows] = full
        return left

    def _take_over(self, row: int, index: int, node: int, after_step: int | None) -> bool:
        """Replaces a row's pages of an index by a node's, which have the same content.

        If the node lacks a page, the row's becomes the node's. Forks that share the row's page get the node's too:
        they may share pages that come after it, and a holder of a page holds all pages before it.

        Args:
            row: Batch row.
            index: Index of the pages.
            node: Node with the same content.
            after_step: As in `publish`.

        Returns:
            Whether the pages were replaced. If not, nothing has changed: a step of a row that left holds the page
            and later ones, which must not be held without the node's page.
        """
        own, pages = self.tables.between(row, index, index + 1)[:, 0], self.prefix.index.pages[:, node]
        lost = pages == NONE
        groups = np.flatnonzero((own != pages) & (own != NONE) & ~lost).tolist()
        entries = [self.tables.entry_of(group, index) for group in groups]
        sharing = [
            self.tables.rows_with(group, entry, own[group]).tolist()
            for group, entry in zip(groups, entries, strict=True)
        ]
        if [len(rows) for rows in sharing] != self.allocator.counts[own[groups]].tolist():
            return False  # a holder is no row, so it is a step
        if lost.any():
            self.prefix.index.bind(node, np.where(lost, own, NONE))
        for group, entry, rows in zip(groups, entries, sharing, strict=True):
            page = self.prefix.index.pages[group : group + 1, node]
            for one in rows:
                self.pool.hold([node], page)
                before = self.tables.replace(group, one, entry, page)
                self.pool.changes.grew(group, one, entry, page)
                self.pool.let_go(before, after_step)
        return True

    def distrust(self, row: int) -> None:
        """Removes all nodes that a row has used, and all after them, since their content may be wrong.

        Rows that share such pages, or continue from such nodes, publish no more.
        """
        index, chain = self.prefix.index, self.chains[row]
        nodes = set(self._nodes_of(row).tolist())
        if chain is not None and self._anchor is None:  # pages that left all windows are in no table: find their nodes
            nodes.update(index.find(chain, min(int(self.count[row]), len(chain.hashes))))
        if chain is not None and self.pool.tier is not None:
            self.pool.tier.forget(chain.hashes)
        pages = np.concatenate((self.tables.row(row), index.pages_of(index.under(nodes))))
        self.pool.forget(list(nodes))
        for other in np.flatnonzero(self.count != CLOSED).tolist():
            forks = np.isin(self.tables.row(other), pages).any()  # holds a page of this row, or one that came after
            if other == row or forks or self._last_node(other, int(self.count[other])) is None:
                self._close(other, int(self.count[other]))

    def reset(self) -> int:
        """Removes all block hashes; returns the number of published pages. Running rows publish no more."""
        for row in np.flatnonzero(self.count != CLOSED).tolist():
            self._close(row, int(self.count[row]))
        return self.pool.forget_all()

    # Places in the index

    def _nodes_of(self, row: int) -> NDArray[np.int32]:
        """Returns the nodes of all published pages that the row has or had, in order of the tokens."""
        index = self.prefix.index
        nodes = index.node_of[self.tables.pages_of(self._anchor or 0, row)]
        nodes = nodes[nodes != NONE]
        if self._anchor is not None or not len(nodes):
            return nodes
        return np.array(index.path(int(nodes[-1])), np.int32)

    def _last_node(self, row: int, published: int) -> int | None:
        """Returns the node of a row's last published page.

        Args:
            row: Batch row.
            published: Published pages of the row.

        Returns:
            The node; NONE where no page is published, None where the node was removed from the index.
        """
        chain = self.chains[row]
        if not published:
            return NONE
        if self._anchor is None and chain is not None and self.tables.first[0, row] >= published:
            # The row has gone on from copies, all further on than the last of the nodes that these came after.
            nodes = self.prefix.index.find(chain, published)
            return nodes[-1] if len(nodes) == published else None
        node = int(self.prefix.index.node_of[self.tables.pages[self._anchor or 0, row, published - 1]])
        return None if node == NONE else node

    def _trusted(self, row: int, start: int, end: int) -> int:
        """Returns the first index, from `start` up to `end`, of a page that was set aside; `end` without one."""
        if not self.allocator.pages_set_aside:
            return end
        wrong = np.isin(self.tables.between(row, start, end), list(self.allocator.pages_set_aside)).any(axis=0)
        return start + int(wrong.argmax()) if wrong.any() else end

    def _set_frontier(self, row: int, index: int) -> None:
        """Enters the page of this index as the row's next, so that other sequences may wait for it."""
        chain = self.chains[row]
        if chain is not None and self.count[row] != CLOSED:
            self.frontiers.set(row, chain, index)

    def _forget_frontier(self, row: int, index: int) -> bool:
        """Removes the row's frontier; returns whether other sequences may have waited for it."""
        chain = self.chains[row]
        return chain is not None and self.frontiers.forget(row, chain, index)

    def _close(self, row: int, start: int) -> None:
        """Stops publication of a row.

        Args:
            row: Batch row.
            start: Published pages of the row.
        """
        self.count[row] = CLOSED
        # Another row at the same place, a fork or one with the same prompt, takes over the frontier: sequences that
        # wait for the page wait for that row then.
        if self._forget_frontier(row, start):
            for other in np.flatnonzero(self.count == start).tolist():
                self._set_frontier(other, start)
