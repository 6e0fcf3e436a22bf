"""Opens, grows, forks and releases the page tables of batch rows, on pages of the one pool.

A row that leaves while a step that can touch its pages is in flight hands them to that step. So a late write of a dead
sequence never lands in a living one's page.

Full pages are published under a name once their KV has been computed, and other sequences go on from them (Kwon et al.,
PagedAttention, SOSP 2023; naming as in vLLM). Where two rows have computed the same page, the second takes over the
first one's: a content is named once, and who holds a page holds all before it. A row that writes into a page which it
shares after a fork gets a copy of that one page first.

A layer group with a window keeps what the next token sees: pages wholly before it are let go as a sequence goes on.
Those that have a name stay cached until their place is needed, and a prefix is valid up to where each such group has
all that the next token sees (as in vLLM's hybrid KV cache manager).
"""

from collections.abc import Collection, Sequence
from itertools import islice, takewhile

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, Pages
from cache_manager.cached import PolicyMaker
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.layout import MOST_TOKENS, KVLayout
from cache_manager.matching import NO_MATCH, Awaited, Frontiers, Match, firsts, last_in_common, valid_pages
from cache_manager.page_names import Name, PageChain
from cache_manager.pool import PagePool
from cache_manager.prefix import NONE, PrefixIndex
from cache_manager.tables import PageTables
from cache_manager.tier import HostTier

Ints = NDArray[np.int32]

CLOSED = 2**30  # in `named`: nothing more of this row is published


