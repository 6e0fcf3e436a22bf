"""Attempts with several sequences in the cases that are easiest to get wrong. Laws are in `test_sequences_laws`."""

from dataclasses import replace

import pytest

from cache_manager.tier import HostTier
from scheduler.events import Abort, EndReason, Event, StepOutputs, Submit
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits
from tests.scheduler.test_scheduler import engine, reasons, result_of, step
from tests.scheduler.workloads import make_request

LONG = tuple(range(12))


def request(attempt: int = 1, count: int = 3, max_tokens: int = 2, queue_timeout: float | None = None) -> Request:
    return replace(make_request(attempt, LONG, max_tokens, queue_timeout=queue_timeout), count=count)


def play(scheduler: Scheduler, *events: list[Event], now: float = 0.0) -> list[StepOutputs]:
    """A turn for each of these lists, and more until nothing is left to do."""
    outputs = [step(scheduler, now, some) for some in events]
    while scheduler.has_work:
        assert len(outputs) < 50, "still at work"
        outputs.append(step(scheduler, now))
    assert scheduler.live_attempts() == []
    assert scheduler.cache.pool.free == scheduler.cache.pool.total
    return outputs


def tokens_of(outputs: list[StepOutputs]) -> dict[int, int]:
    """Counts the tokens of each sequence."""
    indices = [index for one in outputs for index in one.indices.tolist()]
    return {index: indices.count(index) for index in sorted(set(indices))}


# A prompt of 12 tokens takes three steps of 4: finished before, while and after it is computed.
@pytest.mark.parametrize("turn", [0, 1, 2, 3])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_is_finished_before_its_prompt_is_computed(index: int, turn: int) -> None:
    scheduler = engine(chunk=4, prefix_cache=True)
    turns: list[list[Event]] = [[] for _ in range(5)]
    turns[0].append(Submit(1, request()))
    turns[turn].append(Abort(1, index))
    outputs = play(scheduler, *turns)
    ends = [(end.index, end.reason, end.more) for one in outputs for end in one.ends]
    assert (index, EndReason.FINISHED, True) in ends
    assert [end[0] for end in ends if end[1] is EndReason.LENGTH] == [i for i in range(3) if i != index]
    assert [end[2] for end in ends] == [True, True, False]
    assert tokens_of(outputs) == {i: 2 for i in range(3) if i != index or turn == 3} | ({index: 1} if turn == 3 else {})


def test_who_takes_the_place_of_a_finished_one_has_computed_nothing_before() -> None:
    """The first had 4 tokens of its prompt when it lost its row; the next one computes them for the first time."""
    scheduler = engine(chunk=4)
    scheduler.cache.pool.tier = HostTier(4)
    plan = scheduler.schedule(0.0, [Submit(1, request())])
    (page,) = scheduler.cache.tables.row(0)[:1].tolist()
    scheduler.commit(replace(result_of(plan, []), lost_pages=(page,)), 0.0)
    assert [sequence.lost for sequence in scheduler.queue.in_order()] == [4]
    outputs = play(scheduler, [Abort(1, 0)])
    assert tokens_of(outputs) == {1: 2, 2: 2}
    assert outputs[-1].stats.recomputed_tokens == 0


def test_all_are_finished_one_by_one_before_their_prompt_is_computed() -> None:
    scheduler = engine(chunk=4)
    outputs = play(scheduler, [Submit(1, request())], [Abort(1, 0)], [Abort(1, 2), Abort(1, 1)])
    assert tokens_of(outputs) == {}
    assert [end.more for one in outputs for end in one.ends] == [True, True, False]


def test_who_takes_over_a_prompt_waits_no_longer() -> None:
    """The first of three has left the queue: the others' time is up when it was up for all."""
    scheduler = engine(rows=2)
    step(scheduler, 0.0, [Submit(1, make_request(1, 3, 30)), Submit(2, request(2, queue_timeout=5.0))])
    step(scheduler, 1.0, [Abort(2, 0)])
    assert scheduler.queue.attempts() == [2]
    assert reasons(step(scheduler, 4.9)) == []
    assert reasons(step(scheduler, 5.0)) == [(2, EndReason.QUEUE_TIMEOUT)]


def test_an_attempt_starts_once() -> None:
    scheduler = engine(rows=4)
    outputs = play(scheduler, [Submit(1, request(max_tokens=4), ((5,), (6, 7), ()))])
    assert [start.attempt for one in outputs for start in one.starts] == [1]


def test_an_attempt_of_which_a_sequence_runs_is_not_refused() -> None:
    """Three with output of their own have one row, and wait for each other for longer than a queue would let them."""
    scheduler = engine(rows=1, queue=QueueLimits(wait=5.0))
    submit = Submit(1, request(max_tokens=8), ((5,), (6, 7), (8,)))
    outputs = [step(scheduler, float(now), [submit] if now == 0 else []) for now in range(30)]
    assert [end.reason for one in outputs for end in one.ends] == [EndReason.LENGTH] * 3


def test_those_that_have_ended_cost_nobody_a_place_in_line() -> None:
    """The last of four goes on, and was there before another attempt."""
    scheduler = engine(rows=1)
    step(scheduler, 0.0, [Submit(1, make_request(1, 3, 30))])
    step(scheduler, 0.0, [Submit(2, request(2, 4), (None, None, None, (5,))), Submit(3, make_request(3, 3, 2))])
    orders = [one.order for one in scheduler.queue.in_order()]
    assert scheduler.queue.attempts() == [2, 3]
    assert orders == sorted(set(orders)), "each has its own place"
