"""Sequences that come, grow, fork and leave, in the cache manager and in a plain model of it.

Each method does one thing to both and checks what was answered. A break of a law is an AssertionError, or a LedgerError
where the ledger sees it first. The model decides nothing by the manager's books: it counts holders itself, and knows by
the device's slots what every page is good for.
"""

from collections.abc import Sequence

import numpy as np

from cache_manager.block_hash import BlockHasher, Scope
from cache_manager.cached import PolicyMaker
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from tests.cache_manager.device import Device, Prefixes, Table
from tests.cache_manager.finding import Finding
from tests.cache_manager.histories import SequenceHistory, tables
from tests.cache_manager.windows import Windows, full

SECRET = b"a secret of tests"


def table(manager: CacheManager, row: int) -> list[list[int]]:
    """The row's pages by group."""
    return [table.pages for table in tables(manager, row)]


def make_layout(page_size: int, groups: int = 1, windows: Sequence[int | None] = ()) -> KVLayout:
    """Makes the layout of a model with two layers a group; the sizes of tensors do not matter here."""
    numbers = tuple((2 * g, 2 * g + 1) for g in range(groups))
    return KVLayout.uniform(
        numbers, kv_heads=1, head_dim=8, element_bytes=2, page_size=page_size, windows=tuple(windows)
    )


def make_manager(
    page_size: int, pages: int, rows: int, groups: int = 1, make_policy: PolicyMaker = LeastRecentlyUsed
) -> CacheManager:
    return CacheManager(make_layout(page_size, groups), pages, rows, make_policy)


def make_windowed(
    page_size: int, pages: int, rows: int, windows: Windows, make_policy: PolicyMaker = LeastRecentlyUsed
) -> CacheManager:
    by_group = windows.by_group if windows.any else ()
    return CacheManager(make_layout(page_size, windows.groups, by_group), pages, rows, make_policy, windows.ahead)


