"""State machines that run the block allocator and the cache manager beside plain dicts and sets.

Each rule does one thing to both and compares what they answer; the invariants compare all that both know. A break is
an AssertionError, or a LedgerError where the ledger sees it first.
"""

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cache_manager.allocator import LedgerError, PageAllocator, Pages
from cache_manager.layout import MOST_TOKENS
from tests.cache_manager.driver import CacheDriver
from tests.cache_manager.play import PAGE_SIZES, scopes
from tests.cache_manager.windows import Windows, full

SETTINGS = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, database=None)


def refusal(call: Callable[[], object]) -> str:
    """The message of the LedgerError that the call must raise."""
    try:
        call()
    except LedgerError as error:
        return str(error)
    raise AssertionError("a LedgerError was due")


class AllocatorBooks(RuleBasedStateMachine):
    """The model: counts, holders of each page; listed, pages on the free list; aside, pages never given out again."""

    @initialize(size=st.integers(1, 24))
    def make(self, size):
        self.allocator = PageAllocator(size)
        self.counts = [0] * size
        self.listed = set(range(size))
        self.aside = set()

    def _pages(self, data, held: bool) -> Pages:
        """Some that are held, or that have no holder and are not free: cached, for all that the allocator knows."""
        pages = [p for p, count in enumerate(self.counts) if (count > 0) == held and p not in self.listed]
        return np.array(data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else [], np.int32)

    @rule(n=st.integers(0, 8))
    def take(self, n):
        pages = self.allocator.take(n)
        if n > len(self.listed):
            assert pages is None, "more pages were given out than are free"
            return
        assert pages is not None, "pages are free but were not given out"
        assert pages.dtype == np.int32
        assert len(set(pages.tolist())) == n, "a page was given out twice"
        for page in pages.tolist():
            assert page in self.listed, f"page {page} was given out while it is not free"
            self.listed.remove(page)
            self.counts[page] = 1

    @rule(data=st.data(), held=st.booleans())
    def hold(self, data, held):
        pages = self._pages(data, held)
        self.allocator.hold(pages)
        for page in pages.tolist():
            self.counts[page] += 1

    @rule(data=st.data())
    def drop(self, data):
        pages = self._pages(data, held=True)
        left = self.allocator.drop(pages)
        for page in pages.tolist():
            self.counts[page] -= 1
        assert left.tolist() == [page for page in pages.tolist() if not self.counts[page]]

    @rule(data=st.data())
    def put_back(self, data):
        pages = self._pages(data, held=False)
        self.allocator.put_back(pages)
        self.listed |= set(pages.tolist()) - self.aside

    @rule(data=st.data())
    def drop_or_free_what_must_not_be(self, data):
        """Such a page is set aside, and the others of the same call go on."""
        wrong = data.draw(st.sampled_from(range(len(self.counts))))
        if self.counts[wrong] or wrong in self.listed:
            others = self._pages(data, held=False)
            self.allocator.put_back(np.append(others, np.int32(wrong)))
            self.listed |= set(others.tolist()) - self.aside - {wrong}
        else:
            others = self._pages(data, held=True)
            assert wrong not in self.allocator.drop(np.append(others, np.int32(wrong))).tolist()
            for page in others.tolist():
                self.counts[page] -= 1
        self.aside.add(wrong)
        self.listed.discard(wrong)

    @rule(data=st.data())
    def set_aside(self, data):
        page = data.draw(st.sampled_from(range(len(self.counts))))
        self.allocator.set_aside(np.array([page], np.int32), "for a test")
        self.aside.add(page)
        self.listed.discard(page)

    @precondition(lambda self: self.listed)
    @rule(data=st.data())
    def hold_a_free_page(self, data):
        free = data.draw(st.sampled_from(sorted(self.listed)))
        pages = np.append(self._pages(data, held=True), np.int32(free))
        message = refusal(lambda: self.allocator.hold(pages))
        assert f"[{free}]" in message, "the error must name the free page"

    @invariant()
    def agree(self):
        free = self.allocator.free_pages().tolist()
        assert self.allocator.counts.tolist() == self.counts
        assert sorted(free) == sorted(self.listed)
        assert self.allocator.free == len(free)
        assert self.allocator.size == len(self.counts)
        assert set(self.allocator.pages_set_aside) == self.aside
        assert self.allocator.shared == sum(count > 1 for count in self.counts)


