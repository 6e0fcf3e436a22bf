"""The scheduler in the cases that are easiest to get wrong, one at a time. Its laws are in `test_laws`."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cache_manager.block_hash import BlockHasher
from cache_manager.manager import CacheManager
from scheduler.backpressure import FEWEST_STEPS
from scheduler.events import Abort, EndReason, Event, Logprobs, StepOutputs, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.executor import alone, logprobs_of
from tests.scheduler.workloads import PATIENT, SECRET, Arrival, Workload, make_layout, make_request


def engine(
    rows: int = 4,
    budget: int = 64,
    depth: int = 1,
    pages: int = 32,
    page_size: int = 4,
    chunk: int | None = None,
    queue: QueueLimits = PATIENT,
    prefix_cache: bool = False,
    backfill: float = 5.0,
) -> Scheduler:
    settings = SchedulerSettings(budget, rows, chunk, depth, backfill_time=backfill)
    cache = CacheManager(make_layout(page_size), pages, rows, ahead=settings.ahead)
    hasher = BlockHasher(SECRET, b"model", page_size) if prefix_cache else None
    return Scheduler(settings, queue, cache, hasher)


def result_of(plan: StepPlan, tokens: list[int], *faults: tuple[int, str]) -> StepResult:
    drawn = np.array(tokens, np.int32)
    return StepResult(plan.step, drawn, logprobs_of(drawn), faults)


def step(scheduler: Scheduler, now: float = 0.0, events: Sequence[Event] = (), token: int = 1) -> StepOutputs:
    """Plans and commits a step in which every row draws the same token."""
    plan = scheduler.schedule(now, events)
    return scheduler.commit(None if plan is None else result_of(plan, [token] * len(plan.logits)), now)


def pairs(outputs: StepOutputs) -> list[tuple[int, int, int]]:
    """Attempt, position and token of all that is new."""
    return list(zip(outputs.attempts.tolist(), outputs.positions.tolist(), outputs.tokens.tolist(), strict=True))


def reasons(outputs: StepOutputs) -> list[tuple[int, EndReason]]:
    return [(end.attempt, end.reason) for end in outputs.ends]


def test_an_idle_scheduler_plans_nothing():
    scheduler = engine()
    assert scheduler.schedule(0.0, []) is None
    assert not scheduler.has_work
    assert not scheduler.has_news
    outputs = scheduler.commit(None, 0.0)
    assert (pairs(outputs), outputs.starts, outputs.ends, outputs.step_seconds) == ([], (), (), ())


def test_a_request_from_its_start_to_its_end():
    scheduler = engine(page_size=2)
    plan = scheduler.schedule(10.0, [Submit(7, make_request(7, (5, 6, 7), max_tokens=2))])
    assert [(join.row, join.tokens.tolist(), join.prompt_count) for join in plan.joins] == [(0, [5, 6, 7], 3)]
    assert plan.grown.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert (plan.slices.tolist(), plan.logits.tolist()) == ([[0, 0, 3]], [[2, 0]])
    outputs = scheduler.commit(result_of(plan, [9]), 10.5)
    assert pairs(outputs) == [(7, 0, 9)]
    assert [(start.attempt, start.age) for start in outputs.starts] == [(7, 0.5)]
    assert outputs.step_seconds == (0.5,)
    plan = scheduler.schedule(11.0, [])
    assert (plan.joins, plan.grown.tolist()) == ((), [])
    assert (plan.slices.tolist(), plan.logits.tolist()) == ([[0, 3, 1]], [[0, 0]])
    outputs = scheduler.commit(result_of(plan, [4]), 11.5)
    assert (pairs(outputs), reasons(outputs), outputs.starts) == ([(7, 1, 4)], [(7, EndReason.LENGTH)], ())
    assert (outputs.stats.pages_used, outputs.stats.computed_tokens, outputs.stats.steps) == (0, 4, 2)


def test_a_stop_token_at_the_last_position_is_a_stop():
    scheduler = engine()
    plan = scheduler.schedule(0.0, [Submit(1, make_request(1, 3, max_tokens=1, stop_ids=(8, 9)))])
    (end,) = scheduler.commit(result_of(plan, [9]), 0.0).ends
    assert (end.reason, end.stop_token_id) == (EndReason.STOP, 9)


def test_every_running_sequence_gets_a_token_beside_a_long_prompt():
    come = [Arrival(1, 0, make_request(1, 2, 30)), Arrival(2, 0, make_request(2, 3, 30))]
    come.append(Arrival(3, 4, make_request(3, 60, 2)))
    drive = SchedulerDriver(Workload(tuple(come), make_layout(4), 64, SchedulerSettings(6, 3)))
    chunks = 0
    for _ in range(20):
        outputs = drive.next_turn()
        assert {1, 2} <= set(outputs.attempts.tolist())
        chunks += 3 in drive.scheduler.rows.attempts() and not drive.told[3].tokens
    assert chunks >= 14, "the prompt was to take 4 tokens a step beside two decodes"
    drive.run()


def test_prompts_share_a_step_up_to_the_budget_and_the_chunk():
    scheduler = engine(budget=10, chunk=6)
    plan = scheduler.schedule(0.0, [Submit(i, make_request(i, 8)) for i in (1, 2, 3)])
    assert plan.slices.tolist() == [[0, 0, 6], [1, 0, 4]]
    assert plan.logits.tolist() == []
    outputs = scheduler.commit(result_of(plan, []), 0.0)
    assert (pairs(outputs), outputs.stats.running, outputs.stats.waiting) == ([], 2, 1)
    plan = scheduler.schedule(0.0, [])
    assert plan.slices.tolist() == [[0, 6, 2], [1, 4, 4], [2, 0, 4]]
    assert plan.logits.tolist() == [[1, 0], [5, 1]]


def test_the_latest_is_preempted_and_comes_back_in_front():
    come = (
        Arrival(1, 0, make_request(1, 4, 12)),
        Arrival(2, 0, make_request(2, 4, 12)),
        Arrival(3, 1, make_request(3, 1, 2)),
    )
    drive = SchedulerDriver(Workload(come, make_layout(2), 9, SchedulerSettings(16, 2)))
    while not drive.stats.preemptions:
        drive.next_turn()
    assert drive.scheduler.rows.attempts() == [1]
    assert drive.scheduler.queue.attempts() == [2, 3]
    kept = len(drive.told[2].tokens)
    assert kept > 0
    drive.run()
    assert drive.told[2].tokens[:kept] == alone(come[1].request)[:kept]


def test_a_step_in_flight_is_waited_for_before_another_victim_is_taken():
    """The long prompt of the third, computed token by token, holds the pages that the first two come to lack."""
    come = (
        Arrival(1, 0, make_request(1, 4, 12)),
        Arrival(2, 0, make_request(2, 4, 12)),
        Arrival(3, 0, make_request(3, 20, 2)),
    )
    drive = SchedulerDriver(Workload(come, make_layout(4), 9, SchedulerSettings(16, 3, 1, 2)))
    while not drive.scheduler.stats().preemptions:
        drive.next_turn()
    assert drive.scheduler.rows.attempts() == [1, 2]
    assert drive.scheduler.cache.pool.returning == 0, "what the victim held has come back"
    drive.run()
    assert drive.stats.preemptions == 1


def test_a_newcomer_leaves_a_page_for_each_that_runs():
    scheduler = engine(pages=3, page_size=4)
    step(scheduler, 0.0, [Submit(1, make_request(1, 4, 9))])
    assert scheduler.cache.pool.free == 2
    step(scheduler, 0.0, [Submit(2, make_request(2, 4, 2))])
    assert (scheduler.rows.attempts(), scheduler.cache.pool.free) == ([1], 1)
    scheduler = engine(pages=4, page_size=4)
    step(scheduler, 0.0, [Submit(1, make_request(1, 4, 9))])
    step(scheduler, 0.0, [Submit(2, make_request(2, 4, 2))])
    assert scheduler.rows.attempts() == [1, 2]


def test_a_fault_of_a_former_tenant_spares_the_row_that_was_used_again():
    scheduler = engine(rows=1, budget=8, depth=2)
    first = scheduler.schedule(0.0, [Submit(1, make_request(1, 2, 5, stop_ids=(9,))), Submit(2, make_request(2, 2, 5))])
    second = scheduler.schedule(0.0, [])
    assert second.slices.tolist() == [[0, 2, 1]]
    assert reasons(scheduler.commit(result_of(first, [9]), 0.0)) == [(1, EndReason.STOP)]
    third = scheduler.schedule(0.0, [])
    assert [join.row for join in third.joins] == [0]
    outputs = scheduler.commit(result_of(second, [-1], (0, "bad row")), 0.0)
    assert (pairs(outputs), reasons(outputs)) == ([], [])
    assert pairs(scheduler.commit(result_of(third, [3]), 0.0)) == [(2, 0, 3)]


def test_a_token_of_a_former_tenant_is_not_the_next_ones():
    scheduler = engine(rows=1, budget=8, depth=2)
    first = scheduler.schedule(0.0, [Submit(1, make_request(1, 2, 5, stop_ids=(9,))), Submit(2, make_request(2, 2, 5))])
    second = scheduler.schedule(0.0, [])
    scheduler.commit(result_of(first, [9]), 0.0)
    third = scheduler.schedule(0.0, [])
    assert pairs(scheduler.commit(result_of(second, [5]), 0.0)) == []
    assert pairs(scheduler.commit(result_of(third, [3]), 0.0)) == [(2, 0, 3)]


def test_a_fault_is_told_with_its_message_and_the_others_draw():
    scheduler = engine()
    plan = scheduler.schedule(0.0, [Submit(1, make_request(1)), Submit(2, make_request(2))])
    outputs = scheduler.commit(result_of(plan, [-1, 6], (0, "logits are not finite")), 0.0)
    assert pairs(outputs) == [(2, 0, 6)]
    (end,) = outputs.ends
    assert (end.attempt, end.reason, end.message) == (1, EndReason.FAULT, "logits are not finite")


def test_a_fault_in_a_chunk_that_draws_nothing_ends_the_attempt():
    scheduler = engine(chunk=2)
    plan = scheduler.schedule(0.0, [Submit(1, make_request(1, 8))])
    assert reasons(scheduler.commit(result_of(plan, [], (0, "bad row")), 0.0)) == [(1, EndReason.FAULT)]
    assert not scheduler.has_work


def test_alternatives_stay_with_their_tokens_when_a_row_is_dropped():
    scheduler = engine(depth=2)
    plan = scheduler.schedule(0.0, [Submit(i, make_request(i)) for i in (1, 2, 3)])
    scheduler.schedule(0.0, [Abort(2)])
    logprobs = Logprobs(
        np.array([-1, -2, -3], np.float32),
        np.array([1, 2, 3], np.int32),
        np.array([[1, 2], [3, 4], [5, 6]], np.int32),
        np.array([[-1, -2], [-3, -4], [-5, -6]], np.float32),
    )
    outputs = scheduler.commit(StepResult(plan.step, np.array([1, 3, 5], np.int32), logprobs), 0.0)
    assert pairs(outputs) == [(1, 0, 1), (3, 0, 5)]
    assert outputs.logprobs.chosen.tolist() == [-1, -3]
    assert outputs.logprobs.rank.tolist() == [1, 3]
    assert outputs.logprobs.top_ids.tolist() == [[1, 2], [5, 6]]
    assert outputs.logprobs.top.tolist() == [[-1, -2], [-5, -6]]


def test_a_full_queue_refuses_at_once_with_numbers():
    scheduler = engine(rows=1, queue=QueueLimits(requests=2))
    outputs = step(scheduler, 0.0, [Submit(1, make_request(1))])
    assert reasons(outputs) == []
    (end,) = step(scheduler, 0.0, [Submit(i, make_request(i)) for i in (2, 3, 4)]).ends
    assert (end.attempt, end.reason) == (4, EndReason.QUEUE_FULL)
    assert end.message == "the queue is full: 2 requests wait, the limit is 2"
    assert end.retry_after >= 1.0


# The first that must wait has no request before it in the queue: only its own time there bounds it.
@pytest.mark.parametrize(("rows", "refused"), [(5, []), (4, []), (3, [5]), (2, [4, 5])])
def test_only_who_would_have_to_wait_is_refused_for_a_predicted_wait(rows, refused):
    scheduler = engine(rows=rows)
    for _ in range(FEWEST_STEPS):
        scheduler.backpressure.observe_step(4, 100.0)
    step(scheduler, 100.0, [Submit(9, make_request(9, 4, 1))])
    outputs = step(scheduler, 100.0, [Submit(i, make_request(i, queue_timeout=1.0)) for i in (1, 2, 3, 4)])
    late = step(scheduler, 100.0, [Submit(5, make_request(5, queue_timeout=1.0))])
    assert reasons(outputs) + reasons(late) == [(i, EndReason.QUEUE_FULL) for i in refused]


@pytest.mark.parametrize(("queue_timeout", "limit", "ends_at"), [(None, 5.0, 5.0), (2.0, 5.0, 2.0), (9.0, 5.0, 5.0)])
def test_a_request_waits_no_longer_than_it_and_the_queue_allow(queue_timeout, limit, ends_at):
    scheduler = engine(rows=1, queue=QueueLimits(wait=limit))
    step(scheduler, 100.0, [Submit(1, make_request(1, max_tokens=9))])
    step(scheduler, 100.0, [Submit(2, make_request(2, queue_timeout=queue_timeout))])
    assert reasons(step(scheduler, 100.0 + ends_at - 0.001)) == []
    (end,) = step(scheduler, 100.0 + ends_at).ends
    assert (end.attempt, end.reason) == (2, EndReason.QUEUE_TIMEOUT)
    assert end.message == f"not scheduled within {ends_at} s"
    assert end.retry_after > 0


def test_a_preempted_sequence_is_not_timed_out():
    come = (Arrival(1, 0, make_request(1, 4, 12)), Arrival(2, 0, make_request(2, 4, 12, queue_timeout=2.0)))
    told = SchedulerDriver(Workload(come, make_layout(2), 9, SchedulerSettings(16, 2))).run()
    assert told.stats.preemptions > 0
    assert told.told[2].end.reason is EndReason.LENGTH


def test_nobody_overtakes_a_request_that_waits_for_pages():
    scheduler = engine(pages=4, page_size=4)
    step(scheduler, 0.0, [Submit(1, make_request(1, 8, 4))])
    step(scheduler, 0.0, [Submit(2, make_request(2, 12, 4)), Submit(3, make_request(3, 1, 1))])
    assert scheduler.rows.attempts() == [1]
    assert scheduler.queue.attempts() == [2, 3]


def test_finish_of_an_unknown_attempt_is_ignored():
    scheduler = engine()
    plan = scheduler.schedule(0.0, [Submit(1, make_request(1)), Abort(2)])
    assert reasons(scheduler.commit(result_of(plan, [3]), 0.0)) == []
    assert scheduler.rows.attempts() == [1]


def test_finish_before_the_start_ends_without_a_start():
    scheduler = engine()
    assert scheduler.schedule(0.0, [Submit(1, make_request(1)), Abort(1), Abort(1)]) is None
    outputs = scheduler.commit(None, 0.0)
    assert (reasons(outputs), outputs.starts) == ([(1, EndReason.FINISHED)], ())
    assert not scheduler.has_work


def test_emitted_output_goes_with_the_join_and_counts():
    scheduler = engine()
    plan = scheduler.schedule(0.0, [Submit(1, make_request(1, (5, 6), max_tokens=4), emitted=((7, 8),))])
    (join,) = plan.joins
    assert (join.tokens.tolist(), join.prompt_count) == ([5, 6, 7, 8], 2)
    assert pairs(scheduler.commit(result_of(plan, [1]), 0.0)) == [(1, 2, 1)]
    plan = scheduler.schedule(0.0, [])
    outputs = scheduler.commit(result_of(plan, [2]), 0.0)
    assert (pairs(outputs), reasons(outputs)) == ([(1, 3, 2)], [(1, EndReason.LENGTH)])


@pytest.mark.parametrize(("emitted", "reason"), [((7, 8, 2), EndReason.LENGTH), ((7, 9), EndReason.STOP)])
def test_an_attempt_whose_output_is_already_complete_ends(emitted, reason):
    """The replica that drew the last token may die before its end is told."""
    scheduler = engine()
    request = make_request(1, (5, 6), max_tokens=3, stop_ids=(9,))
    outputs = [step(scheduler, 0.0, [Submit(1, request, (emitted,))])] + [step(scheduler) for _ in range(9)]
    assert [pair for one in outputs for pair in pairs(one)] == []
    assert [end for one in outputs for end in reasons(one)] == [(1, reason)]
    assert not scheduler.has_work


def test_a_step_behind_another_begins_when_that_one_ends():
    scheduler = engine(depth=2)
    first = scheduler.schedule(10.0, [Submit(1, make_request(1, 3, 5))])
    second = scheduler.schedule(10.25, [])
    assert scheduler.commit(result_of(first, [7]), 11.0).step_seconds == (1.0,)
    assert scheduler.commit(result_of(second, [7]), 11.5).step_seconds == (0.5,), "not 1.25: it waited for the first"
    third = scheduler.schedule(20.0, [])
    assert scheduler.commit(result_of(third, [7]), 20.125).step_seconds == (0.125,), "nothing ran in between"


def test_what_swapping_took_is_no_cost_of_tokens():
    """Else each page that goes to the host would make waits longer that have nothing to do with it."""
    scheduler, seen = engine(), list[tuple[int, float]]()
    scheduler.backpressure.observe_step = lambda tokens, seconds: seen.append((tokens, seconds))
    plan = scheduler.schedule(10.0, [Submit(1, make_request(1, 3, 5))])
    scheduler.commit(replace(result_of(plan, [7]), swap_seconds=0.75), 11.0)
    assert seen == [(3, 0.25)]


def test_results_must_come_in_order():
    scheduler = engine(depth=2)
    scheduler.schedule(0.0, [Submit(1, make_request(1))])
    second = scheduler.schedule(0.0, [])
    with pytest.raises(RuntimeError, match="step 1 was collected, step 0 is the oldest in flight"):
        scheduler.commit(result_of(second, [1]), 0.0)


def test_live_attempts_are_those_that_run_or_wait():
    scheduler = engine(rows=2)
    step(scheduler, 0.0, [Submit(i, make_request(i)) for i in (1, 2, 3, 4)])
    assert sorted(scheduler.live_attempts()) == [1, 2, 3, 4]
    step(scheduler, 0.0, [Abort(1), Abort(4)])
    assert sorted(scheduler.live_attempts()) == [2, 3]


def test_pages_of_two_groups_come_and_go_together():
    come = tuple(Arrival(i, i, make_request(i, 3, 6)) for i in (1, 2, 3))
    drive = SchedulerDriver(Workload(come, make_layout(2, groups=2), 10, SchedulerSettings(8, 3, None, 2))).run()
    assert drive.stats.preemptions > 0
