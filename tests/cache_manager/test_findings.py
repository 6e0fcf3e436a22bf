"""What random play has found, each by itself."""

import numpy as np
import pytest

from cache_manager.ledger import audit
from cache_manager.page_names import PageNamer, Scope
from cache_manager.prefix import NONE, PrefixIndex
from tests.cache_manager.sample import leave, match, start, told
from tests.cache_manager.sequences import SECRET, make_manager


def page(*numbers):
    return np.array(numbers, np.int32)


def test_a_fork_does_not_publish_what_its_distrusted_twin_computed():
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3])
    manager.fork(0, 1)
    manager.distrust(0)
    manager.publish(1, 2, None)
    assert match(manager, [1, 2]).tokens == 0


def test_a_page_that_was_set_aside_is_not_published():
    manager = make_manager(page_size=2, pages=4, rows=2)
    start(manager, 0, [1, 2, 3, 4])
    manager.quarantine(page(1), np.array([1]))
    manager.publish(0, 4, None)
    assert match(manager, [1, 2, 3, 4]).tokens == 2


def test_free_pages_can_be_had_after_a_cached_page_was_dropped_once_too_often():
    manager = make_manager(page_size=2, pages=4, rows=2)
    leave(manager, [1, 2, 3, 4])
    manager.allocator.drop(page(1))
    audit(manager)
    assert match(manager, [1, 2, 3, 4]).tokens == 2
    assert manager.grow(0, 0, 2 * manager.free)


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
    chain = PageNamer(SECRET, b"model", page_size=1).chain()
    chain.extend(page(1, 2))
    parent, child = index.add(NONE, chain, 0, page(0, 1)[None], now=0.0)
    assert index.under([parent, child]) == [child, parent]


@pytest.mark.parametrize("scope", [Scope(public=2), Scope(whole=2)])
def test_less_than_a_page_of_tokens_has_no_names(scope):
    chain = PageNamer(SECRET, b"model", page_size=2).chain(scope)
    chain.extend(page(1))
    assert chain.names == []


def test_nothing_is_copied_for_a_row_that_left_after_an_earlier_step():
    """Its page returns when that step retires, while the step that copies may still be in flight."""
    manager = make_manager(page_size=2, pages=8, rows=2)
    start(manager, 0, [1, 2, 3])
    told(manager)
    manager.begin(0.0, 5)
    manager.fork(0, 1)
    manager.grow(0, 3, 4)
    manager.release(0, after_step=4)
    assert told(manager)[1] == []
