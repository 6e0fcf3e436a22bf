"""The forecast of pages: fewer preemptions in a storm of long outputs for no more work, and progress in any case."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.manager import CacheManager
from scheduler.events import Submit
from scheduler.page_forecast import PageForecast, peak_growth
from scheduler.policies import POLICIES
from scheduler.policy import SchedulingPolicy
from scheduler.scheduler import Scheduler
from scheduler.settings import NO_QUEUE_LIMITS, SchedulerSettings
from tests.scheduler.executor import FakeExecutor
from tests.scheduler.play import play
from tests.scheduler.storm import Storm, weather
from tests.scheduler.test_policy import of_tenants
from tests.scheduler.workloads import Workload, make_layout, make_request
from tests.support.examples import examples
from tests.support.planted import plant

GROWING = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60)), min_size=1, max_size=8)


@given(GROWING)
def test_the_peak_is_that_of_a_simulation(sequences: list[tuple[int, int]]) -> None:
    """One token a step of each that has not ended; all that one holds is free once it has."""
    remaining, held = (np.array(column, np.float64) for column in zip(*sequences, strict=True))
    steps = range(1, int(remaining.max()) + 1)
    most = max(sum(h + step for r, h in sequences if r >= step) for step in steps)
    assert peak_growth(remaining, held) == most - held.sum()


def with_a_forecast(workload: Workload, policy: SchedulingPolicy) -> Scheduler:
    """A scheduler that knows costs and lengths, so that it forecasts from the start: pages are to last for long."""
    scheduler = Scheduler(workload.settings, workload.queue, workload.cache, workload.hasher, policy=policy)
    for tokens in (1, 50):
        scheduler.backpressure.observe_step(tokens, 0.01 + tokens)
    scheduler.backpressure.observe_output(20)
    return scheduler


ANY_POLICY = st.sampled_from([make(SchedulerSettings(), 100) for make in POLICIES.values()])


@settings(max_examples=examples(60), deadline=None)
@given(of_tenants(cancels=True) | of_tenants(several=True), ANY_POLICY)
def test_work_goes_on_under_any_policy(workload: Workload, policy: SchedulingPolicy) -> None:
    executor = FakeExecutor(workload.layout, workload.pages, workload.settings)
    play(workload, with_a_forecast(workload, policy), executor, patience=4)


def test_a_roomy_pool_has_room_where_steps_have_no_fixed_cost() -> None:
    """As after one long step, of a pause or a compilation: then pages must last for all steps to come."""
    scheduler = Scheduler(SchedulerSettings(512, 8), NO_QUEUE_LIMITS, CacheManager(make_layout(16), 1000, 8))
    for tokens, seconds in ((1, 0.001), (50, 1.0)):
        scheduler.backpressure.observe_step(tokens, seconds)
    scheduler.backpressure.observe_output(50)
    assert scheduler.backpressure.cost.fit()[0] == 0.0
    scheduler.schedule(0.0, [Submit(attempt, make_request(attempt, 48, 50)) for attempt in range(3)])
    assert scheduler.rows.attempts() == [0, 1, 2]


STORMS = st.builds(
    Storm,
    st.lists(st.integers(1, 60), min_size=2, max_size=12).map(tuple),
    st.just(tuple(range(0, 48, 4))),
    st.integers(2, 8),
    st.sampled_from((8, 10, 16)),
    st.sampled_from((1, 20, 48)),
    st.just(64),
    st.sampled_from((8, 64)),
)


@settings(max_examples=examples(30), deadline=None)
@given(STORMS, st.sampled_from((0.0, 1.0, 10.0)))
def test_every_storm_ends(storm: Storm, conservativeness: float) -> None:
    """`weather` checks that each request ends, and that work begins in each turn with some."""
    weather(storm, conservativeness)


STORM = Storm.drawn(1, 60)


def test_fewer_are_preempted_in_a_storm_for_no_more_work() -> None:
    before, seconds_before = weather(STORM, 0.0)
    after, seconds = weather(STORM, SchedulerSettings().schedule_conservativeness)
    assert after.preemptions < 0.75 * before.preemptions
    assert after.recomputed_tokens < 0.8 * before.recomputed_tokens
    assert seconds < seconds_before


def nobody_grows(real: Callable) -> Callable:
    return lambda self, sequence, match: True


def test_harness_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, PageForecast, "leaves_room", nobody_grows)
    with pytest.raises(AssertionError):
        test_fewer_are_preempted_in_a_storm_for_no_more_work()


@pytest.mark.parametrize("value", [-0.1, 10.1, float("nan")])
def test_the_setting_is_checked(value: float) -> None:
    with pytest.raises(ValueError, match=r"--schedule-conservativeness is .*, must be in \[0, 10\]"):
        SchedulerSettings(schedule_conservativeness=value)
