"""The engine's thread: outputs reach the sink, idleness costs nothing, stopping and stalling are seen."""

import math
import threading

import pytest

from scheduler.events import Abort, EndReason, Submit
from scheduler.settings import QueueLimits
from tests.scheduler.engine_rig import PATIENCE, submits
from tests.scheduler.executor import alone
from tests.scheduler.workloads import make_request


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_of_all_requests_reach_the_sink(make_rig, depth):
    rig = make_rig(depth=depth, rows=2)
    rig.engine.start()
    come = submits(5)
    rig.engine.send(come)
    rig.wait_ends(1, 2, 3, 4, 5)
    rig.wait_until_idle()
    assert rig.reasons() == {i: [EndReason.LENGTH] for i in range(1, 6)}
    assert rig.tokens == {event.attempt: alone(event.request) for event in come}
    assert rig.threads == {"quire-engine"}
    assert rig.scheduler.cache.pool.free == rig.scheduler.cache.pool.total


def test_events_of_many_threads_are_all_answered(make_rig):
    rig = make_rig(depth=2)
    rig.engine.start()

    def client(first: int) -> None:
        for attempt in range(first, first + 10):
            rig.engine.send([Submit(attempt, make_request(attempt, 2, 3))])
            if attempt % 3 == 0:
                rig.engine.send([Abort(attempt)])

    threads = [threading.Thread(target=client, args=(first,)) for first in (1, 11, 21, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    rig.wait_ends(*range(1, 41))
    rig.wait_until_idle()
    assert all(len(ends) == 1 for ends in rig.ends.values())
    assert all(rig.tokens[a] == alone(make_request(a, 2, 3)) for a in range(1, 41) if a % 3)


def test_an_idle_engine_takes_no_turns(make_rig):
    rig = make_rig()
    rig.engine.start()
    rig.wait_until_idle()
    assert rig.schedules == 0
    rig.engine.send([])
    rig.engine.send(submits(1, max_tokens=3))
    rig.wait_until_idle()
    assert rig.schedules == 3, "one turn a token"
    rig.engine.send([])
    rig.engine.send([Abort(77)])
    rig.wait_until_idle()
    assert rig.schedules == 4
    rig.engine.stop(PATIENCE)


def test_finish_while_a_step_is_in_flight(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 1)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(2))
    gate.wait_reached()
    rig.engine.send([Abort(1)])
    gate.open()
    rig.wait_ends(1, 2)
    rig.wait_until_idle()
    assert rig.reasons() == {1: [EndReason.FINISHED], 2: [EndReason.LENGTH]}
    assert rig.tokens[1] == alone(make_request(1, 3, 5))[: len(rig.tokens[1])]
    assert len(rig.tokens[1]) == 1, "nobody waits for the token of the step in flight"
    assert rig.scheduler.cache.pool.free == rig.scheduler.cache.pool.total


def test_a_refusal_does_not_wait_for_the_step_in_flight(make_rig):
    rig = make_rig(rows=1, queue=QueueLimits(requests=1))
    before, within = rig.stop_at("collect", 1), rig.stop_at("collect", 2)
    rig.engine.start()
    rig.engine.send(submits(1))
    before.wait_reached()
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (2, 3)])
    before.open()
    within.wait_reached()
    assert rig.reasons() == {3: [EndReason.QUEUE_FULL]}
    within.open()
    rig.wait_ends(1, 2)
    assert rig.reasons() == {1: [EndReason.LENGTH], 2: [EndReason.LENGTH], 3: [EndReason.QUEUE_FULL]}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("call", ["launch", "collect"])
def test_a_refusal_does_not_wait_for_a_step_that_runs(make_rig, depth, call):
    """Nor does one who leaves the queue. Both are told on the sender's thread, if no step can be planned."""
    rig = make_rig(depth=depth, rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at(call, depth - 1 if call == "launch" else 0)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1))
    gate.wait_reached()
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (2, 3)])
    assert rig.reasons() == {3: [EndReason.QUEUE_FULL]}
    rig.engine.send([Abort(2)])
    assert rig.reasons() == {2: [EndReason.FINISHED], 3: [EndReason.QUEUE_FULL]}
    assert threading.current_thread().name in rig.threads
    gate.open()
    rig.wait_ends(1)
    assert rig.reasons()[1] == [EndReason.LENGTH]
    assert rig.tokens[1] == alone(make_request(1, 3, 5))


def test_events_wait_for_a_step_that_can_be_planned(make_rig):
    rig = make_rig(depth=2, rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at("launch", 0)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1))
    gate.wait_reached()
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (2, 3)])
    assert rig.reasons() == {}, "the second step is planned by the engine's thread"
    gate.open()
    rig.wait_ends(1, 2, 3)
    assert rig.threads == {"quire-engine"}


