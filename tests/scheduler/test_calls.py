"""Short tasks on the engine's thread, one between two steps; what copying pages costs, and when it pays."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.costs import COPY_START, FEWEST_COPIED, FEWEST_PAGES, CopyCost, SwapCost, copying_pays
from scheduler.engine import EngineEnded
from scheduler.events import EndReason
from tests.scheduler.engine_rig import PATIENCE, submits


@pytest.mark.parametrize("depth", [1, 2])
def test_an_idle_engine_runs_them_on_its_thread(make_rig, depth):
    rig = make_rig(depth=depth)
    rig.engine.start()
    rig.wait_until_idle()
    calls = [rig.engine.call(lambda i=i: (i, threading.current_thread().name)) for i in range(3)]
    assert [call.result(PATIENCE) for call in calls] == [(i, "quire-engine") for i in range(3)]
    rig.wait_until_idle()
    rig.clock.now += 60.0
    assert rig.engine.stalled_for() == 0.0, "it is idle"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_busy_engine_runs_one_between_two_steps(make_rig, depth):
    rig = make_rig(depth=depth)
    gate = rig.stop_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(2, max_tokens=9))
    gate.wait_reached()
    calls = [rig.engine.call(lambda: rig.executor.calls["launch"]) for _ in range(4)]
    gate.open()
    rig.wait_ends(1, 2)
    assert [call.result(PATIENCE) for call in calls] == [2, 3, 4, 5], "the steps go on between them"


def test_what_a_task_raises_is_its_callers(make_rig):
    rig = make_rig()
    rig.engine.start()

    def fail() -> None:
        raise ValueError("of the task")

    with pytest.raises(ValueError, match="of the task"):
        rig.engine.call(fail).result(PATIENCE)
    rig.engine.send(submits(1))
    rig.wait_ends(1)
    assert rig.reasons() == {1: [EndReason.LENGTH]}


def test_one_that_nobody_waits_for_is_not_run(make_rig):
    rig, ran = make_rig(), []
    gate = rig.stop_at("launch", 0)
    rig.engine.start()
    rig.engine.send(submits(1))
    gate.wait_reached()
    unwanted, last = rig.engine.call(lambda: ran.append(1)), rig.engine.call(lambda: ran.append(2))
    assert unwanted.cancel()
    gate.open()
    last.result(PATIENCE)
    assert ran == [2]


def test_with_the_engine_they_end(make_rig):
    rig = make_rig()
    gate = rig.stop_at("launch", 0)
    rig.fail_at("collect", 0)
    rig.engine.start()
    rig.engine.send(submits(1))
    gate.wait_reached()
    calls = [rig.engine.call(lambda: 1), rig.engine.call(lambda: 2)]
    gate.open()
    rig.wait_dead()
    for call in (*calls, rig.engine.call(lambda: 3)):
        with pytest.raises(EngineEnded, match="the device is gone"):
            call.result(PATIENCE)


SECONDS = st.floats(0, 1e6)


@given(st.integers(0, 10**6), SECONDS, st.none() | SECONDS)
def test_the_cheaper_way_is_taken(pages: int, copying: float, computing: float | None) -> None:
    if pages < FEWEST_COPIED:
        assert not copying_pays(pages, copying, computing)
    else:
        assert copying_pays(pages, copying, computing) == (computing is None or copying < computing)


@given(st.integers(1, 2**30), st.integers(1, 2**30))
def test_more_takes_longer_to_copy(one: int, other: int) -> None:
    cost = CopyCost()
    assert COPY_START < cost.expected(min(one, other)) <= cost.expected(max(one, other))


def test_the_rate_is_that_of_the_last_copies() -> None:
    cost = CopyCost()
    for rate in (10e6, 500e6):
        for _ in range(60):
            cost.observe(2**24, 2**24 / rate)
        assert cost.expected(10**8) == pytest.approx(COPY_START + 1e8 / rate, rel=0.05)
    cost.observe(0, 3.0)
    assert cost.expected(10**8) > 1.0, "nothing came in all that time"


def test_what_came_in_no_time_is_no_error() -> None:
    cost = CopyCost()
    for _ in range(10_000):
        cost.observe(0, 0.0)
    assert cost.expected(10**8) >= COPY_START


def test_what_a_page_s_swap_takes_is_not_believed_after_a_few() -> None:
    """The first copies touch memory that was not used before: they say that swapping never pays."""
    cost = SwapCost()
    cost.observe(FEWEST_PAGES - 1, 30.0)
    assert cost.page_seconds is None
    cost.observe(2, 0.5)
    assert cost.page_seconds == pytest.approx(30.0 / 16, rel=0.2)
