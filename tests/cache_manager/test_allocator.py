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
    allocator.put_back(allocator.drop(pages))
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
    assert allocator.shared == 1
    assert allocator.drop(page).tolist() == []
    assert allocator.shared == 0
    assert allocator.drop(page).tolist() == [0]
    assert allocator.free == 0, "its content may be cached"
    allocator.put_back(page)
    assert allocator.free == 1


def test_what_is_dropped_without_a_holder_is_set_aside_and_the_rest_goes_on():
    allocator = PageAllocator(3)
    pages = allocator.take(2)
    allocator.put_back(allocator.drop(pages[:1]))
    assert allocator.drop(pages).tolist() == [1]
    assert allocator.pages_set_aside == {0: "dropped without a holder"}
    assert allocator.counts.tolist() == [0, 0, 0]
    assert allocator.free_pages().tolist() == [2], "page 0 was free, and is not given out again"


def test_what_is_freed_while_held_or_free_is_set_aside_and_the_rest_goes_on():
    allocator = PageAllocator(4)
    pages = allocator.take(2)
    allocator.drop(pages[:1])
    allocator.put_back(np.array([0, 1, 3], np.int32))
    assert allocator.pages_set_aside == dict.fromkeys((1, 3), "freed while held or free")
    assert sorted(allocator.free_pages().tolist()) == [0, 2]
    assert allocator.counts[1] == 1, "who holds it keeps it"


def test_a_page_set_aside_is_never_given_out_again():
    allocator = PageAllocator(4)
    held = allocator.take(2)
    allocator.set_aside(np.array([1, 2], np.int32), "for a test")
    allocator.set_aside(np.array([1], np.int32), "for another reason")
    assert allocator.pages_set_aside == {1: "for a test", 2: "for a test"}
    allocator.put_back(allocator.drop(held))
    assert allocator.free == 2
    assert sorted(allocator.take(2).tolist()) == [0, 3]
    assert allocator.take(1) is None


def test_sharing_a_free_page_is_a_ledger_error():
    allocator = PageAllocator(3)
    held = allocator.take(1)
    with pytest.raises(LedgerError, match=r"pages \[2\] are free and cannot be shared"):
        allocator.hold(np.array([held[0], 2], np.int32))
    assert allocator.counts.tolist() == [1, 0, 0]
