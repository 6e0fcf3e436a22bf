"""The door to the page pool: tables, prefixes that are found again, steps in flight."""

import numpy as np
import pytest

from cache_manager.allocator import LedgerError
from cache_manager.block_hash import Scope
from cache_manager.ledger import verify
from cache_manager.matching import NO_MATCH
from tests.cache_manager.books import SETTINGS, GroupedManagerBooks, ManagerBooks, WindowedManagerBooks
from tests.cache_manager.sample import chain, leave, match, start, told
from tests.cache_manager.sequences import make_manager, make_windowed, table
from tests.cache_manager.windows import Windows

TestManagerBooks = ManagerBooks.TestCase
TestManagerBooks.settings = SETTINGS
TestGroupedManagerBooks = GroupedManagerBooks.TestCase
TestGroupedManagerBooks.settings = SETTINGS
TestWindowedManagerBooks = WindowedManagerBooks.TestCase
TestWindowedManagerBooks.settings = SETTINGS


def test_a_page_of_a_step_in_flight_is_given_out_only_after_it_retires():
    manager = make_manager(page_size=2, pages=1, rows=2)
    assert manager.grow(0, 0, 2)
    manager.release(0, after_step=5)
    assert (manager.pool.free, manager.pool.returning) == (0, 1)
    for retired in (3, 4):
        manager.pool.retire(retired)
        assert not manager.grow(1, 0, 1)
    manager.pool.retire(5)
    assert manager.grow(1, 0, 1)
    assert manager.pool.returning == 0


@pytest.mark.parametrize("after_step", [None, 3])
def test_releasing_an_empty_row_changes_nothing(after_step):
    manager = make_manager(page_size=2, pages=1, rows=1)
    manager.release(0, after_step)
    assert (manager.pool.free, manager.pool.returning) == (1, 0)
    manager.pool.retire(3)
    verify(manager)


def test_pages_released_out_of_step_order_come_back_with_their_own_step():
    manager = make_manager(page_size=1, pages=2, rows=2)
    for row in (0, 1):
        manager.grow(row, 0, 1)
    manager.release(0, after_step=5)
    manager.release(1, after_step=4)
    manager.pool.retire(4)
    assert (manager.pool.free, manager.pool.returning) == (1, 1)


def test_long_tables_keep_their_first_pages():
    manager = make_manager(page_size=1, pages=64, rows=2)
    for end in range(1, 33):
        for row in (0, 1):
            assert manager.grow(row, end - 1, end)
    assert table(manager, 0) == [list(range(0, 64, 2))]
    assert table(manager, 1) == [list(range(1, 64, 2))]


def test_rows_that_grow_together_get_a_page_each_in_every_group():
    manager = make_manager(page_size=4, pages=8, rows=3, groups=2)
    manager.grow(2, 0, 4)
    assert manager.grow_by_page(np.array([0, 2], np.int32))
    tables = [table(manager, row) for row in range(3)]
    assert [len(table[0]) for table in tables] == [1, 0, 2]
    assert len({page for table in tables for group in table for page in group}) == 6
    assert not manager.grow_by_page(np.array([0, 2], np.int32))
    assert [table(manager, row) for row in range(3)] == tables
    verify(manager)


def test_a_row_that_holds_pages_cannot_be_opened():
    manager = make_manager(page_size=4, pages=4, rows=2)
    manager.grow(0, 0, 9)
    for enter in (lambda: manager.open(0), lambda: manager.fork(1, 0)):
        with pytest.raises(LedgerError, match="row 0 is opened while it holds 3 pages"):
            enter()


def test_a_prefix_is_found_again_by_who_asks_for_it():
    manager = make_manager(page_size=2, pages=8, rows=2)
    pages = leave(manager, [1, 2, 3, 4, 5])
    assert match(manager, [1, 2, 3, 4, 9]).tokens == 4
    assert match(manager, [1, 2, 9, 4]).tokens == 2
    assert match(manager, [9, 2, 3, 4]).tokens == 0
    assert manager.lookup.match(chain(manager, [1, 2, 3, 4]), most=3).tokens == 2
    assert match(manager, [1, 2, 3, 4], Scope("other")).tokens == 0
    start(manager, 1, [1, 2, 3, 4, 9])
    assert table(manager, 1)[0][:2] == pages[:2]


def test_a_page_is_published_when_it_is_full_and_computed():
    manager = make_manager(page_size=2, pages=8, rows=1)
    start(manager, 0, [1, 2, 3, 4, 5])
    for computed, found in ((1, 0), (2, 2), (3, 2), (5, 4)):
        manager.published.publish(0, computed, None)
        assert match(manager, [1, 2, 3, 4, 5, 6]).tokens == found


