"""Bugs planted in the block allocator and the cache manager: the ledger or the models must notice each of them."""

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cache_manager.allocator import LedgerError, PageAllocator
from cache_manager.manager import CacheManager, PageChanges
from cache_manager.tables import PageTables
from tests.cache_manager.books import AllocatorBooks, GroupedManagerBooks, ManagerBooks

FAULTS = {}


def fault(target, name, machine=ManagerBooks):
    """Registers a stand-in for target.name, made from the original by the decorated function."""

    def register(make):
        FAULTS[make.__name__] = (target, name, make, machine)
        return make

    return register


@fault(PageAllocator, "drop")
def drop_skips_a_decrement(real):
    return lambda self, pages: real(self, pages[:-1])


@fault(PageAllocator, "drop")
def freed_page_is_not_put_back(real):
    def drop(self, pages):
        real(self, pages)
        self.free -= bool(len(pages))

    return drop


@fault(PageAllocator, "drop")
def free_list_gets_a_page_twice(real):
    def drop(self, pages):
        before = self.free
        real(self, pages)
        if self.free - before > 1:
            self._stack[self.free - 1] = self._stack[self.free - 2]

    return drop


@fault(PageAllocator, "drop", AllocatorBooks)
def shared_page_is_freed_by_its_first_holder(real):
    def drop(self, pages):
        self.counts[pages] = np.minimum(self.counts[pages], 1)
        real(self, pages)

    return drop


@fault(PageAllocator, "hold", AllocatorBooks)
def hold_is_forgotten(real):
    def hold(self, pages):
        real(self, pages)
        self.counts[pages] -= 1

    return hold


@fault(PageAllocator, "take")
def page_is_taken_without_a_count(real):
    def take(self, n):
        pages = real(self, n)
        if pages is not None:
            self.counts[pages] = 0
        return pages

    return take


@fault(PageAllocator, "take")
def page_stays_on_the_free_list(real):
    def take(self, n):
        pages = real(self, n)
        self.free += bool(pages is not None and n)
        return pages

    return take


@fault(PageAllocator, "take", AllocatorBooks)
def fewer_pages_than_asked_are_taken(real):
    return lambda self, n: real(self, min(n, self.free))


@fault(CacheManager, "grow")
def grow_takes_a_page_that_no_table_has(real):
    def grow(self, row, end, into):
        grown = real(self, row, end, into)
        self.allocator.take(1)
        return grown

    return grow


@fault(PageTables, "append")
def table_loses_its_last_page(real):
    return lambda self, row, pages: real(self, row, pages[:, :-1])


@fault(PageTables, "append")
def widening_forgets_the_pages_so_far(real):
    def append(self, row, pages):
        columns = self.pages.shape[2]
        real(self, row, pages)
        if self.pages.shape[2] > columns:
            self.pages[:, row, :columns] = 0

    return append


@fault(PageTables, "clear")
def cleared_table_keeps_its_pages(real):
    return lambda self, row: None


@fault(CacheManager, "retire")
def pages_return_a_step_too_early(real):
    return lambda self, step: real(self, step + 1)


@fault(CacheManager, "retire")
def pages_never_return(real):
    return lambda self, step: None


@fault(CacheManager, "release")
def step_in_flight_is_forgotten(real):
    return lambda self, row, after_step: real(self, row, None)


@fault(CacheManager, "release")
def returning_is_not_counted(real):
    def release(self, row, after_step):
        before = self.returning
        real(self, row, after_step)
        self.returning = before

    return release


@fault(CacheManager, "open")
def open_takes_a_row_in_use(real):
    return lambda self, row: None


@fault(PageChanges, "grown")
def changes_tell_the_wrong_place(real):
    return lambda self, row, index, pages: real(self, row, index + bool(index), pages)


@fault(PageChanges, "grown", GroupedManagerBooks)
def changes_forget_a_group(real):
    return lambda self, row, index, pages: real(self, row, index, pages[:1])


@fault(CacheManager, "covers")
def covers_is_off_by_one(real):
    return lambda self, rows, ends: real(self, rows, ends - 1)


@pytest.mark.parametrize("name", FAULTS)
def test_harness_catches(name, monkeypatch):
    target, method, make, machine = FAULTS[name]
    monkeypatch.setattr(target, method, make(getattr(target, method)))
    # Nothing but searching: the failure need not be made small, and the same search runs each time.
    search = settings(
        max_examples=400,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    with pytest.raises((AssertionError, LedgerError)):
        run_state_machine_as_test(machine, settings=search)
