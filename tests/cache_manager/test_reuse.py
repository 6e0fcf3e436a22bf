"""The default eviction policy beside least recently used, by what it keeps: on real traffic, and where it is known
what is worth keeping.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cache_manager.policies import POLICIES
from cache_manager.reuse import Hazards, ReuseAware, gittins_index, hazard_sums
from cache_manager.settings import POLICIES as NAMES
from cache_manager.settings import CacheSettings
from cache_manager.simulation import simulate

TRACE = Path(__file__).parents[2] / "rpc" / "loadgen" / "traces" / "mooncake_conversation_1000.jsonl"
Requests = list[list[int]]


def hit_rate(requests: Requests, capacity: int, policy: str = CacheSettings().eviction) -> float:
    return simulate(requests, capacity, POLICIES[policy]).hit_rate


def hot_prefixes_among_one_time_prompts() -> Requests:
    """Eight prefixes that return all the time, each between prompts that are not repeated."""
    fresh, requests = iter(range(1000, 10**9)), []
    for i in range(600):
        hot = [100 + 10 * (i % 8) + j for j in range(10)]
        requests += [hot, [next(fresh) for _ in range(40)]]
    return requests


def cyclic_scan() -> Requests:
    """120 prompts of ten blocks, over and over."""
    return [[1000 * (i % 120) + j for j in range(10)] for i in range(900)]


def drifting(seed: int) -> Requests:
    """Makes requests whose popular prefixes change every 300 requests."""
    draw = random.Random(seed)
    return [
        [10_000 * (i // 300) + 100 * min(draw.randrange(40), draw.randrange(40)) + j for j in range(10)]
        for i in range(600)
    ]


def multi_turn(seed: int) -> Requests:
    """Chats that grow by five blocks a turn, in which users come back after a while, or never."""
    draw, chats, requests = random.Random(seed), {}, []
    for i in range(700):
        live = [c for c in chats if draw.random() < 0.5] or [None]
        chat = draw.choice(live) if draw.random() < 0.6 else None
        if chat is None:
            chat = i
            chats[chat] = []
        chats[chat] = chats[chat] + [100 * i + j + 10**6 for j in range(5)]
        requests.append(chats[chat])
        if draw.random() < 0.3 or len(chats[chat]) > 60:
            del chats[chat]
    return requests


def test_the_names_in_settings_are_the_policies() -> None:
    assert set(NAMES) == set(POLICIES)


@pytest.mark.parametrize(("capacity", "least"), [(300, 1.1), (1000, 1.3), (3000, 1.4)])
def test_real_conversations_hit_more_often(capacity: int, least: float) -> None:
    requests = [json.loads(line)["hash_ids"] for line in TRACE.read_text().splitlines()]
    ours, theirs = hit_rate(requests, capacity), hit_rate(requests, capacity, "lru")
    assert ours >= least * theirs, (ours, theirs)


def test_one_time_prompts_do_not_flush_what_returns() -> None:
    requests = hot_prefixes_among_one_time_prompts()
    most = (600 - 8) * 10 / sum(len(r) for r in requests)
    assert hit_rate(requests, 150, "lru") == 0.0
    assert hit_rate(requests, 150) > 0.9 * most


def test_a_scan_that_is_larger_than_the_cache_hits_as_far_as_it_fits() -> None:
    assert hit_rate(cyclic_scan(), 1000, "lru") == 0.0
    assert hit_rate(cyclic_scan(), 1000) > 0.5


@pytest.mark.parametrize("make", [drifting, multi_turn], ids=lambda make: make.__name__)
@pytest.mark.parametrize("capacity", [50, 500])
@pytest.mark.sample(2)
def test_it_is_nowhere_much_worse(make: Callable[[int], Requests], capacity: int) -> None:
    """A single trace is left to chance: 50 blocks are fewer than the longest chats have."""
    ours = theirs = 0.0
    for seed in range(5, 10):
        requests = make(seed)
        each_ours, each_theirs = hit_rate(requests, capacity), hit_rate(requests, capacity, "lru")
        assert each_ours >= 0.9 * each_theirs
        ours, theirs = ours + each_ours, theirs + each_theirs
    assert ours >= 0.95 * theirs


def test_a_cache_that_holds_everything_hits_whatever_can_hit() -> None:
    requests = multi_turn(5)
    blocks = len({block for request in requests for block in request})
    assert hit_rate(requests, blocks) == hit_rate(requests, blocks, "lru")


def test_worth_is_the_best_ratio_over_all_horizons() -> None:
    """Against the definition, term by term."""
    random_ = np.random.default_rng(1)
    hazard, widths = random_.uniform(0, 0.9, (3, 7)), random_.uniform(1, 9, 7)
    for kind in range(3):
        for age in range(7):
            ratios, alive, hits, time = [], 1.0, 0.0, 0.0
            for step in range(age, 7):
                h = hazard[kind, step]
                hits, time = hits + alive * h, time + alive * widths[step] * (1 - h / 2)
                alive *= 1 - h
                ratios.append(hits / time)
            assert gittins_index(hazard_sums(hazard[kind], widths), age) == pytest.approx(max(ratios))


def test_ages_fall_into_half_octaves() -> None:
    hazards = Hazards(1000)
    assert [hazards.age_bin(age) for age in (0, 1, 2, 3, 4, 6, 8, 100)] == [0, 0, 2, 3, 4, 5, 6, 13]
    assert hazards.age_bin(10**12) == hazards.bins - 1


def test_a_class_that_returns_is_worth_more_than_one_that_does_not() -> None:
    hazards = Hazards(100)
    now = 0
    for _ in range(200):
        now += 10
        hazards.advance(now)
        hazards.open(0, 5)
        hazards.open(7, 5)
        if now > 100:
            hazards.close({(now - 40, 7): 5}, hit=True)
    assert hazards.worth(7, 20) > 5 * hazards.worth(0, 20)


def test_a_page_that_no_request_has_left_is_not_remembered() -> None:
    """A reset takes the names of held pages too: these were not waited for, and no request had used them before."""
    policy = ReuseAware(10)
    names = [bytes([i]) * 32 for i in range(3)]
    policy.published([0, 1, 2], names)
    policy.released(np.array([0, 1], np.int32))
    policy.evicted(np.array([2, 1, 0]), names[::-1])
    policy.published([5, 6, 7], names)
    assert [policy.requests_of(node) for node in (5, 6, 7)] == [1, 1, 0]
