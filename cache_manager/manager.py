"""Opens, grows, forks and releases the page tables of batch rows, on pages of the one pool.

A row that leaves while a step that can touch its pages is in flight hands them to that step. So a late write of an
ended sequence never lands in a page of a running one.

Full pages are published under their block hash once their KV is computed, and other sequences continue from them (Kwon
et al., PagedAttention, SOSP 2023); see `cache_manager.publishing`. A row that writes into a page which it shares after
a fork gets a copy of that one page first.

A layer group with a window keeps the pages that the next token sees, and drops earlier ones as the sequence grows.
Published ones stay cached until the pool needs them, as in vLLM's hybrid KV cache manager. `cache_manager.lookup` finds
the prefixes that are at hand.

A state of recurrent layers is written in place until the tokens of its entry are computed. Then it is a checkpoint,
which nothing writes any more: the next token reads it, and writes the state of the next entry.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cache_manager.allocator import LedgerError, Pages
from cache_manager.block_hash import HashChain
from cache_manager.cached import PolicyMaker
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.layout import MOST_TOKENS, STATE_WINDOW, KVLayout
from cache_manager.lookup import PrefixLookup
from cache_manager.matching import NO_MATCH, Match
from cache_manager.pool import PagePool
from cache_manager.prefix import PrefixIndex
from cache_manager.publishing import CLOSED, PublishedPages
from cache_manager.tables import PageTables
from cache_manager.tier import HostTier

Ints = NDArray[np.int32]


class CacheManager:
    """Page tables of up to `rows` running sequences over one pool: the scheduler's interface to the KV cache.

    Invariant: a row has slots of its own, in every group, for each position that a step in flight may write. A page is
    reused only after each step that can touch it has retired.

    Writes `owners` and `forked`, and alone calls the writing methods of `tables`, but for `PublishedPages`, which
    replaces duplicate pages. The other arrays belong to `pool`, `published` and the prefix index.

    Args:
        layout: Shape of the KV cache.
        pages: Pages of the pool.
        rows: Rows of the batch.
        make_policy: Makes the eviction policy.
        ahead: The most tokens of one sequence that steps in flight compute, and a windowed group has slots for.
        tier: Home of copies of evicted pages; None without one.

    Attributes:
        tables: Page table of each row and group.
        pool: The pages, and the changes that the next plan carries.
        allocator: Holder counts; the pool's.
        prefix: Prefix cache; the pool's.
        published: Publication state of each row.
        lookup: Finds prefixes of prompts.
        owners: [rows] int64. Attempt that each row is held for.
        forked: [rows] bool. Whether the row may share pages that are still written to.
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
        self._groups = range(layout.tables)
        self._kv, self._states = range(len(layout.groups)), layout.state_tables
        self._windows = {group: window for group in self._kv if (window := layout.window(group)) is not None}
        self._sizes = np.array([layout.entry_tokens(table) for table in self._groups], np.int32)[:, None]
        self._span = max(1, layout.interval // layout.page_size)
        # A holder of a page of this group holds all pages before it, so a row's pages lead through the index.
        anchor = next((group for group in self._kv if group not in self._windows), None)
        self.tables = PageTables(layout.tables, rows, layout.states.pages, self._span)
        index = PrefixIndex(layout.tables, pages, bool(layout.windows))
        self.pool = PagePool(pages, index, make_policy, anchor, tier)
        self.allocator, self.prefix = self.pool.allocator, self.pool.prefix
        self.owners = np.full(rows, -1, np.int64)
        self.forked = np.zeros(rows, np.bool_)
        self.published = PublishedPages(layout, self.tables, self.pool, rows, anchor)
        self.lookup = PrefixLookup(layout, self.pool, self.published)

    def slots_unused(self, scheduled: int) -> int:
        """Returns the slots in pages of all rows that no token takes yet.

        Args:
            scheduled: Sum of the scheduled tokens of all rows.
        """
        # `reach` counts pages that left a window too, as `scheduled` counts their tokens. States have no slots.
        reach = int(self.tables.held[self._kv].sum()) if self._states else self.tables.reach
        return reach * self.layout.page_size - len(self._kv) * scheduled

    # Sequences

    def needed(self, match: Match, tokens: int) -> int:
        """Returns how far admission of a sequence lowers `pool.free` at most.

        Cached pages of the match count, since they are free until they are held; held ones do not.

        Args:
            match: Prefix that the sequence continues from.
            tokens: Length of the sequence.
        """
        need = 0
        for group, pages in zip(self._groups, self.lookup.pages_of(match), strict=True):
            first, total = match.firsts[group] if match.firsts else 0, -(-tokens // self.layout.entry_tokens(group))
            more = total - first - int(np.count_nonzero(self.allocator.counts[pages]))
            # Pages come back as they leave the window, which caps the need. Shared ones do not, so the cap stays whole.
            if (most := self._most_within(group)) is not None:
                more = min(more, most)
            need += more
        return need

    def _most_within(self, table: int) -> int | None:
        """Returns the most entries that a row holds in a table with a window; None for one without."""
        if table in self._states:
            return self.layout.pages_within(STATE_WINDOW, self.ahead, self.layout.interval)
        return self.layout.pages_within(self._windows[table], self.ahead) if table in self._windows else None

    def pages_still_to_take(self, rows: Ints, tokens: Ints) -> int:
        """Returns the pages that rows still take in groups with windows.

        Such a group takes pages as the row advances, not all at admission.

        Args:
            rows: [n] int32 batch rows.
            tokens: [n] int32. Length of each that is computed in the end.
        """
        pages = sum(self._still_to_take(group, rows, tokens) for group in self._windows)
        if self._states:  # all alike
            pages += len(self._states) * self._still_to_take(self._states[0], rows, tokens)
        return pages

    def _still_to_take(self, table: int, rows: Ints, tokens: Ints) -> int:
        """Returns what `pages_still_to_take` does, of one table with a window."""
        first, held = self.tables.first[table, rows], self.tables.held[table, rows]
        total = -(-tokens // self.layout.entry_tokens(table))
        most = np.minimum(total - first, min(self._most_within(table) or MOST_TOKENS, MOST_TOKENS))
        return int(np.maximum(most - (held - first), 0).sum())

    def open(self, row: int, owner: int = -1, chain: HashChain | None = None, match: Match = NO_MATCH) -> None:
        """Starts a row's page table with the pages of a match.

        Copies in the host tier are reserved until the next plan, so that `fetch` finds them.

        Args:
            row: Row to open.
            owner: Attempt that holds the row, for the ledger.
            chain: Hashes of its pages; None publishes nothing.
            match: A match that is still valid; see `PrefixLookup.match`.

        Raises:
            LedgerError: The row holds pages.
        """
        if self.tables.held[:, row].any():
            raise LedgerError(f"row {row} is opened while it holds {len(self.tables.row(row))} pages")
        self.owners[row], self.forked[row] = owner, False
        if match.tokens:
            pages = self.lookup.pages_of(match)
            together = np.concatenate(pages)
            self.pool.hold(match.nodes, together)
            for group, first in enumerate(match.firsts or [0] * len(pages)):
                self.tables.start(group, row, first, pages[group])
                self.pool.changes.grew(group, row, first, pages[group])
        if self.pool.tier is not None:
            self.pool.tier.reserve(match.kept)
        self.published.open(row, chain, len(match.nodes))

    def covers(self, rows: Ints, ends: Ints) -> NDArray[np.bool_]:
        """Returns [n] whether each row can write from its last page on, below its end, without `grow`.

        Args:
            rows: [n] int32 batch rows.
            ends: [n] int32. Position after the last one that the row writes.
        """
        # A forked row may share the page that it writes next, which `grow` copies.
        if len(self._groups) == 1:
            return (self.tables.held[0, rows] * self.layout.page_size >= ends) & ~self.forked[rows]
        return ((self.tables.held[:, rows] * self._sizes).min(axis=0) >= ends) & ~self.forked[rows]

    def grow(self, row: int, start: int, end: int) -> bool:
        """Gives a row slots of its own for positions start .. end - 1; in groups with windows, for the first `ahead`.

        Returns:
            Whether there were enough pages; where not, nothing has changed.
        """
        size, tables = self.layout.page_size, self.tables
        soon = min(end, start + self.ahead)
        missing = [
            max(0, -(-(soon if group in self._windows else end) // size) - int(tables.held[group, row]))
            for group in self._kv
        ]
        if self._states:  # all alike
            entries = max(0, -(-soon // self.layout.interval) - int(tables.held[self._states[0], row]))
            missing += [entries] * len(self._states)
        shared = self._shared_from(row, start) if self.forked[row] else []
        # All pages are taken before anything is written, so a lack of pages changes nothing.
        taken = self.pool.take(sum(missing) + len(shared))
        if taken is None:
            return False
        for group, n in enumerate(missing):
            pages, taken = taken[:n], taken[n:]
            if n:
                self.pool.changes.grew(group, row, int(tables.held[group, row]), pages)
                tables.append(group, row, pages)
        for i, (group, index) in enumerate(shared):
            # Only the page of `start` can hold earlier tokens, which the copy must have.
            self._unshare(group, row, index, taken[i : i + 1], start > index * self.layout.entry_tokens(group))
        self.forked[row] = False
        return True

    def fetch(self, row: int, match: Match) -> None:
        """Plans swap-ins of a match's copies in the host tier into the row's pages. Call after `grow`."""
        if self.pool.tier is None or not match.kept:
            return
        start = len(match.nodes)
        pages = self.tables.between(row, start, start + len(match.kept))
        self.pool.changes.swap_in(self.pool.tier.fetch(match.kept, pages, self.pool.step))

    def transfer_targets(self, row: int, match: Match) -> Pages:
        """Returns the pages that receive the transferred pages of a match. Call after `grow`.

        Returns:
            [tables, n] int32. NONE where a page is before the group's window, or a state is an earlier one.
        """
        start = len(match.nodes) + len(match.kept)
        return self.tables.between(row, start, start + len(match.transferred))

    def arrived(self, step: int, lost: Sequence[int]) -> list[int]:
        """Takes in what came of a step's page moves.

        Args:
            step: The step that has run.
            lost: As `StepResult.lost_pages`. Host copies that were to fill such pages are dropped.

        Returns:
            Rows that hold such a page: all that they have computed since is void.
        """
        if self.pool.tier is not None:
            self.pool.tier.arrived(step, lost)
        rows = np.flatnonzero(self.tables.held.any(axis=0)).tolist() if lost else []
        return [row for row in rows if np.isin(self.tables.row(row), list(lost)).any()]

    def lack_a_page(self, rows: Ints, ends: Ints) -> bool:
        """Whether each row needs exactly one more page in every group: the condition of `grow_by_page`.

        Args:
            rows: [n] int32 distinct rows.
            ends: [n] int32. Position after the last one that the row writes.
        """
        due = (ends - 1) // self.layout.page_size
        if self._states or np.count_nonzero(self.tables.held[:, rows] != due):  # states take pages at other times
            return False
        return not np.count_nonzero(self.forked[rows])

    def grow_by_page(self, rows: Ints) -> bool:
        """Gives each row one more page in every group: a fast path of `grow` for many decoding rows at once.

        Legal where `lack_a_page` holds: no row is forked, and all groups hold equally many pages of a row.

        Args:
            rows: [n] int32 distinct rows.

        Returns:
            Whether there were enough pages; where not, nothing has changed.
        """
        taken = self.pool.take(len(rows) * len(self._groups))
        if taken is None:
            return False
        pages = taken.reshape(len(self._groups), len(rows))
        self.pool.changes.grew_each(rows, self.tables.append_each(rows, pages), pages)
        return True

    def fork(self, parent: int, child: int, owner: int = -1) -> HashChain | None:
        """Lets an empty row share all pages of another one.

        Args:
            parent: Row to fork.
            child: Empty row.
            owner: Attempt that holds the child, for the ledger.

        Returns:
            The child's chain; None where the parent publishes nothing.

        Raises:
            LedgerError: The child holds pages.
        """
        self.open(child, owner)
        self.allocator.hold(self.tables.row(parent))
        for group in self._groups:
            first, pages = int(self.tables.first[group, parent]), self.tables.pages_of(group, parent).copy()
            self.tables.start(group, child, first, pages)
            self.pool.changes.grew(group, child, first, pages)
        self.forked[parent] = self.forked[child] = True
        return self.published.fork(parent, child)

    def slide(self, rows: Ints | NDArray[np.intp], computed: Ints) -> None:
        """Drops pages that lie wholly before the windows of rows.

        Args:
            rows: [n] int32 batch rows.
            computed: [n] int32. Each row's first position that is still to be computed. All steps that compute earlier
                ones have retired, and the pages that these filled are published.
        """
        size, tables = self.layout.page_size, self.tables
        for group, window in self._windows.items():
            # The last published page stays: the next one is published under its node, which the table leads to.
            firsts = np.minimum(
                np.maximum(computed - window + 1, 0) // size, np.maximum(self.published.count[rows] - 1, 0)
            )
            for i in np.flatnonzero(firsts > tables.first[group, rows]).tolist():
                gone = tables.cut(group, int(rows[i]), int(firsts[i]))
                self.pool.drop_slid(gone)
        if self._states:
            self._drop_checkpoints(rows, computed)

    def _drop_checkpoints(self, rows: Ints | NDArray[np.intp], computed: Ints) -> None:
        """Drops the checkpoints of rows that have gone on from them. Published ones stay cached, in the usual order."""
        firsts = np.minimum(
            np.maximum(computed - 1, 0) // self.layout.interval, self.published.count[rows] // self._span
        )
        for i in np.flatnonzero(firsts > self.tables.first[self._states[0], rows]).tolist():
            gone = [self.tables.cut(table, int(rows[i]), int(firsts[i])) for table in self._states]
            self.pool.drop(np.concatenate(gone))

    def truncate(self, row: int, length: int) -> None:
        """Drops the pages that hold none of a row's first `length` tokens.

        For tokens that were computed and do not count, such as rejected drafts. Slots beyond `length` in the remaining
        pages are written again before they are read. No step in flight may touch the row.

        Raises:
            LedgerError: A page beyond `length` is published: its block hash would stand for dropped tokens. Or the row
                has a state, which cannot lose tokens.
        """
        if self._states:
            raise LedgerError(f"row {row} has a recurrent state, which cannot lose tokens")
        keep = -(-length // self.layout.page_size)
        published = int(self.published.count[row])
        if published != CLOSED and published * self.layout.page_size > length:
            raise LedgerError(f"row {row} has published {published} pages and is to keep {length} tokens")
        for group in self._groups:
            if self.tables.held[group, row] > keep:
                self.pool.drop(self.tables.truncate(group, row, keep))

    def release(self, row: int, after_step: int | None) -> None:
        """Empties a row's page table.

        Args:
            row: Row that ends.
            after_step: Last step in flight that can touch its pages, which they wait for; None without one.
        """
        self.published.leave(row)  # first: it finds the row's nodes by its page table
        pages = self.tables.row(row)
        self.pool.let_go(pages, after_step)
        self.tables.clear(row)
        waiting = self.pool.changes.waiting(pages)
        if len(waiting):  # a copy into a page is planned: cancel it unless another row's table has the page
            rows = np.flatnonzero(self.tables.held.any(axis=0)).tolist()
            tables = np.concatenate([pages[:0], *map(self.tables.row, rows)])
            self.pool.changes.not_copied(np.setdiff1d(waiting, tables))
        self.pool.changes.row_left(row)

    def _shared_from(self, row: int, start: int) -> list[tuple[int, int]]:
        """Returns group and index of each page, from position `start` on, that other rows hold too."""
        tables, holders = self.tables, self.pool.holders
        return [
            (group, i)
            for group in self._groups
            for i in range(start // self.layout.entry_tokens(group), int(tables.held[group, row]))
            if holders(int(tables.pages[group, row, i])) > 1
        ]

    def _unshare(self, group: int, row: int, index: int, page: Pages, written: bool) -> None:
        """Replaces a shared page of a row by a page of its own.

        Args:
            group: Layer group.
            row: Batch row.
            index: Index of the page in the table.
            page: [1] the new page.
            written: Whether the shared page holds tokens of the row. It is copied then, and waits for the step that
                copies it.
        """
        before = self.tables.replace(group, row, index, page)
        self.pool.changes.grew(group, row, index, page)
        if written:
            self.pool.copy(before, page)
        else:
            self.pool.drop(before)
