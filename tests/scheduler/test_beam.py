"""A search's choice of hypotheses, also where two are equal or nearly so, and its end."""

import numpy as np

from scheduler.beam import BeamSearch, Hypothesis


def search(width: int = 2, penalty: float = 1.0, count: int = 1, longest: int = 4) -> BeamSearch:
    return BeamSearch(width, penalty, count, longest, stop_ids=frozenset({0}))


def hypothesis(total: float, length: int = 1) -> Hypothesis:
    return Hypothesis(None, 5, total, length, total, 1, np.empty(0, np.int32), np.empty(0, np.float32))


def offer(to: BeamSearch, slot: int, *tokens: tuple[int, float]) -> None:
    ids, logprobs = zip(*tokens, strict=True)
    to.offer(slot, np.array(ids, np.int32), np.array(logprobs, np.float32))


def moves(of: BeamSearch) -> list[tuple[int, int]]:
    """Slot that each of the next hypotheses comes from, and its token."""
    return [(move.parent, move.token) for move in of.next_round()]


def test_of_equal_sums_the_first_slot_goes_on_then_the_lowest_token():
    one = search()
    one.live = {0: hypothesis(-1.0), 1: hypothesis(-1.0)}
    offer(one, 1, (3, -1.0), (4, -1.0))
    offer(one, 0, (9, -1.0), (8, -1.0))
    assert moves(one) == [(0, 8), (0, 9)]


def test_sums_are_told_apart_where_single_precision_cannot():
    one = search()
    one.live = {0: hypothesis(-(2.0**24)), 1: hypothesis(-(2.0**24))}
    offer(one, 0, (3, -1.0))
    offer(one, 1, (4, -0.5))
    assert moves(one) == [(1, 4), (0, 3)]


def test_an_offer_keeps_nothing_of_the_step_s_arrays():
    one = search()
    ids, logprobs = np.array([3, 4], np.int32), np.array([-1.0, -2.0], np.float32)
    one.offer(0, ids, logprobs)
    ids[:], logprobs[:] = 7, 0.0
    assert moves(one) == [(0, 3), (0, 4)]


def test_a_search_goes_on_while_a_longer_result_may_still_be_better():
    """With a penalty above 0 length improves a score: -3 at length 4 is -0.75."""
    one = search(width=1)
    offer(one, 0, (0, -1.0), (3, -3.0))
    assert moves(one) == [(0, 3)]
    assert not one.is_over


def test_a_search_is_over_where_the_longest_result_is_no_better():
    one = search(width=1)
    offer(one, 0, (0, -1.0), (3, -4.0))
    assert moves(one) == []
    assert one.is_over
    assert [found.score for found in one.finished] == [-1.0]
