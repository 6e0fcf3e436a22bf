"""Page changes of a step plan: each place once, in order, of rows that are still there."""

import numpy as np

from cache_manager.changes import PageChanges
from tests.cache_manager.sample import told
from tests.cache_manager.sequences import make_manager


def test_nothing_has_changed_to_begin_with():
    changes = PageChanges()
    assert changes.grown().shape == (0, 4)
    assert changes.copies().shape == (0, 2)
    assert changes.freed_pages().shape == (0,)
    assert {a.dtype for a in (changes.grown(), changes.copies(), changes.freed_pages())} == {np.dtype(np.int32)}


def test_changes_of_a_step_add_up_in_order():
    manager = make_manager(page_size=4, pages=8, rows=3, groups=2)
    manager.grow(2, 0, 5)
    manager.grow(0, 0, 1)
    manager.grow(0, 0, 1)
    assert manager.pool.take_changes().grown().tolist() == [
        [0, 2, 0, 0],
        [0, 2, 1, 1],
        [1, 2, 0, 2],
        [1, 2, 1, 3],
        [0, 0, 0, 4],
        [1, 0, 0, 5],
    ]
    assert told(manager) == ([], [], [])


def test_rows_that_grow_together_are_told_each_at_its_place():
    changes = PageChanges()
    rows, indices = np.array([4, 1], np.int32), np.array([0, 7], np.int32)
    changes.grew_each(rows, indices, np.array([[10, 11], [12, 13]], np.int32))
    assert changes.grown().tolist() == [[0, 4, 0, 10], [0, 1, 7, 11], [1, 4, 0, 12], [1, 1, 7, 13]]


def test_nothing_is_told_of_a_row_that_left_but_what_came_after():
    changes = PageChanges()
    changes.grew(0, 1, 0, np.array([5], np.int32))
    changes.grew(0, 2, 0, np.array([6], np.int32))
    changes.row_left(1)
    changes.grew(0, 1, 0, np.array([7], np.int32))
    assert changes.grown().tolist() == [[0, 2, 0, 6], [0, 1, 0, 7]]


def test_copies_and_freed_pages_are_told_in_order():
    changes = PageChanges()
    changes.copy(np.array([3, 1], np.int32), np.array([4, 2], np.int32))
    changes.copy(np.array([9], np.int32), np.array([8], np.int32))
    changes.freed(np.array([7], np.int32))
    changes.freed(np.array([], np.int32))
    changes.freed(np.array([6, 5], np.int32))
    assert changes.copies().tolist() == [[3, 4], [1, 2], [9, 8]]
    assert changes.freed_pages().tolist() == [7, 6, 5]
