"""Bugs that random play has found, a test each."""

import numpy as np
import pytest

from cache_manager.block_hash import BlockHasher, Scope
from cache_manager.ledger import audit
from cache_manager.policies import POLICIES
from cache_manager.prefix import NONE, PrefixIndex
from tests.cache_manager.sample import chain, leave, match, start, told
from tests.cache_manager.sequences import SECRET, make_manager, make_windowed
from tests.cache_manager.windows import Windows


def page(*numbers):
    return np.array(numbers, np.int32)


def test_a_fork_does_not_publish_what_its_distrusted_twin_computed():
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3])
    manager.fork(0, 1)
    manager.published.distrust(0)
    manager.published.publish(1, 2, None)
    assert match(manager, [1, 2]).tokens == 0


def test_a_page_that_was_set_aside_is_not_published():
    manager = make_manager(page_size=2, pages=4, rows=2)
    start(manager, 0, [1, 2, 3, 4])
    manager.pool.quarantine(page(1), np.array([1]))
    manager.published.publish(0, 4, None)
    assert match(manager, [1, 2, 3, 4]).tokens == 2


def test_free_pages_can_be_had_after_a_cached_page_was_dropped_once_too_often():
    manager = make_manager(page_size=2, pages=4, rows=2)
    leave(manager, [1, 2, 3, 4])
    manager.allocator.drop(page(1))
    audit(manager)
    assert match(manager, [1, 2, 3, 4]).tokens == 2
    assert manager.grow(0, 0, 2 * manager.pool.free)


def test_no_page_is_source_and_target_of_copies_where_a_fork_forks_before_the_plan():
    manager = make_manager(page_size=2, pages=8, rows=3)
    start(manager, 0, [1, 2, 3])
    told(manager)
    manager.fork(0, 1)
    manager.grow(0, 3, 4)
    manager.fork(0, 2)
    manager.grow(2, 3, 4)
    copies = told(manager)[1]
    assert {source for source, _ in copies}.isdisjoint(target for _, target in copies)


def test_nothing_is_copied_into_a_page_that_was_given_back_before_the_plan():
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3])
    told(manager)
    manager.fork(0, 1)
    manager.grow(0, 3, 4)
    manager.release(0, None)
    assert told(manager)[1] == []


def test_what_is_forgotten_is_listed_children_first():
    """`distrust` asks with all nodes of a row, and `remove` wants nodes without children."""
    index = PrefixIndex(groups=1, pages=2)
    chain = BlockHasher(SECRET, b"model", page_size=1).chain()
    chain.extend(page(1, 2))
    parent, child = index.add(NONE, chain, 0, page(0, 1)[None], now=0.0)
    assert index.under([parent, child]) == [child, parent]


@pytest.mark.parametrize("scope", [Scope(public=2), Scope(bidirectional=2)])
def test_less_than_a_page_of_tokens_has_no_names(scope):
    chain = BlockHasher(SECRET, b"model", page_size=2).chain(scope)
    chain.extend(page(1))
    assert chain.hashes == []


def test_nothing_is_copied_for_a_row_that_left_after_an_earlier_step():
    """Its page returns when that step retires, while the step that copies may still be in flight."""
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3])
    told(manager)
    manager.pool.begin(0.0, 5)
    manager.fork(0, 1)
    manager.grow(0, 3, 4)
    manager.release(0, after_step=4)
    assert told(manager)[1] == []


@pytest.mark.parametrize("windows", [(3,), (None, 3)])
def test_pages_that_were_free_when_a_request_started_last_while_its_window_leaves_what_it_shares(windows):
    manager = make_windowed(page_size=2, pages=64, rows=2, windows=Windows(windows, ahead=2))
    start(manager, 0, [1, 2, 3])
    manager.published.publish(0, 2, None)
    names = chain(manager, [1, 2, *range(10, 20)])
    match = manager.lookup.match(names, 11)
    before, needed = manager.pool.free, manager.needed(match, 12)
    manager.open(1, 1, names, match)
    assert manager.grow(1, match.tokens, 12)
    for computed in range(3, 12):
        manager.published.publish(1, computed, None)
        manager.slide(page(1), page(computed))
        manager.grow(1, computed, 12)
        assert before - manager.pool.free <= needed


