"""Block allocator: distinct pages, honest counts, ascending runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.allocator import LedgerError, PageAllocator
from tests.cache_manager.books import SETTINGS, AllocatorBooks

TestAllocatorBooks = AllocatorBooks.TestCase
TestAllocatorBooks.settings = SETTINGS


@pytest.mark.parametrize("size", [0, -3])
def test_a_pool_has_at_least_one_page(size):
    with pytest.raises(ValueError, match=f"at least 1 page, got {size}"):
        PageAllocator(size)


@given(size=st.integers(1, 50), wanted=st.lists(st.integers(0, 60), max_size=6))
def test_too_few_free_pages_change_nothing(size, wanted):
    allocator = PageAllocator(size)
    for n in wanted:
        counts, free, stack = allocator.counts.copy(), allocator.free, allocator.free_pages()
        if allocator.take(n) is None:
            assert n > free
            assert (allocator.counts == counts).all()
            assert allocator.free == free
            assert (allocator.free_pages() == stack).all()


@given(size=st.integers(2, 50), data=st.data())
def test_pages_come_in_ascending_runs_and_again_after_they_were_freed(size, data):
    allocator = PageAllocator(size)
    n = data.draw(st.integers(1, size))
    pages = allocator.take(n)
    assert pages.tolist() == list(range(n))
    allocator.drop(pages)
    assert allocator.take(n).tolist() == list(range(n))


def test_pages_given_out_are_the_callers_own_copy():
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    pages[:] = 3
    assert sorted(allocator.take(2).tolist()) == [2, 3]
    free = allocator.free_pages()
    free[:] = 0
    assert allocator.free == 0


def test_a_shared_page_is_free_after_its_last_holder():
    allocator = PageAllocator(1)
    page = allocator.take(1)
    allocator.hold(page)
    allocator.drop(page)
    assert allocator.free == 0
    allocator.drop(page)
    assert allocator.free == 1


def test_dropping_twice_is_a_ledger_error():
    allocator = PageAllocator(3)
    pages = allocator.take(2)
    allocator.drop(pages[:1])
    with pytest.raises(LedgerError, match=r"pages \[0\] are dropped but have no holder"):
        allocator.drop(pages)
    assert allocator.counts.tolist() == [0, 1, 0]
    assert allocator.free == 2


def test_sharing_a_free_page_is_a_ledger_error():
    allocator = PageAllocator(3)
    held = allocator.take(1)
    with pytest.raises(LedgerError, match=r"pages \[2\] are free and cannot be shared"):
        allocator.hold(np.array([held[0], 2], np.int32))
    assert allocator.counts.tolist() == [1, 0, 0]
