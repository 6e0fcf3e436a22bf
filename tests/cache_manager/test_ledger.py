"""The ledger: what does not balance is named by page and holder, set aside, and everything else goes on."""

import numpy as np
import pytest

from cache_manager.allocator import LedgerError
from cache_manager.ledger import audit, imbalances, verify
from tests.cache_manager.sample import leave, match, start
from tests.cache_manager.sequences import make_manager, table


def page(*numbers):
    return np.array(numbers, np.int32)


def busy():
    """Rows of attempts 11 and 12 hold pages 0 and 1, step 7 holds page 2, pages 3 and 4 are cached, 5 is free."""
    manager = make_manager(page_size=4, pages=6, rows=3)
    for row, owner in ((0, 11), (1, 12), (2, 13)):
        manager.open(row, owner)
        manager.grow(row, 0, 4)
    manager.release(2, after_step=7)
    leave(manager, [1] * 8, row=2)
    verify(manager)
    return manager


def test_the_ledger_names_pages_and_holders():
    manager = busy()
    manager.allocator.counts[:3] = (2, 0, 3)
    with pytest.raises(LedgerError) as broken:
        verify(manager)
    for words in (
        "page 0: its count is not that of its holders; count 2, held by ['attempt 11']",
        "page 1: its count is not that of its holders; count 0, held by ['attempt 12']",
        "page 2: its count is not that of its holders; count 3, held by ['step 7']",
    ):
        assert words in str(broken.value)


def test_the_ledger_sees_a_page_in_two_tables():
    manager = busy()
    manager.tables.append(0, 1, page(0))
    with pytest.raises(LedgerError, match=r"page 0: .*; count 1, held by \['attempt 11', 'attempt 12'\]"):
        verify(manager)


def put_on_free_list(manager, number):
    manager.allocator._stack[1] = number
    manager.allocator.free += 1


def free_page_twice(manager):
    put_on_free_list(manager, 5)


def held_page_is_free(manager):
    put_on_free_list(manager, 0)


def cached_page_is_free(manager):
    put_on_free_list(manager, 4)


def free_page_is_lost(manager):
    manager.allocator.free -= 1


def cached_count(manager):
    manager.prefix.cached += 1


def shared_count(manager):
    manager.allocator.shared += 1


def child_without_parent(manager):
    nodes = manager.prefix.index._node_of_hash
    del nodes[next(iter(nodes))]


def wrong_children(manager):
    manager.prefix.index.children[manager.prefix.index.node_of[3]] = 2


def head_not_held(manager):
    manager.tables.append(0, 0, page(4))
    manager.allocator.hold(page(4))
    manager.prefix.cached -= 1


def page_of_another_node(manager):
    manager.prefix.index.node_of[4] = manager.prefix.index.node_of[3]


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (free_page_twice, "page 5: stands on the free list twice"),
        (held_page_is_free, "page 0: is held and on the free list"),
        (cached_page_is_free, "page 4: has a block hash and is on the free list"),
        (free_page_is_lost, "page 5: is lost: neither free, held nor cached"),
        (cached_count, "2 pages are cached, 3 are counted"),
        (shared_count, "0 pages are shared, 1 are counted"),
        (child_without_parent, "comes after node 0, which is gone"),
        (wrong_children, "page 3: node 0 has 1 children, counts 2"),
        (head_not_held, "page 4: node 1 is held, node 0 before it is not"),
        (page_of_another_node, "has pages of another node"),
    ],
)
def test_the_ledger_sees_what_is_wrong(tamper, message):
    manager = busy()
    tamper(manager)
    with pytest.raises(LedgerError, match=message):
        verify(manager)


def test_an_audit_of_books_that_balance_says_nothing():
    assert audit(busy()) == ""


@pytest.mark.parametrize("count", [0, 2, 5])
def test_a_held_page_with_a_wrong_count_stays_with_its_holder_and_comes_never_back(count):
    manager = busy()
    manager.allocator.counts[0] = count
    assert "page 0: " in audit(manager)
    assert audit(manager) == "", "it is told once"
    assert manager.allocator.counts[0] == 1
    assert table(manager, 0) == [[0]]
    manager.release(0, None)
    manager.release(1, None)
    manager.pool.retire(7)
    assert manager.pool.free == 5
    assert manager.grow(0, 0, 5 * 4)
    assert 0 not in manager.tables.row(0)
    assert [i.page for i in imbalances(manager)] == [0], "it stays in the books as set aside"


def test_a_cached_page_with_a_wrong_count_is_forgotten_with_all_after_it():
    manager = busy()
    manager.allocator.counts[3] = 1
    assert "page 3: " in audit(manager)
    assert match(manager, [1] * 8).tokens == 0
    assert (manager.prefix.cached, manager.pool.free) == (0, 2), "page 4 is free again, page 3 is not"
    start(manager, 2, [1] * 8)
    assert 3 not in manager.tables.row(2)


def test_a_lost_page_is_set_aside():
    manager = busy()
    free_page_is_lost(manager)
    assert "page 5: is lost" in audit(manager)
    assert manager.pool.free == 2
    assert audit(manager) == ""


def test_a_page_that_is_held_and_free_is_given_to_nobody_else():
    manager = busy()
    held_page_is_free(manager)
    assert "page 0: is held and on the free list" in audit(manager)
    assert manager.grow(2, 0, manager.pool.free * 4)
    assert 0 not in manager.tables.row(2)


def test_what_is_told_of_many_pages_is_short():
    manager = make_manager(page_size=4, pages=20, rows=1)
    manager.allocator.counts[:] = 1
    message = audit(manager)
    assert message.count("page ") == 9
    assert message.endswith("and 12 more")
    assert manager.pool.free == 0
