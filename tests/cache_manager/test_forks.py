"""Forks share pages until one of them writes: then it gets a copy of the one page it writes to."""

import numpy as np

from cache_manager.ledger import verify
from tests.cache_manager.sample import chain, match, start, told
from tests.cache_manager.sequences import make_manager, table


def forked(pages=8, groups=1):
    """Row 0 has three tokens in two pages, row 1 is its twin."""
    manager = make_manager(page_size=2, pages=pages, rows=3, groups=groups)
    start(manager, 0, [1, 2, 3])
    manager.pool.begin(0.0, 4)
    told(manager)
    manager.fork(0, 1)
    return manager


def test_a_fork_takes_no_page():
    manager = forked()
    assert manager.pool.free == 6
    assert told(manager) == ([[0, 1, 0, 0], [0, 1, 1, 1]], [], [])
    assert manager.allocator.shared == 2


def test_the_first_to_write_gets_a_copy_and_the_last_writes_in_place():
    manager = forked()
    told(manager)
    assert manager.grow(0, 3, 4)
    assert manager.grow(1, 3, 4)
    assert table(manager, 0) == [[0, 2]]
    assert table(manager, 1) == [[0, 1]]
    assert told(manager) == ([[0, 0, 1, 2]], [[1, 2]], [])
    assert manager.pool.returning == 1, "the step copies from it"
    manager.pool.retire(4)
    assert manager.pool.free == 5
    verify(manager)


def test_in_every_layer_group_a_page_is_copied():
    manager = forked(groups=2)
    told(manager)
    assert manager.grow(1, 3, 4)
    assert told(manager)[1] == [[1, 4], [3, 5]]


def test_a_page_that_nobody_wrote_to_is_not_copied():
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3, 4])
    told(manager)
    manager.fork(0, 1)
    assert manager.grow(1, 2, 4)
    assert told(manager)[1] == []
    assert table(manager, 1) == [[0, 2]]


def test_a_fork_must_grow_before_it_writes():
    manager = forked()
    rows, ends = np.array([0, 1], np.int32), np.array([4, 4], np.int32)
    assert manager.covers(rows, ends).tolist() == [False, False]
    manager.grow(0, 3, 4)
    assert manager.covers(rows, ends).tolist() == [True, False]


def test_without_room_for_the_copy_nothing_changes():
    manager = forked(pages=2)
    before = table(manager, 1)
    assert not manager.grow(1, 3, 4)
    assert table(manager, 1) == before
    manager.release(0, None)
    assert manager.grow(1, 3, 4), "it is alone now"
    assert told(manager)[1] == []


def test_both_publish_what_they_share_and_what_is_their_own():
    manager = forked()
    manager.published.publish(0, 2, None)
    manager.grow(0, 3, 4)
    manager.grow(1, 3, 4)
    for row, token in ((0, 4), (1, 5)):
        manager.published.chains[row].extend(np.array([3, token], np.int32))
        manager.published.publish(row, 4, None)
    for token in (4, 5):
        assert match(manager, [1, 2, 3, token]).tokens == 4
    verify(manager)


def twins_of_a_published_page():
    """Rows 0 and 1 are twins, and row 2 has published what they have computed, in other pages."""
    manager = make_manager(page_size=2, pages=12, rows=3)
    for row in (0, 2):
        manager.open(row, row, chain(manager, [1, 2, 3, 4]))
        manager.grow(row, 0, 5)
    manager.fork(0, 1)
    manager.published.publish(2, 4, None)
    return manager


def test_twins_take_over_a_page_together():
    """Else one would hold pages that come after one that it does not hold."""
    manager = twins_of_a_published_page()
    told(manager)
    manager.published.publish(0, 4, after_step=7)
    assert table(manager, 0) == table(manager, 1) == [[3, 4, 2]]
    assert sorted(told(manager)[0]) == [[0, row, index, 3 + index] for row in (0, 1) for index in (0, 1)]
    assert manager.pool.returning == 4, "both had both pages, which a step may read"
    manager.pool.retire(7)
    verify(manager)
    for row in (0, 1):
        manager.published.publish(row, 4, None)
        assert manager.published.count[row] == 2


def test_a_page_is_not_taken_over_while_a_step_of_a_twin_that_left_has_it():
    """The pages after it, which that step has too, would have a name without a holder of what comes before them."""
    manager = twins_of_a_published_page()
    manager.release(1, after_step=7)
    before = table(manager, 0)
    manager.published.publish(0, 4, None)
    assert (table(manager, 0), manager.published.count[0]) == (before, 0)
    manager.pool.retire(7)
    manager.published.publish(0, 4, None)
    assert (table(manager, 0), manager.published.count[0]) == ([[3, 4, 2]], 2)
    verify(manager)


def test_a_twin_is_waited_for_where_its_parent_leaves():
    manager = make_manager(page_size=2, pages=12, rows=3)
    manager.open(0, 0, chain(manager, [1, 2, 3, 4]))
    manager.grow(0, 0, 4)
    manager.fork(0, 1)
    assert match(manager, [1, 2, 3, 4, 5]).awaited.row == 0
    manager.release(0, None)
    assert match(manager, [1, 2, 3, 4, 5]).awaited.row == 1
    manager.published.publish(1, 4, None)
    assert match(manager, [1, 2, 3, 4, 5]).tokens == 4