class CacheManager:
    """Pages for up to `rows` running sequences from a pool of `pages`. ahead: tokens of one of them that steps in
    flight compute at most; a group with a window gives no more slots in advance. tier: where pages go that are evicted.

    named: [rows] pages of each row that are published. owners: [rows] the attempt that each row is held for. forked:
    [rows] whether it may share pages that are still written to.
    """

    def __init__(
        self,
        layout: KVLayout,
        pages: int,
        rows: int,
        make_policy: PolicyMaker = LeastRecentlyUsed,
        ahead: int = MOST_TOKENS,
        tier: HostTier | None = None,
    ) -> None:
        self.layout, self.ahead = layout, ahead
        self._groups = range(len(layout.groups))
        self._windows = {group: window for group in self._groups if (window := layout.window(group)) is not None}
        # Who holds a page of this group holds all before it: with it, rows are followed through the index.
        self._anchor = next((group for group in self._groups if group not in self._windows), None)
        self.tables = PageTables(len(layout.groups), rows)
        index = PrefixIndex(len(layout.groups), pages, bool(self._windows))
        self.pool = PagePool(pages, index, make_policy, self._anchor, tier)
        self.allocator, self.prefix = self.pool.allocator, self.pool.prefix
        self.named = np.full(rows, CLOSED, np.int32)
        self.owners = np.full(rows, -1, np.int64)
        self.forked = np.zeros(rows, np.bool_)
        self.frontiers = Frontiers()
        self._chains: list[PageChain | None] = [None] * rows

    def slots_unused(self, scheduled: int) -> int:
        """Places for tokens in the pages of all rows that come after those scheduled, so many together."""
        return self.tables.reach * self.layout.page_size - len(self._groups) * scheduled

    # Sequences

    def match(self, chain: PageChain, most: int, brought: Collection[Name] = ()) -> Match:
        """The longest published prefix of a sequence, of at most `most` tokens; chain: names of its pages. brought: of
        those whose content, of all groups, the sequence has come with.

        A prefix that ends inside a span whose tokens see each other in both directions was computed with the same whole
        span, as its name says; where a group has a window it is none: the rest of the span sees pages that are gone.
        """
        size = self.layout.page_size
        most = min(most // size, len(chain.names))
        if not most or (self._unknown(chain.names[0]) and chain.names[0] not in brought):
            return NO_MATCH
        nodes = self.prefix.index.find(chain, most)
        kept = self.pool.tier.find(chain, len(nodes), most) if self.pool.tier is not None and self.pool.swaps else []
        here = len(nodes) + len(kept)
        come = list(takewhile(brought.__contains__, islice(chain.names, here, most))) if brought else []
        pages = here + len(come)
        if self._windows and pages:
            pages = self._valid(nodes, kept, len(come))
            nodes, kept, come = nodes[:pages], kept[: max(0, pages - len(nodes))], come[: max(0, pages - here)]
        awaited = self._awaited(chain, len(nodes), most)
        if self._windows and pages * size < chain.scope.whole:
            nodes, kept, come, pages = [], [], [], 0
        return Match(pages * size, nodes, kept, come, firsts(self.layout, pages), awaited)

    def _unknown(self, name: Name) -> bool:
        known = name in self.prefix.index or name in self.frontiers.row_of
        return not known and (self.pool.tier is None or name not in self.pool.tier.copies)

    def _valid(self, nodes: list[int], kept: list[Name], come: int) -> int:
        """As `valid_pages`, of these and so many that came with the sequence."""
        there = self.prefix.index.pages[:, nodes]
        if self.pool.tier is not None and kept:
            there = np.concatenate((there, self.pool.tier.slots_of(kept)), axis=1)
        if come:
            there = np.pad(there, ((0, 0), (0, come)))
        return valid_pages(there, self.layout)

    def _awaited(self, chain: PageChain, index: int, most: int) -> Awaited | None:
        row = self.frontiers.row_of.get(chain.names[index]) if index < most else None
        other = None if row is None else self._chains[row]
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
        chain, index = self._chains[awaited.row], awaited.index
        same = chain is not None and index < len(chain.names) and chain.names[index] == awaited.name
        return same and bool(self.named[awaited.row] <= index) and not self.prefix.index.complete(awaited.name)

    def _pages_of(self, match: Match) -> list[Pages]:
        """By group."""
        pages = self.prefix.index.pages
        return [pages[g, match.nodes[match.firsts[g] :] if match.firsts else match.nodes] for g in self._groups]

    def needed(self, match: Match, tokens: int) -> int:
        """Pages that a sequence of so many tokens which goes on from `match` takes out of `free` at most."""
        whole, need = -(-tokens // self.layout.page_size), 0
        for group, pages in zip(self._groups, self._pages_of(match), strict=True):
            first = match.firsts[group] if match.firsts else 0
            more = whole - first - int(np.count_nonzero(self.allocator.counts[pages]))
            if group in self._windows:  # pages that others hold too do not come back when they leave the window
                more = min(more, self.layout.pages_within(self._windows[group], self.ahead))
            need += more
        return need

    def promised(self, rows: Ints, tokens: Ints) -> int:
        """Pages that groups with windows will take on for these rows, until so many tokens of each are computed, beyond
        those that they hold.
        """
        promised, tables, whole = 0, self.tables, -(-tokens // self.layout.page_size)
        for group, window in self._windows.items():
            first, held = tables.first[group, rows], tables.held[group, rows]
            most = np.minimum(whole - first, min(self.layout.pages_within(window, self.ahead), MOST_TOKENS))
            promised += int(np.maximum(most - (held - first), 0).sum())
        return promised

    def open(self, row: int, owner: int = -1, chain: PageChain | None = None, match: Match = NO_MATCH) -> None:
        """Starts a table with the pages of a match of this moment; its copies stay where they are until the next plan,
        for `fetch`. owner: the attempt, for the ledger. chain: None
        publishes nothing. Raises LedgerError where the row still holds pages.
        """
        if self.tables.held[:, row].any():
            raise LedgerError(f"row {row} is opened while it holds {len(self.tables.row(row))} pages")
        self.owners[row], self._chains[row], self.forked[row] = owner, chain, False
        self.named[row] = CLOSED if chain is None else len(match.nodes)
        if match.tokens:
            pages = self._pages_of(match)
            together = np.concatenate(pages)
            self.pool.hold(match.nodes, together)
            for group, first in enumerate(match.firsts or [0] * len(pages)):
                self.tables.start(group, row, first, pages[group])
                self.pool.changes.grew(group, row, first, pages[group])
        if self.pool.tier is not None:
            self.pool.tier.reserve(match.kept)
        self._set_frontier(row, len(match.nodes))

    def covers(self, rows: Ints, ends: Ints) -> NDArray[np.bool_]:
        """For each row, whether it can write positions below its end, from its last page on, without `grow`."""
        held = self.tables.held[0, rows] if len(self._groups) == 1 else self.tables.held[:, rows].min(axis=0)
        return (held * self.layout.page_size >= ends) & ~self.forked[rows]

    def grow(self, row: int, start: int, end: int) -> bool:
        """Gives the row slots of its own for positions start .. end - 1, in groups with windows for `ahead` of these.
        False, and nothing changed, where pages are lacking.
        """
        size, tables = self.layout.page_size, self.tables
        soon = min(end, start + self.ahead)
        missing = [
            max(0, -(-(soon if group in self._windows else end) // size) - int(tables.held[group, row]))
            for group in self._groups
        ]
        shared = self._shared_from(row, start // size) if self.forked[row] else []
        taken = self.pool.take(sum(missing) + len(shared))
        if taken is None:
            return False
        for group, n in enumerate(missing):
            pages, taken = taken[:n], taken[n:]
            if n:
                self.pool.changes.grew(group, row, int(tables.held[group, row]), pages)
                tables.append(group, row, pages)
        for i, (group, index) in enumerate(shared):
            self._unshare(group, row, index, taken[i : i + 1], start > index * size)
        self.forked[row] = False
        return True

    def fetch(self, row: int, match: Match) -> None:
        """Has the copies that the host tier keeps of a match put into the row's pages, which `grow` has given it."""
        if self.pool.tier is None or not match.kept:
            return
        start = len(match.nodes)
        pages = self._pages_between(row, start, start + len(match.kept))
        self.pool.changes.swap_in(self.pool.tier.fetch(match.kept, pages, self.pool.step))

    def to_fill(self, row: int, match: Match) -> Pages:
        """[groups, n] pages of the row, which `grow` has given it, for what is `brought` of a match; NONE for those
        that are not needed.
        """
        start = len(match.nodes) + len(match.kept)
        return self._pages_between(row, start, start + len(match.brought))

    def arrived(self, step: int, lost: Sequence[int]) -> list[int]:
        """The step has run. lost: pages whose copies were not what had been put there; these copies are dropped.
        Returns the rows that were to go on from them: whatever these have computed since is void.
        """
        if self.pool.tier is None:
            return []
        self.pool.tier.arrived(step, lost)
        rows = np.flatnonzero(self.tables.held.any(axis=0)).tolist() if lost else []
        return [row for row in rows if np.isin(self.tables.row(row), list(lost)).any()]

    def lack_a_page(self, rows: Ints, ends: Ints) -> bool:
        """Whether one more page in every group is what each of these rows needs to write below its end."""
        due = -(-ends // self.layout.page_size) - 1
        other = np.count_nonzero(self.tables.held[:, rows] != due)
        return not other and not np.count_nonzero(self.forked[rows])

    def grow_by_page(self, rows: Ints) -> bool:
        """One more page in every group for each of these distinct rows, for which `lack_a_page` holds. False, and
        nothing changed, where pages are lacking.
        """
        taken = self.pool.take(len(rows) * len(self._groups))
        if taken is None:
            return False
        pages = taken.reshape(len(self._groups), len(rows))
        self.pool.changes.grew_each(rows, self.tables.held[0, rows], pages)
        self.tables.append_each(rows, pages)
        return True

    def fork(self, parent: int, child: int, owner: int = -1) -> PageChain | None:
        """The child row, which is empty, shares all of the parent's pages. Returns the chain that it goes on with.
        Raises LedgerError for a row in use.
        """
        chain = self._chains[parent]
        named = self.named[parent]
        self.open(child, owner)
        self.allocator.hold(self.tables.row(parent))
        for group in self._groups:
            first, pages = int(self.tables.first[group, parent]), self.tables.of(group, parent).copy()
            self.tables.start(group, child, first, pages)
            self.pool.changes.grew(group, child, first, pages)
        self._chains[child] = None if chain is None else chain.copy()
        self.named[child] = named
        self.forked[parent] = self.forked[child] = True
        return self._chains[child]

    def slide(self, rows: Ints, computed: Ints) -> None:
        """Lets go of pages that no position from `computed` on of these rows sees. All steps that compute earlier ones
        have retired, and what they filled is published.
        """
        size, tables = self.layout.page_size, self.tables
        for group, window in self._windows.items():
            # A row goes on from the last page that it has published.
            firsts = np.minimum(np.maximum(computed - window + 1, 0) // size, np.maximum(self.named[rows] - 1, 0))
            for i in np.flatnonzero(firsts > tables.first[group, rows]).tolist():
                gone = tables.cut(group, int(rows[i]), int(firsts[i]))
                self.pool.drop_slid(gone)

    def publish(self, row: int, computed: int, after_step: int | None) -> None:
        """Names the row's full pages below position `computed`, whose KV is computed; its chain must reach so far.

        after_step: as in `release`, for pages that the row gives up because another row published the same content.
        """
        chain, index = self._chains[row], self.prefix.index
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
                stop = index.unnamed_until(chain, start, end)
                pages = self._pages_between(row, start, stop)
                if self._anchor is None and node != NONE:
                    self.prefix.policy.withdraw(node)  # nobody may hold it; it is no end any more
                nodes = index.add(node, chain, start, pages, self.pool.now)
                self.prefix.policy.published(nodes, chain.names[start:stop])
                node, start = nodes[-1], stop
            elif self._take_over(row, start, known, after_step):
                node, start = known, start + 1
            else:
                self._close(row, start)
                return
        self.named[row] = end
        if end < full:
            self._close(row, end)
        self._set_frontier(row, end)

    def publish_next(self, rows: Ints, full: Ints) -> list[int]:
        """As `publish`, at once for all of these distinct rows, of which so many pages are full, where one page has no
        name yet and nothing stands in the way. Returns which of them, by place, are left for `publish`.
        """
        index, left = self.prefix.index, list[int]()
        if self._windows or self.allocator.suspects:
            return list(range(len(rows)))
        parents, named, under = index.node_of[self.tables.pages[0, rows, full - 2]], dict[Name, bytes](), list[int]()
        each = zip(rows.tolist(), full.tolist(), self.named[rows].tolist(), parents.tolist(), strict=True)
        for i, (row, pages, start, parent) in enumerate(each):
            chain = self._chains[row]
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

    def release(self, row: int, after_step: int | None) -> None:
        """Empties the row's table. Its pages are let go at once (None), or when `after_step` has retired."""
        if self._chains[row] is not None and len(nodes := self._nodes_of(row)):
            self.prefix.policy.released(nodes)
        self._close(row, int(self.named[row]))
        pages = self.tables.row(row)
        self.pool.let_go(pages, after_step)
        self.tables.clear(row)
        waiting = self.pool.changes.waiting(pages)
        if len(waiting):  # nothing is copied to what is in no table any more
            rows = np.flatnonzero(self.tables.held.any(axis=0)).tolist()
            tables = np.concatenate([pages[:0], *map(self.tables.row, rows)])
            self.pool.changes.not_copied(np.setdiff1d(waiting, tables))
        self.pool.changes.left(row)
        self._chains[row] = None

    def distrust(self, row: int) -> None:
        """What this row computed or read may be wrong: none of its pages keeps its name, nor any that came after."""
        index, chain = self.prefix.index, self._chains[row]
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

    def _nodes_of(self, row: int) -> NDArray[np.int32]:
        """Nodes of all published pages that the row has or had, in order."""
        index = self.prefix.index
        nodes = index.node_of[self.tables.of(self._anchor or 0, row)]
        nodes = nodes[nodes != NONE]
        if self._anchor is not None or not len(nodes):
            return nodes
        return np.array(index.path(int(nodes[-1])), np.int32)

    def _pages_between(self, row: int, start: int, end: int) -> Pages:
        """[groups, n] pages of these indices, NONE where the row has none since they are behind the group's window."""
        pages = self.tables.pages[:, row, start:end].copy()
        for group in self._windows:
            pages[group, : max(0, int(self.tables.first[group, row]) - start)] = NONE
        return pages

    def _last_node(self, row: int, named: int) -> int | None:
        """The node of the last of so many pages of a row that are published; None where it was forgotten."""
        chain = self._chains[row]
        if not named:
            return NONE
        if self._anchor is None and chain is not None and self.tables.first[0, row] >= named:
            # The row has gone on from copies, all further on than the last of the nodes that these came after.
            nodes = self.prefix.index.find(chain, named)
            return nodes[-1] if len(nodes) == named else None
        node = int(self.prefix.index.node_of[self.tables.pages[self._anchor or 0, row, named - 1]])
        return None if node == NONE else node

    def reset(self) -> int:
        """Forgets all that is published, and all copies in the host tier. Returns how many pages were published.
        Running rows keep theirs and publish no more of them.
        """
        for row in np.flatnonzero(self.named != CLOSED).tolist():
            self._close(row, int(self.named[row]))
        return self.pool.forget_all()

    # Places in the index

    def _trusted(self, row: int, start: int, end: int) -> int:
        """Up to which index none of the row's pages from `start` on was set aside."""
        if not self.allocator.suspects:
            return end
        wrong = np.isin(self.tables.pages[:, row, start:end], list(self.allocator.suspects)).any(axis=0)
        return start + int(wrong.argmax()) if wrong.any() else end

    def _set_frontier(self, row: int, index: int) -> None:
        """The page of this index is the row's next; others may wait for it."""
        chain = self._chains[row]
        if chain is not None and self.named[row] != CLOSED:
            self.frontiers.set(row, chain, index)

    def _forget_frontier(self, row: int, index: int) -> None:
        chain = self._chains[row]
        if chain is not None:
            self.frontiers.forget(row, chain, index)

    def _close(self, row: int, start: int) -> None:
        """The row, whose pages up to index `start` are published, publishes no more."""
        self._forget_frontier(row, start)
        self.named[row] = CLOSED

    def _shared_from(self, row: int, index: int) -> list[tuple[int, int]]:
        """Groups and indices, from `index` on, of pages that other rows hold too."""
        tables, holders = self.tables, self.pool.holders
        return [
            (group, i)
            for group in self._groups
            for i in range(index, int(tables.held[group, row]))
            if holders(int(tables.pages[group, row, i])) > 1
        ]

    def _unshare(self, group: int, row: int, index: int, page: Pages, written: bool) -> None:
        """Puts a page [1] of its own in the row's table, and has it filled from the one before if that had been
        written to; which then waits for the step that copies.
        """
        before = self.tables.replace(group, row, index, page)
        self.pool.changes.grew(group, row, index, page)
        if written:
            self.pool.copy(before, page)
        else:
            self.pool.drop(before)

    def _take_over(self, row: int, index: int, node: int, after_step: int | None) -> bool:
        """Replaces the row's pages of this index by the node's, which have the same content; where the node has lost
        its page, the row's becomes the node's. Not where a fork shares the row's: it would hold pages that come after
        the node's without holding these.
        """
        own, pages = self._pages_between(row, index, index + 1)[:, 0], self.prefix.index.pages[:, node]
        lost = pages == NONE
        groups = np.flatnonzero((own != pages) & (own != NONE) & ~lost)
        if (self.allocator.counts[own[groups]] > 1).any():
            return False
        if lost.any():
            self.prefix.index.bind(node, np.where(lost, own, NONE))
        if len(groups):
            pages = self.prefix.index.pages[groups, node]
            self.pool.hold([node], pages)
            for i, group in enumerate(groups.tolist()):
                self.tables.replace(group, row, index, pages[i : i + 1])
                self.pool.changes.grew(group, row, index, pages[i : i + 1])
            self.pool.let_go(own[groups], after_step)
        return True