class ManagerBooks(RuleBasedStateMachine):
    """Does what a scheduler may do, in any order, to the manager and to the world's plain model of it."""

    groups = 1
    page_sizes = PAGE_SIZES
    pages_a_prompt = 4

    @initialize(data=st.data(), pages=st.integers(1, 24), rows=st.integers(1, 5))
    def make(self, data, pages, rows):
        self.size = data.draw(st.sampled_from(self.page_sizes))
        windows = self._windows(data)
        self.world = CacheDriver(self.size, pages * windows.groups, rows, windows=windows)

    def _windows(self, data) -> Windows:
        return full(self.groups)

    def _row(self, number: int) -> int:
        running = self.world.running()
        return running[number % len(running)]

    @rule(data=st.data(), scope=st.integers(0, 11), goal=st.integers(1, 20), named=st.integers(0, 9))
    def submit(self, data, scope, goal, named):
        scope = scopes(self.size)[scope]
        length = data.draw(st.integers(scope.bidirectional + 1, self.pages_a_prompt * self.size + 2))
        tokens = [0] * length
        if data.draw(st.booleans()):
            tokens[data.draw(st.integers(0, length - 1))] = 1
        self.world.submit(tokens, scope, length + goal, named > 0)

    @precondition(lambda self: self.world.queue)
    @rule(number=st.integers(0, 9), wait=st.booleans(), everything=st.booleans())
    def admit(self, number, wait, everything):
        self.world.admit(self.world.queue[number % len(self.world.queue)], wait, everything)

    @rule(data=st.data(), draw=st.integers(0, 1))
    def launch(self, data, draw):
        needs = {row: self.world.need(row) for row in self.world.running()}
        work = [(row, data.draw(st.integers(0, need))) for row, need in needs.items() if need > 0]
        self.world.launch(work, draw)

    @rule(publish=st.booleans())
    def commit(self, publish):
        self.world.commit(publish)

    @precondition(lambda self: self.world.flight)
    @rule(number=st.integers(0, 4))
    def fault(self, number):
        self.world.commit(fault=number)

    @precondition(lambda self: self.world.running())
    @rule(number=st.integers(0, 4), draws=st.integers(0, 1))
    def fork(self, number, draws):
        self.world.fork(self._row(number), draws)

    @precondition(lambda self: self.world.running())
    @rule(number=st.integers(0, 4), again=st.booleans())
    def release(self, number, again):
        self.world.release(self._row(number), again)

    @precondition(lambda self: self.world.running())
    @rule(number=st.integers(0, 4), more=st.integers(0, 64))
    def grow(self, number, more):
        row = self._row(number)
        self.world.grow(row, self.world.story(row).scheduled + more)

    @rule(more=st.integers(1, 3))
    def grow_by_page(self, more):
        running = self.world.running()
        for rows in (running, self.world.lacking()):
            ends = [self.world.story(row).scheduled + min(more, self.size) for row in rows]
            if rows and self.world.lack_a_page(rows, ends):
                self.world.grow_by_page(rows)

    @precondition(lambda self: self.world.running())
    @rule(number=st.integers(0, 4))
    def distrust(self, number):
        self.world.distrust(self._row(number))

    @rule(twice=st.booleans())
    def reset(self, twice):
        self.world.reset()
        if twice:
            self.world.reset()

    @rule(pages=st.integers(0, 24))
    def shrink_cache(self, pages):
        self.world.shrink_cache(pages)

    @rule(page=st.integers(0, 47))
    def quarantine(self, page):
        self.world.quarantine([page % self.world.manager.pool.total])

    @precondition(lambda self: self.world.running())
    @rule(number=st.integers(0, 4))
    def open_a_row_in_use(self, number):
        row = self._row(number)
        if self.world.story(row).pages:
            assert f"row {row} " in refusal(lambda: self.world.manager.open(row))

    @invariant()
    def agree(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.close()


class GroupedManagerBooks(ManagerBooks):
    """As above with two layer groups: each page table twice, no page in both."""

    groups = 2


class WindowedManagerBooks(ManagerBooks):
    """As above with layer groups of which some, or all, have windows."""

    page_sizes = (1, 2, 3, 5)
    pages_a_prompt = 6

    def _windows(self, data) -> Windows:
        window = st.one_of(st.none(), st.integers(1, 3 * self.size + 1))
        by_group = data.draw(st.lists(window, min_size=1, max_size=3).filter(any))
        ahead = data.draw(st.one_of(st.integers(1, 3 * self.size), st.just(MOST_TOKENS)))
        return Windows(tuple(by_group), ahead)
