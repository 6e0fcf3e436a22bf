"""Learned output lengths: by tenant and shape, with what others have where little is known, in bounded memory."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from cache_manager.manager import CacheManager
from scheduler.backpressure import Backpressure
from scheduler.events import Abort, Event, Submit
from scheduler.output_lengths import BORROWED, EDGES, FIRST_OUTPUT, MOST_KINDS, OutputLengths, RecentOutputs, bucket_of
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepResult
from tests.scheduler.executor import logprobs_of
from tests.scheduler.workloads import PATIENT, make_layout, make_request
from tests.support.planted import plant


def request(tenant: str = "a", prompt: int = 10, most: int = 1000, constrained: bool = False) -> Request:
    made = make_request(1, prompt, most, scope=Scope(tenant))
    params = replace(made.controls.logits_params, grammar="grammar" if constrained else "")
    return replace(made, controls=replace(made.controls, logits_params=params))


def learned(*outputs: tuple[Request, int], times: int = 200) -> OutputLengths:
    lengths = OutputLengths()
    for _ in range(times):
        for one, tokens in outputs:
            lengths.observe(tokens, one)
    return lengths


REQUESTS = st.builds(
    request, st.sampled_from("abc"), st.integers(1, 40), st.sampled_from((5, 100, 1000)), st.booleans()
)
OUTPUTS = st.lists(st.tuples(REQUESTS, st.integers(1, 1000)), max_size=40)


def test_kinds_are_told_apart() -> None:
    kinds = [request("a"), request("b"), request("a", prompt=300), request("a", most=90), request(constrained=True)]
    outputs = list(zip(kinds, (40, 400, 100, 80, 20), strict=True))
    lengths = learned(*outputs)
    for one, tokens in outputs:
        assert lengths.expected(one) == pytest.approx(tokens, rel=0.5), (
            "two tenants of one shape borrow from each other"
        )
    assert lengths.expected(kinds[0]) < 0.2 * lengths.expected(kinds[1])


def test_a_new_tenant_has_what_others_have_of_its_shape() -> None:
    lengths = learned((request("a"), 40), (request("a", prompt=300), 400))
    assert lengths.expected(request("new")) == pytest.approx(40, rel=0.5)
    assert lengths.expected(request("new", prompt=300)) == pytest.approx(400, rel=0.2)


def test_one_output_moves_a_kind_by_its_part() -> None:
    """The kind of the shape has it too, so it counts twice against what is borrowed."""
    lengths = learned((request("a", most=90), 60))
    before = lengths.expected(request("new"))
    lengths.observe(600, request("new"))
    own = (600 + BORROWED * lengths.mean) / (1 + BORROWED)
    assert lengths.expected(request("new")) == pytest.approx((600 + BORROWED * own) / (1 + BORROWED))
    assert before < own < 400


@given(OUTPUTS, REQUESTS)
def test_what_is_expected_is_within_what_was_seen(outputs: list[tuple[Request, int]], asked: Request) -> None:
    lengths = learned(*outputs, times=1)
    seen = [FIRST_OUTPUT, *(float(tokens) for _, tokens in outputs)]
    assert min(*seen, asked.max_tokens) - 1e-6 <= lengths.expected(asked) <= min(max(seen), asked.max_tokens) + 1e-6


@given(OUTPUTS, REQUESTS)
def test_an_output_that_has_come_far_is_expected_to_become_no_shorter(
    outputs: list[tuple[Request, int]], asked: Request
) -> None:
    beyond = learned(*outputs, times=1).expected_beyond(asked)
    within = beyond[asked.max_tokens >= EDGES]
    assert np.all(np.diff(within) >= -1e-6)
    assert np.all(within >= EDGES[: len(within)] - 1e-6)


@given(st.integers(0, 2**20))
def test_buckets_are_found_by_their_bounds(tokens: int) -> None:
    bucket = int(bucket_of(np.array([tokens]))[0])
    assert EDGES[bucket] <= max(tokens, 1)
    assert bucket + 1 == len(EDGES) or tokens < EDGES[bucket + 1]


def test_memory_is_bounded_and_the_latest_are_kept() -> None:
    lengths = OutputLengths()
    for number in range(2 * MOST_KINDS):
        lengths.observe(10, request(str(number)))
    assert lengths.kinds == MOST_KINDS
    lengths.observe(500, request(str(2 * MOST_KINDS - 1)))
    assert lengths.expected(request(str(2 * MOST_KINDS - 1))) > lengths.expected(request("0"))


def test_how_outputs_were_once_is_forgotten() -> None:
    lengths = learned((request(), 500))
    for _ in range(400):
        lengths.observe(20, request())
    assert lengths.expected(request()) == pytest.approx(20, rel=0.02)


def test_predictions_go_by_the_kind_of_request() -> None:
    door = Backpressure(QueueLimits(), 1000, 8)
    for _ in range(100):
        door.observe_step(8, 0.1)
        door.observe_output(20, request(constrained=True))
        door.observe_output(200, request())
    short, long = door.predicted_run(request(constrained=True)), door.predicted_run(request())
    assert long > 4 * short
    assert door.predicted_wait(8, 0, 200.0) == pytest.approx(20.0)
    assert door.predicted_wait(8, 0, 20.0) == pytest.approx(2.0)


def nothing_is_borrowed(real: Callable) -> Callable:
    return lambda self, wider: self


def tenants_are_one(real: Callable) -> Callable:
    return lambda self, tokens, one=None: real(self, tokens, one and replace(one, scope=Scope("a")))


def test_harness_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        plant(patch, RecentOutputs, "borrow", nothing_is_borrowed)
        with pytest.raises(AssertionError):
            test_one_output_moves_a_kind_by_its_part()
    plant(monkeypatch, OutputLengths, "observe", tenants_are_one)
    with pytest.raises(AssertionError):
        test_kinds_are_told_apart()


@pytest.mark.parametrize("index", [None, 0])
def test_outputs_that_clients_end_count_too(index: int | None) -> None:
    """As stop strings end them: an engine would learn of the long ones alone."""
    cache = CacheManager(make_layout(16), 100, 4)
    scheduler = Scheduler(SchedulerSettings(64, 4), PATIENT, cache)
    asked = make_request(0, 20, 400)
    for attempt in range(60):
        events: list[Event] = [Submit(attempt, replace(asked, controls=replace(asked.controls, seed=attempt)))]
        for turn in range(12):
            plan = scheduler.schedule(0.01 * turn, events)
            assert plan is not None
            events = []
            tokens = np.full(len(plan.logits), 1, np.int32)
            scheduler.commit(StepResult(plan.step, tokens, logprobs_of(tokens)), 0.01 * turn)
        scheduler.schedule(1.0, [Abort(attempt, index)])
        scheduler.commit(None, 1.0)
    assert scheduler.backpressure.lengths.expected(asked) == pytest.approx(12, rel=0.35)
