"""Opens, grows, forks and releases the page tables of batch rows, on pages of the one pool.

A row that leaves while a step that can touch its pages is in flight hands them to that step. So a late write of a dead
sequence never lands in a living one's page.

Full pages are published under a name once their KV has been computed, and other sequences go on from them (Kwon et al.,
PagedAttention, SOSP 2023), see `cache_manager.publishing`. A row that writes into a page which it shares after a fork
gets a copy of that one page first.

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
from cache_manager.matching import NO_MATCH, Match, firsts, valid_pages
from cache_manager.page_names import Name, PageChain
from cache_manager.pool import PagePool
from cache_manager.prefix import PrefixIndex
from cache_manager.publishing import PublishedNames
from cache_manager.tables import PageTables
from cache_manager.tier import HostTier

Ints = NDArray[np.int32]


class CacheManager:
    """Pages for up to `rows` running sequences from a pool of `pages`. ahead: tokens of one of them that steps in
    flight compute at most; a group with a window gives no more slots in advance. tier: where pages go that are evicted.

    owners: [rows] the attempt that each row is held for. forked: [rows] whether it may share pages that are still
    written to.
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
        anchor = next((group for group in self._groups if group not in self._windows), None)
        self.tables = PageTables(len(layout.groups), rows)
        index = PrefixIndex(len(layout.groups), pages, bool(self._windows))
        self.pool = PagePool(pages, index, make_policy, anchor, tier)
        self.allocator, self.prefix = self.pool.allocator, self.pool.prefix
        self.owners = np.full(rows, -1, np.int64)
        self.forked = np.zeros(rows, np.bool_)
        self.names = PublishedNames(layout, self.tables, self.pool, rows, anchor)

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
        awaited = self.names.awaited(chain, len(nodes), most)
        if self._windows and pages * size < chain.scope.whole:
            nodes, kept, come, pages = [], [], [], 0
        return Match(pages * size, nodes, kept, come, firsts(self.layout, pages), awaited)

    def _unknown(self, name: Name) -> bool:
        known = name in self.prefix.index or name in self.names.frontiers.row_of
        return not known and (self.pool.tier is None or name not in self.pool.tier.copies)

    def _valid(self, nodes: list[int], kept: list[Name], come: int) -> int:
        """As `valid_pages`, of these and so many that came with the sequence."""
        there = self.prefix.index.pages[:, nodes]
        if self.pool.tier is not None and kept:
            there = np.concatenate((there, self.pool.tier.slots_of(kept)), axis=1)
        if come:
            there = np.pad(there, ((0, 0), (0, come)))
        return valid_pages(there, self.layout)

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
        self.owners[row], self.forked[row] = owner, False
        if match.tokens:
            pages = self._pages_of(match)
            together = np.concatenate(pages)
            self.pool.hold(match.nodes, together)
            for group, first in enumerate(match.firsts or [0] * len(pages)):
                self.tables.start(group, row, first, pages[group])
                self.pool.changes.grew(group, row, first, pages[group])
        if self.pool.tier is not None:
            self.pool.tier.reserve(match.kept)
        self.names.open(row, chain, len(match.nodes))

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
        pages = self.tables.between(row, start, start + len(match.kept))
        self.pool.changes.swap_in(self.pool.tier.fetch(match.kept, pages, self.pool.step))

    def to_fill(self, row: int, match: Match) -> Pages:
        """[groups, n] pages of the row, which `grow` has given it, for what is `brought` of a match; NONE for those
        that are not needed.
        """
        start = len(match.nodes) + len(match.kept)
        return self.tables.between(row, start, start + len(match.brought))

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
        self.open(child, owner)
        self.allocator.hold(self.tables.row(parent))
        for group in self._groups:
            first, pages = int(self.tables.first[group, parent]), self.tables.of(group, parent).copy()
            self.tables.start(group, child, first, pages)
            self.pool.changes.grew(group, child, first, pages)
        self.forked[parent] = self.forked[child] = True
        return self.names.fork(parent, child)

    def slide(self, rows: Ints, computed: Ints) -> None:
        """Lets go of pages that no position from `computed` on of these rows sees. All steps that compute earlier ones
        have retired, and what they filled is published.
        """
        size, tables = self.layout.page_size, self.tables
        for group, window in self._windows.items():
            # A row goes on from the last page that it has published.
            firsts = np.minimum(np.maximum(computed - window + 1, 0) // size, np.maximum(self.names.named[rows] - 1, 0))
            for i in np.flatnonzero(firsts > tables.first[group, rows]).tolist():
                gone = tables.cut(group, int(rows[i]), int(firsts[i]))
                self.pool.drop_slid(gone)

    def release(self, row: int, after_step: int | None) -> None:
        """Empties the row's table. Its pages are let go at once (None), or when `after_step` has retired."""
        self.names.leave(row)
        pages = self.tables.row(row)
        self.pool.let_go(pages, after_step)
        self.tables.clear(row)
        waiting = self.pool.changes.waiting(pages)
        if len(waiting):  # nothing is copied to what is in no table any more
            rows = np.flatnonzero(self.tables.held.any(axis=0)).tolist()
            tables = np.concatenate([pages[:0], *map(self.tables.row, rows)])
            self.pool.changes.not_copied(np.setdiff1d(waiting, tables))
        self.pool.changes.left(row)

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
