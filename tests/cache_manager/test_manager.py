"""The door to the page pool: tables, steps in flight, and a ledger that says where it does not balance."""

import numpy as np
import pytest

from cache_manager.allocator import LedgerError
from cache_manager.manager import PageChanges
from tests.cache_manager.books import SETTINGS, GroupedManagerBooks, ManagerBooks, make_manager

TestManagerBooks = ManagerBooks.TestCase
TestManagerBooks.settings = SETTINGS
TestGroupedManagerBooks = GroupedManagerBooks.TestCase
TestGroupedManagerBooks.settings = SETTINGS


def test_a_page_of_a_step_in_flight_is_given_out_only_after_it_retires():
    manager = make_manager(page_size=2, pages=1, rows=2)
    assert manager.grow(0, 2, PageChanges())
    manager.release(0, after_step=5)
    assert (manager.free, manager.returning) == (0, 1)
    assert not manager.grow(1, 1, PageChanges())
    manager.retire(4)
    assert not manager.grow(1, 1, PageChanges())
    manager.retire(5)
    assert manager.grow(1, 1, PageChanges())
    assert manager.returning == 0


@pytest.mark.parametrize("after_step", [None, 3])
def test_releasing_an_empty_row_changes_nothing(after_step):
    manager = make_manager(page_size=2, pages=1, rows=1)
    manager.release(0, after_step)
    assert (manager.free, manager.returning) == (1, 0)
    manager.retire(3)
    manager.verify()


def test_pages_released_out_of_step_order_come_back_with_their_own_step():
    manager = make_manager(page_size=1, pages=2, rows=2)
    for row in (0, 1):
        manager.grow(row, 1, PageChanges())
    manager.release(0, after_step=5)
    manager.release(1, after_step=4)
    manager.retire(4)
    assert (manager.free, manager.returning) == (1, 1)


def test_long_tables_keep_their_first_pages():
    manager = make_manager(page_size=1, pages=64, rows=2)
    for end in range(1, 33):
        for row in (0, 1):
            assert manager.grow(row, end, PageChanges())
    assert manager.tables.row(0).tolist() == [list(range(0, 64, 2))]
    assert manager.tables.row(1).tolist() == [list(range(1, 64, 2))]


def test_changes_of_a_step_add_up_in_order():
    manager = make_manager(page_size=4, pages=8, rows=3, groups=2)
    changes = PageChanges()
    assert changes.array().shape == (0, 4)
    manager.grow(2, 5, changes)
    manager.grow(0, 1, changes)
    manager.grow(0, 1, changes)
    assert changes.array().tolist() == [
        [0, 2, 0, 0],
        [0, 2, 1, 1],
        [1, 2, 0, 2],
        [1, 2, 1, 3],
        [0, 0, 0, 4],
        [1, 0, 0, 5],
    ]


def test_a_row_that_holds_pages_cannot_be_opened():
    manager = make_manager(page_size=4, pages=4, rows=1)
    manager.grow(0, 9, PageChanges())
    with pytest.raises(LedgerError, match="row 0 is opened while it holds 3 pages"):
        manager.open(0)


def test_the_ledger_names_pages_and_holders():
    manager = make_manager(page_size=4, pages=6, rows=2)
    manager.grow(0, 4, PageChanges())
    manager.grow(1, 4, PageChanges())
    manager.release(1, after_step=7)
    manager.allocator.counts[:3] = (2, 0, 1)
    with pytest.raises(LedgerError) as broken:
        manager.verify()
    assert "page 0: count 2, held by ['row 0']" in str(broken.value)
    assert "page 1: count 0, held by ['step 7']" in str(broken.value)
    assert "page 2: count 1, held by []" in str(broken.value)


def test_the_ledger_sees_a_page_in_two_tables():
    manager = make_manager(page_size=4, pages=6, rows=2)
    manager.grow(0, 4, PageChanges())
    manager.tables.append(1, np.array([[0]], np.int32))
    with pytest.raises(LedgerError, match=r"page 0: count 1, held by \['row 0', 'row 1'\]"):
        manager.verify()


def free_page_twice(allocator):
    allocator._stack[0] = allocator._stack[1]


def held_page_is_free(allocator):
    allocator._stack[0] = 0


def free_page_is_lost(allocator):
    allocator.free -= 1


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (free_page_twice, "holds a page twice"),
        (held_page_is_free, "a page that is held"),
        (free_page_is_lost, "pages were lost"),
    ],
)
def test_the_ledger_sees_what_is_wrong_with_the_free_list(tamper, message):
    manager = make_manager(page_size=4, pages=4, rows=1)
    manager.grow(0, 4, PageChanges())
    manager.verify()
    tamper(manager.allocator)
    with pytest.raises(LedgerError, match=message):
        manager.verify()