def test_an_error_on_a_senders_thread_ends_the_engine_and_all_attempts(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 0)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1))
    gate.wait_reached()
    real = rig.scheduler.schedule

    def broken(now, events):
        raise RuntimeError("a bug")

    rig.scheduler.schedule = broken
    rig.engine.send([Submit(2, make_request(2, 3, 5))])
    rig.scheduler.schedule = real
    rig.engine.send([Submit(3, make_request(3, 3, 5))])
    assert rig.reasons() == {}
    gate.open()
    rig.wait_dead()
    assert rig.engine.failure == "RuntimeError: a bug"
    assert rig.reasons() == {attempt: [EndReason.ENGINE_FAILED] for attempt in (1, 2, 3)}


def test_a_sender_leaves_a_dead_engine_alone(make_rig):
    """It has seen the engine alive, and gets the scheduler once it is dead: no end is told twice."""
    rig = make_rig(rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at("collect", 0)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1))
    gate.wait_reached()
    rig.fail_at("launch", 1)

    def die() -> None:
        rig.parking.left = lambda: None
        gate.open()
        rig.wait_dead()

    rig.parking.left = die
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (2, 3)])
    assert rig.reasons() == {attempt: [EndReason.ENGINE_FAILED] for attempt in (1, 2)} | {3: [EndReason.QUEUE_FULL]}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_comes_while_a_step_is_planned_does_not_wait_for_its_end(make_rig, depth):
    """A refusal by the plan itself is told before the step is launched, one that came meanwhile too."""
    rig = make_rig(depth=depth, rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at("launch", depth - 1)
    real = rig.scheduler.schedule

    def schedule(now, events):
        plan = real(now, events)
        if plan is not None and plan.step == depth - 1:
            rig.engine.send([Submit(4, make_request(4, 3, 5))])
        return plan

    rig.scheduler.schedule = schedule
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (1, 2, 3)])
    gate.wait_reached()
    assert rig.reasons() == {attempt: [EndReason.QUEUE_FULL] for attempt in (3, 4)}
    gate.open()
    rig.wait_ends(1, 2)


def test_threads_that_a_signal_interrupts_stay_out_of_the_scheduler(make_rig):
    rig = make_rig(rows=1, queue=QueueLimits(requests=1), senders_help=False)
    gate = rig.stop_at("collect", 0)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1))
    gate.wait_reached()
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (2, 3)])
    assert rig.reasons() == {}
    gate.open()
    rig.wait_ends(1, 2, 3)
    assert rig.threads == {"quire-engine"}


def test_no_flood_of_events_holds_up_the_next_step(make_rig):
    """A sender takes in what is there, and not what comes meanwhile."""
    rig = make_rig(rows=1, queue=QueueLimits(requests=1))
    gate = rig.stop_at("collect", 0)
    more = iter(range(10, 1000))

    def send_again(outputs):
        if outputs.ends and outputs.ends[0].reason is EndReason.QUEUE_FULL:
            rig.engine.send([Submit(next(more), make_request(9, 3, 5))])

    rig.on_outputs = send_again
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1))
    gate.wait_reached()
    rig.engine.send([Submit(attempt, make_request(attempt, 3, 5)) for attempt in (2, 3)])
    assert rig.reasons() == {3: [EndReason.QUEUE_FULL]}
    rig.on_outputs = lambda outputs: None
    gate.open()
    rig.wait_ends(1, 2, 10)


def test_the_sink_may_send(make_rig):
    rig = make_rig()
    rig.on_outputs = lambda outputs: rig.engine.send([Abort(1)]) if 1 in outputs.attempts else None
    rig.engine.start()
    rig.engine.send(submits(1, max_tokens=50))
    rig.wait_ends(1)
    assert rig.reasons() == {1: [EndReason.FINISHED]}
    assert len(rig.tokens[1]) == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_ends_an_idle_engine(make_rig, depth):
    rig = make_rig(depth=depth)
    rig.engine.start()
    rig.engine.send(submits(2))
    rig.wait_ends(1, 2)
    rig.engine.stop(PATIENCE)
    assert not rig.engine.alive
    assert rig.engine.failure == "the engine was stopped"
    assert rig.executor.closed == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_leaves_no_attempt_without_an_end(make_rig, depth):
    rig = make_rig(depth=depth)
    gate = rig.stop_at("collect", 1)
    rig.engine.start()
    rig.engine.send(submits(2, max_tokens=50))
    gate.wait_reached()
    with pytest.raises(TimeoutError):
        rig.engine.stop(0.01)
    rig.engine.send([Submit(7, submits(1)[0].request)])
    gate.open()
    rig.engine.stop(PATIENCE)
    rig.engine.send([Submit(8, submits(1)[0].request)])
    assert rig.reasons() == {attempt: [EndReason.ENGINE_FAILED] for attempt in (1, 2, 7, 8)}


