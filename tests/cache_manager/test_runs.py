"""Runs of nodes, ghosts of runs, and policies of a user's own."""

import tracemalloc
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.ghosts import Ghosts, Recalled
from cache_manager.ledger import verify
from cache_manager.manager import CacheManager
from cache_manager.runs import NodeRuns, Nodes
from tests.cache_manager.sample import leave, match, start
from tests.cache_manager.sequences import make_manager


def nodes(*numbers: int) -> Nodes:
    return np.array(numbers)


def hashes(letters: str) -> list[bytes]:
    return [letter.encode() * 32 for letter in letters]


def test_a_run_ends_where_its_nodes_are_in_another_one() -> None:
    runs = NodeRuns()
    runs.take_out(nodes(7, 3, 5, 100))
    runs.put(nodes(7, 3, 5, 100), kind=2, last=9)
    assert runs.tail(100, 9).tolist() == [100, 5, 3, 7]
    assert runs.tail(100, 2).tolist() == [100, 5]
    taken = runs.take_out(nodes(7, 3, 8))
    assert [(part.run and part.run.kind, part.start, part.end) for part in taken] == [(2, 0, 2), (None, 2, 3)]
    runs.put(nodes(7, 3, 8), kind=1, last=10)
    assert runs.tail(100, 9).tolist() == [100, 5]
    assert runs.tail(8, 9).tolist() == [8, 3, 7]
    assert runs.tail(4, 9).tolist() == [4], "a node that is in no run"


def test_runs_without_nodes_are_gone() -> None:
    runs = NodeRuns()
    for last in range(100):
        runs.take_out(nodes(1, 2, 3))
        runs.put(nodes(1, 2, 3), kind=0, last=last)
    assert len(runs) == 1
    runs.take_out(nodes(3, 2, 1))
    assert len(runs) == 0
    assert runs.run_of(1) is None


def test_requests_with_a_common_prefix_do_not_each_keep_its_nodes() -> None:
    runs, prefix = NodeRuns(), np.arange(4096)
    tracemalloc.start()
    for last in range(500):
        path = np.append(prefix, 5000 + last)
        runs.take_out(path)
        runs.put(path, kind=0, last=last)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(runs) == 500
    assert held < 10 * prefix.nbytes, "and not 500 times as much"
    assert runs.tail(5499, 2).tolist() == [5499, 4095]
    assert runs.tail(5000, 2).tolist() == [5000]


def test_ghosts_are_recalled_as_far_as_they_are_the_same() -> None:
    ghosts = Ghosts(100)
    ghosts.remember(hashes("abcd"), kind=3, last=7)
    assert ghosts.recall(hashes("xy")) == []
    assert ghosts.recall(hashes("xab")) == [Recalled(1, 3, 3, 7)]
    assert ghosts.recall(hashes("ab")) == [], "they have come back"
    assert ghosts.recall(hashes("ce")) == [Recalled(0, 1, 3, 7)]
    assert ghosts.recall(hashes("d")) == [Recalled(0, 1, 3, 7)]


def test_the_oldest_ghosts_are_forgotten_when_a_generation_is_full() -> None:
    ghosts = Ghosts(4)
    assert not ghosts.remember(hashes("ab"), kind=1, last=5)
    assert not ghosts.remember(hashes("cd"), kind=2, last=6), "the first generation is full"
    assert ghosts.recall(hashes("c")) == [Recalled(0, 1, 2, 6)]
    assert not ghosts.remember(hashes("efg"), kind=3, last=7)
    assert ghosts.remember(hashes("h"), kind=4, last=8) == {(5, 1): 2, (6, 2): 1}
    assert ghosts.recall(hashes("abd")) == []
    assert ghosts.recall(hashes("efgh")) == [Recalled(0, 3, 3, 7), Recalled(3, 4, 4, 8)]


class FirstOffered:
    """A policy of a user's own: one node at a time, in the order of the offers."""

    name = "first offered"

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.offered = deque[int]()

    def __len__(self) -> int:
        return len(self.offered)

    def published(self, nodes: Sequence[int], names: Sequence[bytes]) -> None:
        pass

    def released(self, nodes: NDArray[np.int32]) -> None:
        pass

    def offer(self, node: int) -> None:
        self.withdraw(node)
        self.offered.append(node)

    def withdraw(self, node: int) -> None:
        if node in self.offered:
            self.offered.remove(node)

    def choose(self, most: int) -> Nodes:
        return np.array([self.offered.popleft()])

    def evicted(self, nodes: Nodes, names: Sequence[bytes]) -> None:
        assert len(nodes) == len(names) >= 1


def found(manager: CacheManager, *prompts: list[int]) -> list[int]:
    return [match(manager, prompt).tokens for prompt in prompts]


def test_a_policy_of_a_users_own_decides_what_goes() -> None:
    manager = make_manager(page_size=2, pages=6, rows=2, make_policy=FirstOffered)
    for prompt in ([1] * 6, [2] * 6, [1] * 6):
        leave(manager, prompt)
    manager.pool.shrink_cache(4)
    assert found(manager, [1] * 6, [2] * 6) == [4, 4], "one page of each: the second went on offer after the first"
    verify(manager)


class Greedy(LeastRecentlyUsed):
    """Names nodes that must not go with the one it chooses: held ones, those with other children, and strangers."""

    tells: NDArray[np.intp] = np.array([], np.intp)

    def choose(self, most: int) -> Nodes:
        return np.concatenate((super().choose(1), self.tells))[:most]


@pytest.mark.parametrize(("reason", "left"), [("held", 4), ("another child", 4), ("stranger", 2)])
def test_a_policy_that_names_too_many_takes_nothing_that_must_stay(reason: str, left: int) -> None:
    """Two pages must go: the last one of the prompt, and another one than the policy says."""
    manager = make_manager(page_size=2, pages=9, rows=2, make_policy=Greedy)
    prompt, policy = [1, 1, 2, 2, 3, 3], manager.prefix.policy
    assert isinstance(policy, Greedy)
    leave(manager, prompt)
    path = match(manager, prompt).nodes
    policy.tells = np.array(path[:1] if reason == "stranger" else path[-2::-1])
    if reason == "held":
        start(manager, 0, [1, 1, 2, 2, 9])
        leave(manager, [5] * 4, row=1)
    elif reason == "another child":
        leave(manager, [1, 1, 2, 2, 4, 4])
    manager.pool.shrink_cache(manager.prefix.cached - 2)
    verify(manager)
    assert found(manager, prompt) == [left]
    manager.pool.shrink_cache(0)
    verify(manager)
    assert found(manager, prompt) == [4 if reason == "held" else 0]
