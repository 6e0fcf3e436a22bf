"""The door of the queue: bounds in requests, in tokens and in predicted seconds, each with an honest message."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scheduler.backpressure import FEWEST_STEPS, Backpressure
from scheduler.costs import MEMORY, StepCost
from scheduler.queue import QueueLoad
from scheduler.settings import QueueLimits

counts = st.integers(0, 2000)
sizes = st.integers(0, 10**6)
seconds = st.floats(1e-6, 1e6)


def admission(
    requests: int = 10, pools: float = 2.0, wait: float = 30.0, pool_tokens: int = 1000, rows: int = 8
) -> Backpressure:
    return Backpressure(QueueLimits(requests, pools, wait), pool_tokens, rows)


def observe(door: Backpressure, fixed: float, each: float, sizes: tuple[int, ...], times: int = 1) -> None:
    """Steps that cost `fixed` seconds and `each` for every token."""
    for _ in range(times):
        for tokens in sizes:
            door.observe_step(tokens, fixed + each * tokens)


def test_who_waits_behind_nobody_is_not_refused():
    door = admission()
    observe(door, 1000.0, 0.0, (1,), FEWEST_STEPS)
    assert door.refuse(QueueLoad(), QueueLoad(), 10**6, queue_timeout=0.001) is None


@pytest.mark.parametrize(("requests", "refused"), [(9, False), (10, True), (11, True)])
def test_requests_are_bounded(requests, refused):
    refusal = admission().refuse(QueueLoad(requests, 0), QueueLoad(requests, 0), 1, 30.0)
    assert (refusal is not None) == refused
    if refusal:
        assert refusal.message == f"the queue is full: {requests} requests wait, the limit is 10"


@pytest.mark.parametrize(("prompt", "refused"), [(500, False), (501, True)])
def test_tokens_are_bounded_by_pools(prompt, refused):
    refusal = admission(pools=2.0, pool_tokens=1000).refuse(QueueLoad(1, 1500), QueueLoad(1, 1500), prompt, 30.0)
    assert (refusal is not None) == refused
    if refusal:
        assert refusal.message == ("the queue is full: 1500 tokens wait, 501 more would pass the limit of 2000")


def test_predicted_wait_is_bounded_by_patience():
    door = admission()
    observe(door, 1.0, 0.0, (100,), FEWEST_STEPS)
    wait = door.predicted_wait(3, 700)
    assert door.refuse(QueueLoad(9, 900), QueueLoad(3, 700), 1, queue_timeout=wait) is None
    refusal = door.refuse(QueueLoad(9, 900), QueueLoad(3, 700), 1, queue_timeout=wait * 0.9)
    assert refusal.message == (f"the predicted wait is {wait:.1f} s, the request would wait at most {wait * 0.9:.1f} s")


def test_a_new_engine_refuses_nobody_by_a_prediction():
    """Its first steps compile and warm up; one that took a second would refuse most of the first burst."""
    door, waiting = admission(), QueueLoad(9, 900)
    observe(door, 100.0, 0.0, (10,), FEWEST_STEPS - 1)
    assert door.predicted_wait(*waiting) > 30.0
    assert door.refuse(waiting, waiting, 1, queue_timeout=30.0) is None
    observe(door, 100.0, 0.0, (10,))
    assert door.refuse(waiting, waiting, 1, queue_timeout=30.0) is not None


def test_nothing_is_predicted_before_the_first_step():
    door = admission()
    assert door.predicted_wait(1000, 10**9) == 0.0
    door.observe_step(0, 1.0)
    door.observe_step(10, 0.0)
    assert door.predicted_wait(1000, 10**9) == 0.0


def test_prediction_is_prompts_computed_and_outputs_decoded_at_full_batch():
    door = admission(rows=8)
    observe(door, 0.010, 0.0001, (8, 512, 100, 300), times=50)
    for _ in range(200):
        door.observe_output(40)
    prompts = 4000 * 0.0001
    decodes = 16 * 40 / 8 * (0.010 + 8 * 0.0001)
    assert door.predicted_wait(16, 4000) == pytest.approx(prompts + decodes, rel=1e-3)


def test_prediction_forgets_how_steps_were_once():
    door, fresh = admission(), admission()
    observe(door, 1.0, 0.01, (8, 512), times=200)
    observe(door, 0.001, 0.0001, (8, 512), times=1000)
    observe(fresh, 0.001, 0.0001, (8, 512), times=1000)
    assert door.predicted_wait(5, 450) == pytest.approx(fresh.predicted_wait(5, 450), rel=1e-3)


def test_steps_of_one_size_say_nothing_of_the_cost_of_a_token():
    door = admission(rows=8)
    observe(door, 0.010, 0.0001, (8,), times=50)
    for _ in range(1000):
        door.observe_output(64)
    assert door.predicted_wait(0, 10**6) == 0.0
    assert door.predicted_wait(8, 0) == pytest.approx(64 * (0.010 + 8 * 0.0001))


@example([(1, 1.0), (4979, 111.0), (587, 1.0), (1, 2.0)])
@given(st.lists(st.tuples(st.integers(1, 10_000), seconds), min_size=1, max_size=20))
def test_neither_part_of_a_steps_cost_is_negative(steps):
    cost = StepCost()
    for tokens, took in steps:
        cost.observe(tokens, took)
    fixed, each = cost.fit()
    longest = max(took for _, took in steps)
    assert fixed >= 0.0
    assert each >= 0.0
    assert fixed + each <= longest * (1 + 1e-9)


@example([(1, 1.0), (4979, 111.0), (587, 1.0), (1, 2.0)])
@given(st.lists(st.tuples(st.integers(1, 10_000), seconds), min_size=1, max_size=20))
def test_a_mean_step_costs_the_mean_time(steps):
    """The line of least squares goes through the means, also where a part of it would be negative and is not."""
    cost, weights = StepCost(), [MEMORY**age for age in reversed(range(len(steps)))]
    for tokens, took in steps:
        cost.observe(tokens, took)
    fixed, each = cost.fit()
    tokens, took = (sum(w * step[i] for w, step in zip(weights, steps, strict=True)) / sum(weights) for i in (0, 1))
    assert fixed + each * tokens == pytest.approx(took, rel=1e-6)


@given(st.integers(1, 10**6), st.lists(seconds, min_size=2, max_size=60))
def test_times_of_steps_of_one_size_are_noise_and_no_cost_of_a_token(tokens, times):
    cost = StepCost()
    for took in times:
        cost.observe(tokens, took)
    assert cost.fit()[1] == 0.0


@given(st.lists(st.tuples(st.integers(1, 10_000), seconds), max_size=20), counts, sizes, counts, sizes)
def test_more_work_never_waits_shorter(steps, requests, tokens, more_requests, more_tokens):
    door = admission()
    for computed, took in steps:
        door.observe_step(computed, took)
    wait = door.predicted_wait(requests, tokens)
    assert 0.0 <= wait <= door.predicted_wait(requests + more_requests, tokens + more_tokens)


@given(
    st.lists(st.tuples(counts, st.just(0.0) | seconds), max_size=80), st.lists(counts), counts, sizes, sizes, seconds
)
def test_every_refusal_says_why_and_a_time_worth_waiting(steps, outputs, requests, tokens, prompt, queue_timeout):
    door = admission()
    for computed, took in steps:
        door.observe_step(computed, took)
    for output in outputs:
        door.observe_output(output)
    refusal = door.refuse(QueueLoad(requests, tokens), QueueLoad(requests, tokens), prompt, queue_timeout)
    if refusal is not None:
        assert requests > 0
        assert refusal.message
        assert 1.0 <= refusal.retry_after <= 30.0
    elif requests:
        assert requests < 10
        assert tokens + prompt <= 2000
        known = sum(computed > 0 and took > 0 for computed, took in steps) >= FEWEST_STEPS
        assert door.predicted_wait(requests, tokens) <= queue_timeout or not known


def test_a_step_larger_than_any_before_is_expected_to_take_no_longer_than_in_proportion() -> None:
    cost = StepCost()
    assert cost.expected(10) is None
    for _ in range(5):
        cost.observe(1, 0.25)
    assert cost.expected(1) == pytest.approx(0.25)
    assert cost.expected(8) == pytest.approx(2.0)
    cost.observe(10, 0.5)
    assert cost.expected(10) < 0.6
    assert cost.expected(100) == pytest.approx(5.0)


def test_of_steps_of_the_largest_size_the_newest_says_what_a_larger_one_takes() -> None:
    """The first step of a size compiles or warms up; it would stand for ever."""
    cost = StepCost()
    cost.observe(10, 60.0)
    for _ in range(1000):
        cost.observe(10, 0.5)
    assert cost.expected(100) == pytest.approx(5.0, rel=1e-3)


@pytest.mark.parametrize("seconds", [0.0, -0.5])
def test_a_step_without_a_time_is_no_step(seconds: float) -> None:
    """A clock may stand still; what swapping took is measured by another clock and may be more."""
    door = admission()
    door.observe_step(10, seconds)
    assert door.cost.expected(10) is None


@pytest.mark.parametrize(("wait", "retry"), [(0.5, 1.0), (10.0, 5.0), (1000.0, 30.0)])
def test_a_refused_request_is_told_to_come_when_half_the_wait_is_over(wait: float, retry: float) -> None:
    door = admission(requests=1, rows=1)
    for _ in range(1000):
        door.observe_output(1)
    observe(door, wait, 0.0, (1,))
    refused = (door.refuse(QueueLoad(1, 1), QueueLoad(1, 1), 1, 1e9), door.refuse_tenant(QueueLoad(10, 1), 1))
    assert door.predicted_wait(1, 1) == pytest.approx(wait)
    assert [one.retry_after for one in refused[:1]] == [pytest.approx(retry)]
    assert refused[1].retry_after >= retry


@pytest.mark.parametrize(
    ("load", "prompt", "refused"),
    [
        (QueueLoad(0, 0), 10**6, False),
        (QueueLoad(4, 0), 1, False),
        (QueueLoad(5, 0), 1, True),
        (QueueLoad(1, 600), 400, False),
        (QueueLoad(1, 600), 401, True),
    ],
)
def test_a_tenant_fills_its_part_of_the_queue_and_no_more(load: QueueLoad, prompt: int, refused: bool) -> None:
    refusal = admission(requests=10, pools=2.0, pool_tokens=1000).refuse_tenant(load, prompt)
    assert (refusal is not None) == refused
    if refusal is not None:
        assert "the limits are 5 and 1000" in refusal.message