def test_stop_waits_for_the_step_in_flight_and_says_so(make_rig):
    rig = make_rig()
    gate = rig.stop_at("collect", 1)
    rig.engine.start()
    rig.engine.send(submits(1, max_tokens=50))
    gate.wait_reached()
    with pytest.raises(TimeoutError, match=r"did not end within 0\.01 s: it waits for the step in flight"):
        rig.engine.stop(0.01)
    gate.open()
    rig.engine.stop(PATIENCE)
    assert not rig.engine.alive
    assert len(rig.tokens[1]) == 2, "the step in flight is told, no other is begun"


@pytest.mark.parametrize("call", ["launch", "collect"])
def test_an_engine_whose_executor_blocks_stalls(make_rig, call):
    rig = make_rig()
    rig.clock.now = 1000.0
    rig.on_outputs = lambda outputs: setattr(rig.clock, "now", rig.clock.now + 7.0)
    gate = rig.stop_at(call, 1)
    rig.engine.start()
    rig.wait_until_idle()
    assert rig.engine.stalled_for() == 0.0
    rig.engine.send(submits(1, max_tokens=3))
    gate.wait_reached()
    assert rig.engine.stalled_for() == 0.0, "the first step was progress"
    rig.clock.now += 40.0
    assert rig.engine.stalled_for() == 40.0
    rig.clock.now += 2.5
    assert rig.engine.stalled_for() == 42.5
    gate.open()
    rig.wait_until_idle()
    assert rig.engine.stalled_for() == 0.0
    rig.clock.now += 500.0
    assert rig.engine.stalled_for() == 0.0


def test_time_spent_idle_is_not_a_stall(make_rig):
    rig = make_rig()
    rig.engine.start()
    rig.wait_until_idle()
    rig.clock.now = 900.0
    gate = rig.stop_at("launch", 0)
    rig.engine.send(submits(1))
    gate.wait_reached()
    assert rig.engine.stalled_for() == 0.0
    gate.open()


def pass_time(rig, seconds: float) -> None:
    """The time goes by, and somebody asks all the while whether a step hangs."""
    questions = math.ceil(2 * seconds)
    for _ in range(questions):
        rig.clock.now += seconds / questions
        rig.engine.overdue()


def test_a_step_may_take_as_long_as_all_that_are_in_flight_with_it(make_rig):
    """With two in flight the younger one waits for the older one, which may be a long prompt."""
    rig = make_rig(depth=2)
    expected = {0: 2.0, 1: 0.25}
    rig.scheduler.expected_seconds = lambda plan: expected.get(plan.step, 0.25)
    first, second = rig.stop_at("collect", 0), rig.stop_at("collect", 1)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1, max_tokens=9))
    first.wait_reached()
    rig.engine.overdue()
    pass_time(rig, 22.4)
    assert rig.engine.overdue() == ""
    rig.clock.now += 0.2
    assert "a step has run for 22.6 s, where at most 22.5 s were expected" in rig.engine.overdue()
    first.open()
    second.wait_reached()
    pass_time(rig, 5.1)
    assert "where at most 5.0 s were expected" in rig.engine.overdue(), "of the long one there is nothing any more"
    second.open()
    rig.wait_until_idle()


def test_a_step_that_takes_ten_times_as_long_as_such_steps_hangs_but_none_below_three_seconds(make_rig):
    rig = make_rig()
    rig.on_outputs = lambda outputs: setattr(rig.clock, "now", rig.clock.now)
    first, second = rig.stop_at("collect", 0), rig.stop_at("collect", 1)
    rig.engine.start()
    rig.wait_until_idle()
    rig.engine.send(submits(1, max_tokens=4))
    first.wait_reached()
    pass_time(rig, 1000.0)
    assert rig.engine.overdue() == "", "it is not known how long a step takes here"
    rig.clock.now -= 1000.0
    rig.clock.now += 0.5  # the prompt of three tokens
    first.open()
    second.wait_reached()
    pass_time(rig, 2.9)
    assert rig.engine.overdue() == ""
    pass_time(rig, 2.2)
    assert "a step has run for 5.1 s, where at most" in rig.engine.overdue()
    rig.excuse = rig.clock.now - 1.0
    assert rig.engine.overdue() == "", "a kernel was compiled a second ago"
    rig.excuse = 0.0
    rig.clock.now += 9.0
    assert rig.engine.overdue() == "", "the process was stopped for 9 seconds"
    pass_time(rig, 4.9)
    assert rig.engine.overdue() == ""
    pass_time(rig, 0.2)
    assert "a step has run for 5.1 s, where at most" in rig.engine.overdue()
    second.open()
    rig.wait_until_idle()
    assert rig.engine.overdue() == ""