def test_cached_pages_cost_nothing():
    manager = make_manager(page_size=2, pages=4, rows=1)
    leave(manager, [1, 2, 3, 4])
    assert (manager.pool.free, manager.allocator.free, manager.prefix.cached) == (4, 2, 2)
    found = match(manager, [1, 2, 3, 4, 5])
    assert manager.needed(found, 5) == 3, "what is cached is taken out of what is free"
    assert manager.grow(0, 0, 8)
    assert manager.prefix.cached == 0


def test_what_somebody_holds_is_not_needed_again():
    manager = make_manager(page_size=2, pages=4, rows=2)
    start(manager, 0, [1, 2, 3, 4])
    manager.published.publish(0, 4, None)
    assert manager.needed(match(manager, [1, 2, 3, 4, 5]), 5) == 1
    assert manager.needed(NO_MATCH, 5) == 3


def test_a_page_that_a_row_computes_is_waited_for_until_it_is_published():
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3, 4, 5, 6])
    awaited = match(manager, [1, 2, 3, 4, 9, 9]).awaited
    assert awaited is not None
    assert (awaited.row, awaited.index) == (0, 1), "they have two pages in common"
    manager.published.publish(0, 2, None)
    assert manager.published.is_computing(awaited)
    manager.published.publish(0, 4, None)
    assert not manager.published.is_computing(awaited)
    assert match(manager, [1, 2, 3, 4, 9, 9]).awaited is None


@pytest.mark.parametrize("end", ["release", "distrust", "reset"])
def test_nobody_waits_for_a_row_that_publishes_no_more(end):
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3, 4])
    awaited = match(manager, [1, 2, 3, 4]).awaited
    {
        "release": lambda: manager.release(0, 3),
        "distrust": lambda: manager.published.distrust(0),
        "reset": lambda: manager.published.reset(),
    }[end]()
    assert not manager.published.is_computing(awaited)
    assert match(manager, [1, 2, 3, 4]).awaited is None


def test_nobody_waits_for_another_sequence_of_the_same_attempt():
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3, 4], owner=11)
    awaited = match(manager, [1, 2, 3, 4]).awaited
    manager.release(0, None)
    start(manager, 0, [1, 2, 5, 6], owner=11)
    assert not manager.published.is_computing(awaited)


def test_who_computes_what_another_one_publishes_takes_it_over():
    manager = make_manager(page_size=2, pages=8, rows=2)
    for row in (0, 1):
        manager.open(row, row, chain(manager, [1, 2, 3, 4]))
        manager.grow(row, 0, 4)
    manager.published.publish(0, 4, None)
    manager.published.publish(1, 4, after_step=7)
    assert table(manager, 0) == table(manager, 1)
    assert manager.pool.returning == 2, "a step in flight still reads its own pages"
    manager.pool.retire(7)
    assert manager.pool.free == 6
    verify(manager)


@pytest.mark.parametrize("window", [None, 3])
def test_a_span_in_both_directions_is_hit_where_all_of_it_is_the_same(window):
    """And only by its whole where layers have a window: what the rest of it sees is gone."""
    manager = make_windowed(page_size=2, pages=4, rows=1, windows=Windows((window,)))
    scope = Scope(bidirectional=4)
    manager.open(0, 0, chain(manager, [1, 2, 3, 4, 5, 6], scope))
    manager.grow(0, 0, 6)
    manager.published.publish(0, 2, None)
    assert match(manager, [1, 2, 3, 4, 5, 6], scope).tokens == (2 if window is None else 0)
    manager.published.publish(0, 4, None)
    assert match(manager, [1, 2, 3, 4, 5, 6], scope).tokens == 4
    assert match(manager, [1, 2, 3, 9, 5, 6], scope).tokens == 0


def test_a_reset_forgets_all_and_running_rows_keep_their_pages():
    manager = make_manager(page_size=2, pages=8, rows=2)
    leave(manager, [9, 9, 9, 9])
    start(manager, 0, [1, 2, 3, 4])
    manager.published.publish(0, 2, None)
    assert manager.published.reset() == 3
    assert manager.prefix.cached == len(manager.prefix.index) == 0
    manager.published.publish(0, 4, None)
    assert match(manager, [1, 2, 3, 4]).tokens == 0
    assert len(manager.tables.row(0)) == 2
    assert leave(manager, [1, 2, 3, 4], row=1)
    assert match(manager, [1, 2, 3, 4]).tokens == 4


def test_what_a_distrusted_row_computed_or_read_is_forgotten_and_all_after_it():
    manager = make_manager(page_size=2, pages=8, rows=2)
    leave(manager, [1, 2, 3, 4])
    leave(manager, [1, 2, 5, 6])
    leave(manager, [7, 8])
    start(manager, 0, [1, 2, 3, 4, 9])
    manager.published.distrust(0)
    assert [match(manager, tokens).tokens for tokens in ([1, 2, 3, 4], [1, 2, 5, 6], [7, 8])] == [0, 0, 2]
    assert sum(map(len, told(manager)[2:])) > 0
    verify(manager)
