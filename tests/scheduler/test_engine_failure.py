"""A failure of the executor or the scheduler is reported to every attempt once."""

import pytest

from scheduler.events import Abort, EndReason, Submit
from scheduler.settings import QueueLimits
from tests.scheduler.engine_rig import PATIENCE, Gate, submits
from tests.scheduler.workloads import make_request

FAILURES = [(call, number, depth) for call in ("launch", "collect") for number in (0, 1, 3) for depth in (1, 2)]


@pytest.mark.parametrize(("call", "number", "depth"), FAILURES)
def test_a_failure_of_the_executor_ends_every_attempt_once(make_rig, call, number, depth):
    rig = make_rig(depth=depth, rows=2)
    rig.fail_at(call, number)
    rig.engine.start()
    rig.engine.send(submits(5, max_tokens=9))
    rig.wait_dead()
    assert rig.reasons() == {i: [EndReason.ENGINE_FAILED] for i in range(1, 6)}
    assert all(ends[0].message == "RuntimeError: the device is gone" for ends in rig.ends.values() if ends)
    assert rig.engine.failure == "RuntimeError: the device is gone"
    rig.clock.now += 100.0
    assert rig.engine.stalled_for() == 0.0, "a dead engine is dead, not stalled"


def test_attempts_that_ended_before_a_failure_are_not_told_again(make_rig):
    rig = make_rig()
    rig.fail_at("launch", 2)
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 3, 1)), Submit(2, make_request(2, 3, 9))])
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.LENGTH], 2: [EndReason.ENGINE_FAILED]}


def test_events_that_wait_when_the_engine_fails_are_answered(make_rig):
    rig = make_rig(queue=QueueLimits(requests=1))
    gate = Gate()

    def fail() -> None:
        gate.stop_here()
        raise RuntimeError("the device is gone")

    rig.executor.before["launch", 1] = fail
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 3, 9))])
    gate.wait_reached()
    rig.engine.send([Submit(2, make_request(2, 3, 9)), Abort(1), Abort(77)])
    rig.engine.send([Submit(3, make_request(3, 3, 9))])
    gate.open()
    rig.wait_dead()
    assert {attempt: len(ends) for attempt, ends in rig.ends.items()} == {1: 1, 2: 1, 3: 1}


def test_an_executor_that_ends_by_itself_ends_an_idle_engine(make_rig):
    rig = make_rig()
    rig.engine.start()
    rig.engine.fail("rank 1 has ended")
    rig.engine.fail("and another")
    rig.wait_dead()
    assert rig.engine.failure == "ExecutorLost: rank 1 has ended"
    rig.engine.send([Submit(1, make_request(1, 3, 9))])
    assert rig.reasons() == {1: [EndReason.ENGINE_FAILED]}


def test_an_executor_that_ends_by_itself_ends_a_busy_engine(make_rig):
    rig = make_rig()
    rig.executor.before["launch", 2] = lambda: rig.engine.fail("rank 1 has ended")
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 3, 9))])
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.ENGINE_FAILED]}
    assert rig.ends[1][0].message == "ExecutorLost: rank 1 has ended"


def test_an_executor_that_ends_by_itself_is_reported_while_the_engine_waits_for_it(make_rig):
    """The wait may have no end, as for a device that waits for another process."""
    rig = make_rig()
    gate = rig.stop_at("collect", 0)
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 3, 9))])
    gate.wait_reached()
    assert rig.engine.overdue() == ""
    rig.engine.fail("rank 1 has ended")
    assert (rig.engine.overdue(), rig.engine.failure) == ("rank 1 has ended", None)
    gate.open()
    rig.wait_dead()
    assert rig.engine.failure == "ExecutorLost: rank 1 has ended"
    assert rig.engine.overdue() == "", "what waits for no step is not overdue"


def test_gauges_of_a_dead_engine_are_zero_and_its_counts_stay(make_rig):
    rig = make_rig(rows=2)
    rig.fail_at("launch", 3)
    rig.engine.start()
    rig.engine.send(submits(4, max_tokens=9))
    rig.wait_dead()
    told = rig.stats
    assert (told.running, told.waiting, told.waiting_tokens, told.pages_used) == (0, 0, 0, 0)
    assert (told.steps, told.computed_tokens, told.pages_total) == (3, 2 * (3 + 1 + 1), 64)
    rig.engine.send([Submit(9, make_request(9))])
    assert rig.stats == told


def test_work_that_cannot_start_is_a_bug_and_told(make_rig):
    rig = make_rig(pages=2)
    rig.engine.start()
    rig.engine.send([Submit(1, make_request(1, 30, 1))])
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.ENGINE_FAILED]}
    assert "none can be scheduled" in rig.engine.failure


def test_a_scheduler_that_raises_ends_what_it_was_just_given(make_rig):
    rig = make_rig()

    def broken(now, events):
        raise ZeroDivisionError("a bug")

    rig.scheduler.schedule = broken
    rig.engine.start()
    rig.engine.send(submits(2))
    rig.wait_dead()
    assert rig.reasons() == {1: [EndReason.ENGINE_FAILED], 2: [EndReason.ENGINE_FAILED]}
    assert rig.engine.failure == "ZeroDivisionError: a bug"


def test_a_failed_engine_answers_later_submits_at_once(make_rig):
    rig = make_rig()
    rig.fail_at("launch", 0)
    rig.engine.start()
    rig.engine.send(submits(1))
    rig.wait_dead()
    rig.engine.send([Abort(1), Submit(8, make_request(8)), Submit(9, make_request(9))])
    failed = [EndReason.ENGINE_FAILED]
    assert rig.reasons() == {1: failed, 8: failed, 9: failed}
    rig.engine.stop(PATIENCE)


def test_an_attempt_that_is_finished_in_the_turn_that_fails_is_told(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 0)
    rig.fail_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(2, max_tokens=9))
    gate.wait_reached()
    rig.engine.send([Abort(1)])
    gate.open()
    rig.wait_dead()
    assert {attempt: len(ends) for attempt, ends in rig.ends.items()} == {1: 1, 2: 1}


def test_an_attempt_that_is_refused_in_the_turn_that_fails_is_told_once(make_rig):
    rig = make_rig(rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at("collect", 0)
    rig.fail_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(1, max_tokens=9))
    gate.wait_reached()
    rig.engine.send([Submit(2, make_request(2)), Submit(3, make_request(3))])
    gate.open()
    rig.wait_dead()
    failed = [EndReason.ENGINE_FAILED]
    assert rig.reasons() == {1: failed, 2: failed, 3: [EndReason.QUEUE_FULL]}


def test_an_attempt_that_times_out_in_the_turn_that_fails_is_told(make_rig):
    rig = make_rig(rows=1, queue=QueueLimits(wait=5.0))
    gate = rig.stop_at("collect", 0)
    rig.fail_at("launch", 1)
    rig.engine.start()
    rig.engine.send(submits(2, max_tokens=9))
    gate.wait_reached()
    rig.clock.now = 100.0
    gate.open()
    rig.wait_dead()
    assert {attempt: len(ends) for attempt, ends in rig.ends.items()} == {1: 1, 2: 1}