def test_what_is_promised_can_be_asked_with_any_page_size():
    manager = make_windowed(page_size=1, pages=8, rows=1, windows=Windows((3,)))
    manager.grow(0, 0, 2)
    assert manager.pages_still_to_take(page(0), page(4)) == 2


def test_a_page_that_is_waited_for_is_not_here():
    """Each round, the scheduler would match the request anew."""
    manager = make_windowed(page_size=1, pages=64, rows=2, windows=Windows((None, 4)))
    start(manager, 0, [1, 2, 3, 4, 5, 6, 7])
    manager.published.publish(0, 7, None)
    manager.slide(page(0), page(7))
    manager.prefix.evict(4, now=0.0)
    start(manager, 1, [1, 2, 3, 4, 5, 6, 9])
    awaited = match(manager, [1, 2, 3, 4, 5, 6, 8]).awaited
    assert awaited is not None
    assert manager.published.is_computing(awaited)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_policy_is_not_told_of_nodes_that_a_row_did_not_come_to(policy):
    """It has the end of what another one left on offer, and does not find it again."""
    manager = make_windowed(page_size=2, pages=4, rows=2, windows=Windows((3,)), make_policy=POLICIES[policy])
    for row in (0, 1):
        start(manager, row, [1, 2, 3, 4])
    manager.published.publish(1, 4, None)
    manager.release(1, None)
    manager.release(0, None)
    assert manager.grow(0, 0, 8)


def test_what_a_distrusted_row_left_behind_is_not_published_by_its_twin():
    manager = make_windowed(page_size=2, pages=8, rows=2, windows=Windows((2,)))
    start(manager, 0, [1, 2, 3, 4, 5, 6])
    manager.fork(0, 1)
    manager.published.publish(0, 6, None)
    manager.grow(0, 6, 8)
    manager.published.chains[0].extend(page(7, 8))
    manager.published.publish(0, 8, None)
    manager.slide(page(0), page(8))
    manager.published.distrust(0)
    manager.published.publish(1, 6, None)
    assert match(manager, [1, 2, 3, 4, 5, 6]).tokens == 0


def test_a_distrusted_row_has_no_page_that_keeps_the_name_its_twin_gave_it():
    manager = make_windowed(page_size=2, pages=8, rows=2, windows=Windows((2,)))
    manager.open(0, 0, chain(manager, [1]))
    manager.grow(0, 0, 2)
    manager.fork(0, 1)
    manager.published.chains[0].extend(page(1, 2))
    manager.published.publish(0, 2, None)
    manager.published.distrust(1)
    assert match(manager, [1, 2]).tokens == 0


def test_two_pages_behind_a_window_go_at_once_where_the_second_was_the_end():
    manager = make_windowed(page_size=2, pages=8, rows=1, windows=Windows((2,)))
    leave(manager, [7, 7, 7, 7])
    manager.pool.shrink_cache(0)  # the next nodes are 1 and 0
    start(manager, 0, [1, 2, 3, 4])
    manager.published.publish(0, 4, None)
    manager.published.chains[0].extend(page(5, 6))
    manager.grow(0, 4, 6)
    manager.published.publish(0, 6, None)
    manager.slide(page(0), page(6))
    manager.pool.quarantine(manager.tables.pages_of(0, 0), np.array([1]))
    manager.pool.shrink_cache(0)
    assert len(manager.prefix.index) == 0


def test_nothing_is_copied_for_twins_that_both_left_after_an_earlier_step():
    """Windows apart: their page returns while the step that copies to it may still be in flight."""
    manager = make_manager(page_size=2, pages=8, rows=3)
    start(manager, 0, [1, 2, 3])
    told(manager)
    manager.pool.begin(0.0, 5)
    manager.fork(0, 1)
    manager.grow(0, 3, 4)
    manager.fork(0, 2)
    manager.release(0, after_step=4)
    manager.release(2, after_step=4)
    assert told(manager)[1] == []
