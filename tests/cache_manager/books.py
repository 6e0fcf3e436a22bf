"""State machines that run the block allocator and the cache manager beside plain dicts and sets.

Each rule does one thing to both and compares what they answer; the invariants compare all that both know. A break is
an AssertionError, or a LedgerError where `verify` sees it first.
"""

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.allocator import LedgerError, PageAllocator, Pages
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager, PageChanges

PAGE_SIZES = (1, 2, 7, 16)
SETTINGS = settings(max_examples=200, stateful_step_count=40, deadline=None)


def make_manager(page_size: int, pages: int, rows: int, groups: int = 1) -> CacheManager:
    """A manager of a model with two layers a group; the sizes of tensors do not matter here."""
    numbers = tuple((2 * g, 2 * g + 1) for g in range(groups))
    return CacheManager(KVLayout(numbers, kv_heads=1, head_dim=8, element_bytes=2, page_size=page_size), pages, rows)


def refusal(call: Callable[[], object]) -> str:
    """The message of the LedgerError that the call must raise."""
    try:
        call()
    except LedgerError as error:
        return str(error)
    raise AssertionError("a LedgerError was due")


class AllocatorBooks(RuleBasedStateMachine):
    """`counts` is the model: holders of each page, 0 for a free one."""

    @initialize(size=st.integers(1, 24))
    def make(self, size):
        self.allocator = PageAllocator(size)
        self.counts = [0] * size

    def _pages(self, data, held: bool) -> Pages:
        pages = [page for page, count in enumerate(self.counts) if (count > 0) == held]
        return np.array(data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else [], np.int32)

    @rule(n=st.integers(0, 8))
    def take(self, n):
        pages = self.allocator.take(n)
        if n > self.counts.count(0):
            assert pages is None, "more pages were given out than are free"
            return
        assert pages is not None, "pages are free but were not given out"
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == n, "a page was given out twice"
        for page in pages.tolist():
            assert self.counts[page] == 0, f"page {page} was given out while it is held"
            self.counts[page] = 1

    @rule(data=st.data())
    def hold(self, data):
        pages = self._pages(data, held=True)
        self.allocator.hold(pages)
        for page in pages.tolist():
            self.counts[page] += 1

    @rule(data=st.data())
    def drop(self, data):
        pages = self._pages(data, held=True)
        self.allocator.drop(pages)
        for page in pages.tolist():
            self.counts[page] -= 1

    @precondition(lambda self: 0 in self.counts)
    @rule(data=st.data(), of=st.sampled_from(("hold", "drop")))
    def touch_a_free_page(self, data, of):
        free = self.counts.index(0)
        pages = np.append(self._pages(data, held=True), np.int32(free))
        message = refusal(lambda: getattr(self.allocator, of)(pages))
        assert f"[{free}]" in message, "the error must name the free page"

    @invariant()
    def agree(self):
        free = self.allocator.free_pages().tolist()
        assert self.allocator.counts.tolist() == self.counts
        assert sorted(free) == [page for page, count in enumerate(self.counts) if not count]
        assert self.allocator.free == len(free)
        assert self.allocator.size == len(self.counts)


class ManagerBooks(RuleBasedStateMachine):
    """The model: a table for each row, pages that wait for a step, free pages; and steps as a scheduler counts them."""

    groups = 1

    @initialize(page_size=st.sampled_from(PAGE_SIZES), pages=st.integers(1, 48), rows=st.integers(1, 5))
    def make(self, page_size, pages, rows):
        self.manager = make_manager(page_size, pages, rows, self.groups)
        self.page_size = page_size
        self.rows = rows
        self.tables: list[list[list[int]]] = [[[] for _ in range(self.groups)] for _ in range(rows)]
        self.waiting: list[tuple[int, set[int]]] = []
        self.free = set(range(pages))
        self.launched, self.retired = 1, -1

    def _row(self, number: int) -> int:
        return number % self.rows

    @rule(number=st.integers(0, 4), more=st.integers(-8, 64))
    def grow(self, number, more):
        row = self._row(number)
        table = self.tables[row]
        before = len(table[0])
        end = max(0, before * self.page_size + more)
        missing = max(0, -(-end // self.page_size) - before)
        changes = PageChanges()
        grown = self.manager.grow(row, end, changes)
        told = changes.array()
        assert told.dtype == np.int32
        assert told.shape[1] == 4
        assert grown == (missing * self.groups <= len(self.free)), "grow must succeed exactly where pages are free"
        if not grown:
            assert not len(told), "a grow that failed must tell nothing"
            return
        assert sorted(told[:, :3].tolist()) == [
            [group, row, index] for group in range(self.groups) for index in range(before, before + missing)
        ], "the changes must tell the new places, each once"
        for group, _, _, page in sorted(told.tolist()):
            assert page in self.free, f"page {page} was given out while it is held or waits for a step"
            self.free.remove(page)
            table[group].append(page)

    @rule(number=st.integers(0, 4))
    def open(self, number):
        row = self._row(number)
        if self.tables[row][0]:
            assert f"row {row} " in refusal(lambda: self.manager.open(row))
        else:
            self.manager.open(row)

    @precondition(lambda self: any(table[0] for table in self.tables))
    @rule(number=st.integers(0, 4), data=st.data())
    def release(self, number, data):
        holding = [row for row, table in enumerate(self.tables) if table[0]]
        row = holding[number % len(holding)]
        after = data.draw(st.sampled_from((*range(self.launched, self.retired, -1), None)))
        pages = {page for table in self.tables[row] for page in table}
        self.manager.release(row, after)
        if after is None:
            self.free |= pages
        else:
            self.waiting.append((after, pages))
        self.tables[row] = [[] for _ in range(self.groups)]

    @rule(in_flight=st.integers(0, 3))
    def step(self, in_flight):
        """One more step, after which so many at most are in flight."""
        self.launched += 1
        self.retired = max(self.retired, self.launched - in_flight)
        self.manager.retire(self.retired)
        for _, pages in [w for w in self.waiting if w[0] <= self.retired]:
            self.free |= pages
        self.waiting = [w for w in self.waiting if w[0] > self.retired]

    @invariant()
    def agree(self):
        self.manager.verify()
        assert set(self.manager.allocator.free_pages().tolist()) == self.free
        assert self.manager.free == len(self.free)
        assert self.manager.returning == sum(len(pages) for _, pages in self.waiting)
        for row, table in enumerate(self.tables):
            assert self.manager.tables.row(row).tolist() == table

    @invariant()
    def no_page_is_in_two_places(self):
        tables = [self.manager.tables.row(row).reshape(-1) for row in range(self.rows)]
        held = np.concatenate(tables).tolist()
        waiting = [page for _, pages in self.waiting for page in pages]
        places = held + waiting + self.manager.allocator.free_pages().tolist()
        assert sorted(places) == list(range(self.manager.total))

    @rule(data=st.data())
    def covers(self, data):
        rows = np.arange(self.rows, dtype=np.int32)
        ends = np.array([data.draw(st.integers(0, 20 * self.page_size)) for _ in rows], np.int32)
        slots = [len(table[0]) * self.page_size for table in self.tables]
        assert self.manager.covers(rows, ends).tolist() == [s >= e for s, e in zip(slots, ends, strict=True)]


class GroupedManagerBooks(ManagerBooks):
    """As above with two layer groups: each page table twice, no page in both."""

    groups = 2
