"""The order of eviction: leaves only, tail before head; and how a page's life is counted."""

import pickle

import numpy as np
import pytest

from cache_manager.cached import LIFETIMES, Cause
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.policies import POLICIES
from cache_manager.pool import AHEAD_PART
from tests.cache_manager.sample import leave, match, start
from tests.cache_manager.sequences import make_manager, make_windowed
from tests.cache_manager.windows import Windows

A, B = [1, 1, 1, 1, 1, 1], [2, 2, 2, 2, 2, 2]


def evict(manager, count):
    """Lets a sequence come that needs this number of pages beyond the free ones, and leave."""
    row = int(np.flatnonzero(manager.tables.held[0] == 0)[0])
    size = manager.layout.page_size
    assert manager.grow(row, 0, (manager.allocator.free + count) * size)
    manager.release(row, None)


def found(manager, *prompts):
    return [match(manager, prompt).tokens for prompt in prompts]


def test_the_tail_goes_before_the_head():
    manager = make_manager(page_size=2, pages=3, rows=2)
    leave(manager, A)
    for tokens in (4, 2, 0):
        evict(manager, 1)
        assert found(manager, A) == [tokens]


def test_who_left_longest_ago_goes_first():
    manager = make_manager(page_size=2, pages=6, rows=2)
    leave(manager, A)
    leave(manager, B)
    leave(manager, A)
    evict(manager, 2)
    assert found(manager, A, B) == [6, 2]
    evict(manager, 2)
    assert found(manager, A, B) == [4, 0]


def test_a_head_that_others_go_on_from_goes_after_them():
    manager = make_manager(page_size=2, pages=4, rows=2)
    leave(manager, [1, 1, 2, 2])
    leave(manager, [1, 1, 3, 3])
    evict(manager, 1)
    assert found(manager, [1, 1, 2, 2], [1, 1, 3, 3]) == [2, 4]
    evict(manager, 1)
    assert found(manager, [1, 1, 2, 2], [1, 1, 3, 3]) == [2, 2]


def test_what_is_held_is_not_evicted():
    manager = make_manager(page_size=2, pages=3, rows=2)
    leave(manager, A)
    start(manager, 0, [1, 1, 1, 9])
    assert manager.pool.free == 1
    assert not manager.grow(1, 0, 4)
    assert found(manager, A) == [4]
    assert manager.grow(1, 0, 2)
    assert found(manager, A) == [2]


@pytest.mark.parametrize("most", [0, 2, 3])
def test_a_cache_shrinks_to_what_is_asked_and_what_it_gives_up_is_free(most):
    manager = make_manager(page_size=2, pages=4, rows=2)
    leave(manager, A)
    manager.pool.shrink_cache(most)
    assert found(manager, A) == [2 * most]
    assert (manager.prefix.cached, manager.pool.free, manager.allocator.free) == (most, 4, 4 - most)


@pytest.mark.parametrize("policy", POLICIES.values())
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("lacking", [2, 3])
def test_an_eviction_from_a_large_pool_frees_a_few_more_pages_of_the_same_run(policy, groups, lacking):
    """The next sequences that lack a page find one free. By `reuse` a request's last page is a run of its own."""
    manager = make_manager(page_size=2, pages=4 * AHEAD_PART, rows=2, groups=groups, make_policy=policy)
    first, second, nodes, ahead = [1] * 20, [2] * 20, 4 * AHEAD_PART // groups, 4 // groups
    for tokens in (first, second, range(3, 3 + 2 * (nodes - 20))):
        leave(manager, tokens)
    assert manager.grow(0, 0, 2 * lacking)
    assert found(manager, first, second) == [20 - 2 * (lacking + ahead), 20]
    assert (manager.allocator.free, manager.prefix.evicted[Cause.CAPACITY]) == (4, lacking * groups + 4)
    assert manager.grow(0, 2 * lacking, 2 * (lacking + ahead))
    assert found(manager, first) == [20 - 2 * (lacking + ahead)]
    left = 10 - lacking - ahead
    assert manager.grow(1, 0, 2 * left), "what is left of the run are those that are lacking: none is ahead"
    assert found(manager, first, second) == [0, 20]


def test_pages_that_left_a_window_are_not_evicted_ahead():
    """A sequence that goes on reads those after them, and others may yet begin with them."""
    manager = make_windowed(page_size=1, pages=4 * AHEAD_PART, rows=3, windows=Windows((4,)))
    start(manager, 0, range(40))
    manager.published.publish(0, 40, None)
    manager.slide(np.array([0]), np.array([40], np.int32))
    assert manager.prefix.cached > 4
    assert manager.grow(1, 0, manager.allocator.free)
    assert manager.grow(2, 0, 1)
    assert (manager.allocator.free, manager.prefix.evicted[Cause.CAPACITY]) == (0, 1)


@pytest.mark.parametrize("policy", POLICIES.values())
def test_any_policy_gives_up_only_what_it_was_offered(policy):
    chosen = policy(8)
    chosen.published([0, 1, 2, 3], [bytes([i]) * 32 for i in range(4)])
    chosen.released(np.array([0, 1, 2, 3], np.int32))
    for node in (3, 1, 2):
        chosen.offer(node)
    chosen.withdraw(1)
    assert sorted(int(chosen.choose(1)[0]) for _ in range(2)) == [2, 3]
    chosen.offer(0)
    assert chosen.choose(4).tolist() == [0]


def test_a_queue_of_withdrawn_offers_does_not_grow():
    policy = LeastRecentlyUsed(8)

    def size_after(offers: int) -> int:
        for _ in range(offers):
            policy.released(np.array([5], np.int32))
            policy.offer(5)
            policy.withdraw(5)
        return len(pickle.dumps(policy))

    assert size_after(1000) < size_after(100) + 1000, "bytes"


def test_causes_and_lifetimes_of_pages_that_lost_their_names():
    manager = make_manager(page_size=2, pages=8, rows=2)
    manager.pool.begin(100.0, 1)
    leave(manager, A)
    manager.pool.begin(107.0, 2)
    evict(manager, 2)
    assert dict(manager.prefix.evicted) == {Cause.CAPACITY: 2, Cause.RESET: 0, Cause.FAULT: 0}
    expected = [0] * (len(LIFETIMES) + 1)
    expected[LIFETIMES.index(10)] = 2
    assert manager.prefix.lifetimes.tolist() == expected
    assert manager.prefix.lifetime_seconds == 14.0
    leave(manager, B)
    assert manager.published.reset() == 4
    start(manager, 0, A)
    manager.published.publish(0, 6, None)
    manager.published.distrust(0)
    assert dict(manager.prefix.evicted) == {Cause.CAPACITY: 2, Cause.RESET: 4, Cause.FAULT: 3}
    assert manager.prefix.lifetimes.sum() == 2, "lifetimes are of pages that lost their place to another"


@pytest.mark.parametrize(("seconds", "place"), [(0.05, 0), (0.1, 0), (0.2, 1), (3600, -2), (4000, -1)])
def test_lifetimes_fall_into_classes_with_their_upper_bounds(seconds, place):
    manager = make_manager(page_size=2, pages=1, rows=2)
    leave(manager, [1, 1])
    manager.pool.begin(seconds, 2)
    evict(manager, 1)
    assert manager.prefix.lifetimes[place] == 1