class Sequences(Finding):
    def __init__(
        self,
        page_size: int,
        pages: int,
        rows: int,
        groups: int = 1,
        hasher: BlockHasher | None = None,
        prefixes: Prefixes | None = None,
        collisions: bool = False,
        make_policy: PolicyMaker = LeastRecentlyUsed,
        windows: Windows | None = None,
    ) -> None:
        windows = windows or full(groups)
        super().__init__(make_windowed(page_size, pages, rows, windows, make_policy), page_size, windows, rows)
        self.groups, self.collisions, self.awaited = windows.groups, collisions, set()
        self.hasher = hasher or BlockHasher(SECRET, b"model", page_size)
        self.prefixes = prefixes or Prefixes()
        self.device = Device(windows.by_group, pages, page_size, rows)
        self.queue: list[SequenceHistory] = []
        self.leaves: list[int] = []
        self.steps, self.retired, self.attempts, self.serials = 0, -1, 0, 0
        self.manager.pool.begin(0.0, 0)

    def after(self, story: SequenceHistory) -> int | None:
        return story.last_step if story.last_step > self.retired else None

    def copied(self, row: int) -> bool:
        """Whether a page of this row waits for the copy that the next plan tells of."""
        return not self.targets.keys().isdisjoint(self.story(row).pages)

    def need(self, row: int) -> int:
        """Tokens to compute, as far as they may be in flight."""
        story = self.story(row)
        return min(story.need, self.windows.ahead - (story.scheduled - story.computed))

    def _enter(self, row: int, story: SequenceHistory, table: list[Table]) -> None:
        self.serials += 1
        story.serial, story.last_step, story.table = self.serials, -1, table
        self.rows[row] = story
        now = tables(self.manager, row)
        assert now == table, f"row {row} holds {now}, must hold {table}"

    # Sequences come and go

    def submit(self, tokens: Sequence[int], scope: Scope, goal: int, named: bool = True) -> SequenceHistory:
        """A sequence in the queue. named: with the prefix cache."""
        self.attempts += 1
        chain = self.hasher.chain(scope) if named else None
        story = SequenceHistory(self.attempts, list(tokens), scope, goal, chain, known=len(tokens))
        self.prefixes.extend(story.numbers, story.tokens, scope, self.size)
        self.queue.append(story)
        return story

    def admit(self, story: SequenceHistory, wait: bool = True, everything: bool = True) -> bool:
        """Starts a queued sequence, if there is room. wait: not where another one computes its next page at the moment.
        everything: with pages for all of it, otherwise with what it has matched.
        """
        if None not in self.rows:
            return False
        match = self.match(story)
        if match.awaited is not None and wait:
            return False
        if self.needed(match, story) > self.manager.pool.free:
            return False
        held = self.tables_of(match)
        row = self.rows.index(None)
        self.manager.open(row, story.attempt, story.chain, match)
        self.queue.remove(story)
        story.scheduled = story.computed = match.tokens
        story.published = match.tokens // self.size
        story.silent, story.unsure, story.forked, story.past = story.chain is None, False, False, set()
        self._enter(row, story, held)
        self._come_to_next(story)
        self._hold(story.pages)
        if everything:
            assert self.grow(row, story.known), "pages that are needed were free and not given"
        self._balance()
        return True

    def grow(self, row: int, end: int) -> bool:
        story = self.story(row)
        soon = min(end, story.scheduled + self.windows.ahead)
        ends = [end if window is None else soon for window in self.windows.by_group]
        pairs = list(zip(story.table, ends, strict=True))
        missing = [max(0, -(-end // self.size) - table.end) for table, end in pairs]
        shared = [self._shared(story, table) for table in story.table]
        enough = sum(missing) + sum(map(len, shared)) <= self.manager.pool.free
        with self._evicting():
            grown = self.manager.grow(row, story.scheduled, end)
        assert grown == enough, f"grow said {grown} where {self.manager.pool.free} pages can be had"
        now = tables(self.manager, row)
        if not grown:
            assert now == story.table, "a grow that failed changed a table"
            self._balance()
            return False
        for before, after, more, indices in zip(story.table, now, missing, shared, strict=True):
            self._has_grown(story, before, after, more, indices)
        story.table, story.forked = now, False
        self._balance()
        return True

    def _shared(self, story: SequenceHistory, table: Table) -> list[int]:
        """Indices, from where the row writes on, of pages that others hold too."""
        return [
            index
            for index in range(story.scheduled // self.size, table.end if story.forked else 0)
            if self.counts[page := table.pages[index - table.first]] - self.sources.get(page, 0) > 1
        ]

    def _has_grown(self, story: SequenceHistory, before: Table, after: Table, more: int, shared: list[int]) -> None:
        assert (after.first, after.end) == (before.first, before.end + more)
        pairs = list(enumerate(zip(before.pages, after.pages, strict=False), before.first))
        changed = [index for index, (old, new) in pairs if old != new]
        assert changed == shared, f"a row shares {shared} of {before}, and after growing has {after}"
        for index, (old, new) in pairs:
            if index in shared:
                self._give_up(old, new, story.scheduled > index * self.size)
        self._fresh([new for index, (_, new) in pairs if index in shared] + after.pages[len(before.pages) :])

    def _give_up(self, page: int, own: int, written: bool) -> None:
        """A row has a page of its own instead of this one, and a copy if it had been written to."""
        if written:
            self.targets[own] = self.targets.get(page, page)
            self.sources[page] = self.sources.get(page, 0) + 1
            self.waiting.append((self.steps, [page]))
        else:
            self._drop([page])

    def lack_a_page(self, rows: list[int], ends: list[int]) -> bool:
        answer = self.manager.lack_a_page(np.array(rows, np.int32), np.array(ends, np.int32))
        due = all(
            table.end == -(-end // self.size) - 1 and not self.story(row).forked
            for row, end in zip(rows, ends, strict=True)
            for table in self.story(row).table
        )
        assert answer == due, f"lack_a_page said {answer} of rows {rows} that go up to {ends}"
        return answer

    def grow_by_page(self, rows: list[int]) -> bool:
        enough = len(rows) * self.groups <= self.manager.pool.free
        with self._evicting():
            grown = self.manager.grow_by_page(np.array(rows, np.int32))
        assert grown == enough, f"grow_by_page said {grown}"
        for row in rows:
            story, now = self.story(row), tables(self.manager, row)
            if grown:
                for before, after in zip(story.table, now, strict=True):
                    assert (after.first, after.pages[:-1]) == (before.first, before.pages)
                self._fresh([table.pages[-1] for table in now])
                story.table = now
            else:
                assert now == story.table, "a grow that failed changed a table"
        self._balance()
        return grown

    def fork(self, parent: int, draws: int) -> bool:
        """A twin of a running sequence, whose token in flight, if there is one, is another one."""
        if None not in self.rows:
            return False
        of, row = self.story(parent), self.rows.index(None)
        kept = max(of.scheduled, of.known)
        self.attempts += 1
        tokens = of.tokens[:kept] + [draws] * (len(of.tokens) - kept)
        story = SequenceHistory(self.attempts, tokens, of.scope, of.goal, None, of.known, of.scheduled, of.scheduled)
        story.numbers, story.silent, story.past = of.numbers[:kept], of.silent, of.past.copy()
        story.published = of.published
        self.prefixes.extend(story.numbers, story.tokens, story.scope, self.size)
        self.manager.fork(parent, row, story.attempt)
        # The manager has given the twin a copy of the chain; a scheduler keeps one with the sequence likewise.
        story.chain = self.manager.published.chains[row]
        assert (story.chain is None) == (of.chain is None)
        assert story.chain is None or story.chain is not of.chain, "a fork must not extend its parent's names"
        self._enter(row, story, [table.copy() for table in of.table])
        self._hold(story.pages)
        of.forked = story.forked = of.rivalled = story.rivalled = True
        story.unsure = of.unsure
        for flown in self.flight:
            flown.draws += [story.serial] * flown.draws.count(of.serial)
        self._balance()
        return True

    def release(self, row: int, again: bool = False) -> None:
        """The sequence leaves; again: it is queued, with what is known of it."""
        story = self.story(row)
        self.manager.release(row, self.after(story))
        self._let_go(story.pages, self.after(story))
        self.rows[row] = None
        self.leaves.append(row)
        story.table = []
        if again:
            del story.tokens[story.known :], story.numbers[story.known :]
            self.queue.append(story)
        self._balance()
