"""The guard knows least recently used's hits exactly, and bounds what the default policy may lose to it."""

import pickle
import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager import guard
from cache_manager.eviction import LeastRecentlyUsed
from cache_manager.guard import RecencyGuard, RecencyShadow, margin
from cache_manager.reuse import ReuseAware
from cache_manager.simulation import simulate
from tests.cache_manager.sample import leave
from tests.cache_manager.sequences import make_manager
from tests.support.planted import plant

Requests = list[list[int]]


def cyclic(draw: random.Random) -> Requests:
    """One prompt after the other, over and over: least recently used hits nothing, or all."""
    prompts, length = draw.randint(3, 30), draw.randint(1, 8)
    return [[100 * (i % prompts) + j for j in range(length)] for i in range(120)]


def skewed(draw: random.Random) -> Requests:
    """Popularity by Zipf's law."""
    weights = [1 / (i + 1) for i in range(80)]
    return [[100 * i + j for j in range(1 + i % 7)] for i in draw.choices(range(80), weights, k=120)]


def shifting(draw: random.Random) -> Requests:
    """A working set that changes every 50 requests."""
    return [[10_000 * (i // 50) + 100 * draw.randrange(8) + j for j in range(5)] for i in range(120)]


def recent(draw: random.Random) -> Requests:
    """Requests for what was used last: none does better here than least recently used."""
    stack, requests = list[int](), Requests()
    for i in range(120):
        depth = int(draw.expovariate(1 / 8))
        prompt = stack.pop(depth) if depth < len(stack) and draw.random() < 0.7 else i
        stack.insert(0, prompt)
        requests.append([100 * prompt + j for j in range(1 + prompt * 31 % 12)])
    return requests


def conversations(draw: random.Random) -> Requests:
    """Prompts that grow from turn to turn, out of few beginnings, with blocks that are fresh each time."""
    fresh, live, requests = iter(range(1000, 10**9)), [[i, i + 50] for i in range(5)], Requests()
    for _ in range(120):
        prompt = draw.choice(live) + [next(fresh) for _ in range(draw.randint(0, 4))]
        live.append(prompt)
        if len(live) > 20:
            live.pop(draw.randrange(5, 20))
        requests.append(prompt)
    return requests


def misled(draw: random.Random) -> Requests:
    """Teaches that old prompts return, then takes up only new ones, and turns around again."""
    old, requests = cyclic(draw), Requests()
    for part in range(6):
        requests += [[10**6 + i for i in ids] for ids in recent(draw)[:60]] if part % 2 else old[:60]
    return requests


def arbitrary(draw: random.Random) -> Requests:
    """Few ids, so that requests branch anywhere, and repeat ids."""
    return [[draw.randrange(3) for _ in range(draw.randint(1, 6))] for _ in range(120)]


TRAFFIC = [cyclic, skewed, shifting, recent, conversations, misled, arbitrary]
drawn = given(st.sampled_from(TRAFFIC), st.integers(0, 10**6).map(random.Random), st.integers(2, 60))


def hits_of_both(requests: Requests, capacity: int) -> tuple[int, int, ReuseAware]:
    """Returns the hits of the default policy and of least recently used, and the default policy as it ended."""
    made = list[ReuseAware]()

    def make(pages: int) -> ReuseAware:
        made.append(ReuseAware(pages))
        return made[0]

    ours = simulate(requests, capacity, make).hits
    return ours, simulate(requests, capacity, LeastRecentlyUsed).hits, made[0]


def check_count(make: Callable[[random.Random], Requests], draw: random.Random, capacity: int) -> None:
    """With a budget that neither ends nor is limited, its change is the difference of the hits."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("START", 10**6), ("CREDIT", 2 * 10**6), ("EXPLORE", 0)):
            patch.setattr(guard, name, value)
        ours, theirs, policy = hits_of_both(make(draw), capacity)
        assert policy.guard.budget - 10**6 * capacity == ours - theirs


def check_bound(make: Callable[[random.Random], Requests], draw: random.Random, capacity: int) -> None:
    """The bound of `RecencyGuard`."""
    requests = make(draw)
    ours, theirs, _ = hits_of_both(requests, capacity)
    blocks = sum(len(ids) for ids in requests)
    assert ours >= theirs - capacity * (1 + guard.START) - guard.EXPLORE * blocks


@settings(max_examples=10, deadline=None)
@drawn
def test_hits_of_least_recently_used_are_counted_exactly(make, draw, capacity) -> None:
    check_count(make, draw, capacity)


@settings(max_examples=10, deadline=None)
@drawn
def test_losses_are_bounded(make, draw, capacity) -> None:
    check_bound(make, draw, capacity)


@settings(max_examples=8, deadline=None)
@drawn
def test_with_a_spent_budget_it_is_least_recently_used(make, draw, capacity) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecencyGuard, "used", lambda *_: None)
        patch.setattr(RecencyGuard, "__init__", lambda self, _pages: setattr(self, "margin", 0.0))
        patch.setattr(RecencyGuard, "evicted", lambda *_: None)
        ours, theirs, _ = hits_of_both(make(draw), capacity)
        assert ours == theirs


def stubborn_traffic(length: int) -> Requests:
    """Requests for what was used last, so long that a policy which errs must lose more than the bound."""
    draw, stack, requests = random.Random(1), list[int](), Requests()
    for i in range(length):
        depth = int(draw.expovariate(1 / 100))
        prompt = stack.pop(depth) if depth < len(stack) and draw.random() < 0.7 else i
        stack.insert(0, prompt)
        requests.append([100 * prompt + j for j in range(1 + prompt * 31 % 20)])
    return requests


def test_where_recency_is_all_it_loses_little() -> None:
    """The estimates alone lose 6 % here."""
    requests = stubborn_traffic(3000)
    ours, theirs, _ = hits_of_both(requests, 300)
    assert ours >= 0.98 * theirs, (ours, theirs)


def check_reset() -> None:
    """Pages that a reset removed count as no hits of any policy."""
    manager = make_manager(page_size=2, pages=8, rows=2, make_policy=ReuseAware)
    policy = manager.prefix.policy
    assert isinstance(policy, ReuseAware)
    leave(manager, [1, 1, 1, 1])
    before = policy.guard.budget
    manager.published.reset()
    leave(manager, [1, 1, 1, 1])
    assert policy.guard.budget == before + 2 * guard.EXPLORE


def test_a_reset_is_no_loss_to_least_recently_used() -> None:
    check_reset()


def removed_like_evicted(_real: Callable) -> Callable:
    return lambda self, _last, pages: self.evicted(pages)


def test_a_reset_that_counts_as_eviction_is_found(monkeypatch) -> None:
    plant(monkeypatch, RecencyGuard, "removed", removed_like_evicted)
    plant(monkeypatch, RecencyShadow, "shrink", never_shrinks)
    with pytest.raises(AssertionError):
        check_reset()


def test_the_margin_narrows_with_the_budget() -> None:
    shares = [-1, 0, 0.25, 0.5, 0.75, 0.95, 1, 2]
    assert [margin(share) for share in shares] == pytest.approx([0, 0, 0.25, 0.5, 0.5, 0.75, 1, 1])


def test_a_shadow_evicts_the_oldest_and_then_the_tail() -> None:
    shadow = RecencyShadow()
    shadow.put(1, 5)
    shadow.put(2, 4)
    shadow.shrink(6)
    assert len(shadow) == 6
    assert shadow.take_out(1, 3) == 2, "of the first three pages two are held"
    assert shadow.take_out(2, 1) == 1
    assert (shadow.take_out(1, 1), len(shadow)) == (0, 3)


def never_shrinks(_real: Callable) -> Callable:
    return lambda _self, _most: None


def counts_what_was_never_held(real: Callable) -> Callable:
    return lambda self, last, pages: max(real(self, last, pages), pages)


def misses_are_hits(real: Callable) -> Callable:
    return lambda self, now, pages, _held, returned: real(self, now, pages, sum(returned.values()), returned)


def evictions_are_not_counted(_real: Callable) -> Callable:
    return lambda _self, _pages: None


def forgets_the_last_request(_real: Callable) -> Callable:
    return lambda _self, _now, _pages: None


def check_counts(seeds: Iterable[int]) -> None:
    for seed in seeds:
        check_count(recent, random.Random(seed), 20)
        check_count(conversations, random.Random(seed), 20)


@pytest.mark.parametrize(
    ("target", "name", "stand_in"),
    [
        (RecencyShadow, "shrink", never_shrinks),
        (RecencyShadow, "take_out", counts_what_was_never_held),
        (RecencyShadow, "put", forgets_the_last_request),
        (RecencyGuard, "used", misses_are_hits),
        (RecencyGuard, "evicted", evictions_are_not_counted),
    ],
)
def test_a_planted_fault_of_the_count_is_found(monkeypatch, target, name, stand_in) -> None:
    plant(monkeypatch, target, name, stand_in)
    with pytest.raises((AssertionError, KeyError, StopIteration)):
        check_counts(range(6))


def evicts_the_newest(_real: Callable) -> Callable:
    return lambda _self, candidates: max(candidates)[1]


def test_a_policy_that_does_not_obey_the_guard_is_found(monkeypatch) -> None:
    """A policy that evicts what was used last loses more than the bound."""

    plant(monkeypatch, ReuseAware, "_victim", evicts_the_newest)
    with pytest.raises(AssertionError):
        check_bound(lambda _draw: stubborn_traffic(1500), random.Random(0), 100)


def test_memory_is_bounded_by_the_pages() -> None:
    def size_after(requests: int) -> int:
        """Returns the pickled bytes of a guard of 50 pages, after requests of ten pages each."""
        small = RecencyGuard(50)
        for now in range(1, requests):
            small.used(10 * now, 10, 0, {})
            small.evicted(10 if now > 5 else 0)
        return len(pickle.dumps(small))

    assert size_after(2000) < size_after(100) + 100
