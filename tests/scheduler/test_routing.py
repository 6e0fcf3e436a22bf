"""Requests go to the engine with the least to compute."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.routing import ReplicaView, choose, matched_pages

PAGE = 16


def view(waiting: int = 0, running: int = 0, free: int = 1000, matched: int = 0) -> ReplicaView:
    return ReplicaView(waiting, running, free, PAGE, matched)


def chosen_of(views: Sequence[ReplicaView], length: int, draw: Callable[[int], int]) -> int:
    return choose([one.matched for one in views], views.__getitem__, length, draw)


def draws(seed: int = 0) -> Callable[[int], int]:
    return random.Random(seed).randrange


@pytest.mark.parametrize(
    ("views", "length", "best"),
    [
        ([view(waiting=500), view()], 100, 1),
        ([view(running=9), view(running=2)], 100, 1),
        ([view(matched=96), view()], 100, 0),
        ([view(matched=96, waiting=50), view()], 100, 0),
        ([view(matched=96, waiting=500), view()], 100, 1),
        ([view(free=2), view(running=1)], 100, 1),
        ([view(free=2, matched=80), view(running=1)], 100, 0),
    ],
    ids=["queue", "decodes", "prefix", "prefix-outweighs", "busy-holder-loses", "no-pages", "pages-it-shares"],
)
def test_the_least_to_compute_wins(views: list[ReplicaView], length: int, best: int) -> None:
    assert {chosen_of(views, length, draws(seed)) for seed in range(20)} == {best}


def test_equals_take_turns() -> None:
    draw = draws()
    chosen = [chosen_of([view()] * 3, 100, draw) for _ in range(300)]
    assert all(chosen.count(i) > 60 for i in range(3))


def test_among_many_the_best_holder_is_always_looked_at() -> None:
    views = [view() for _ in range(50)]
    views[37] = view(matched=96)
    assert {chosen_of(views, 100, draws(seed)) for seed in range(50)} == {37}


def test_three_of_many_are_looked_at() -> None:
    seen, views = list[int](), [view() for _ in range(1000)]

    def look(place: int) -> ReplicaView:
        seen.append(place)
        return views[place]

    chosen = choose([0] * len(views), look, 100, draws())
    assert chosen in seen
    assert len(seen) <= 3


@settings(deadline=None)
@given(
    st.lists(st.builds(view, *(st.integers(0, 5000), st.integers(0, 64), st.integers(0, 500))), min_size=1, max_size=9),
    st.integers(1, 4000),
    st.integers(0, 2**32),
)
def test_one_of_them_is_chosen_and_no_worse_than_another_that_was_drawn(
    views: list[ReplicaView], length: int, seed: int
) -> None:
    place = chosen_of(views, length, draws(seed))
    assert 0 <= place < len(views)
    if len(views) <= 3:
        assert views[place].cost(length) == min(v.cost(length) for v in views)


def spread(pick: Callable[[Sequence[ReplicaView]], int], frontends: int = 4, replicas: int = 8) -> int:
    """Longest queue where several frontends send 400 requests and hear of each other only every 40."""
    told, real = [0] * replicas, [0] * replicas
    own = [[0] * replicas for _ in range(frontends)]
    worst = 0
    for i in range(400):
        mine = own[i % frontends]
        place = pick([view(waiting=100 * (t + m)) for t, m in zip(told, mine, strict=True)])
        mine[place] += 1
        real[place] += 1
        if i % 40 == 39:
            real = [max(0, n - 5) for n in real]
            worst = max(worst, *real)
            told, own = list(real), [[0] * replicas for _ in range(frontends)]
    return worst


def test_frontends_that_do_not_hear_of_each_other_do_not_run_to_the_same_replica() -> None:
    """Two random choices make shorter queues than the least loaded of all."""
    draw = draws(1)
    by_two = spread(lambda views: chosen_of(views, 100, draw))
    by_least = spread(lambda views: min(range(len(views)), key=lambda i: views[i].cost(100)))
    assert by_two <= by_least


def test_a_prefix_ends_at_the_first_page_that_is_not_there() -> None:
    names = [bytes([i]) for i in range(5)]
    assert matched_pages(names, set()) == 0
    assert matched_pages(names, {names[0], names[1], names[3]}) == 2
    assert matched_pages(names, set(names)) == 5
    assert matched_pages([], {b"x"}) == 0
