"""The scheduler's laws over drawn workloads.

`SchedulerDriver` checks after every turn what must hold in every schedule; the tests choose what the workloads stress.
"""

import pytest
from hypothesis import given, settings

from scheduler.events import EndReason
from scheduler.settings import SchedulerSettings
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.reaching import unreached
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples

OUTCOMES = [reason for reason in EndReason if reason is not EndReason.ENGINE_FAILED]
few = settings(max_examples=examples(100), deadline=None)
many = settings(max_examples=examples(250), deadline=None)


NOTES = {
    "preempted": lambda drive: drive.stats.preemptions > 0,
    "preempted with two steps in flight": lambda drive: drive.stats.preemptions > 0 and drive.workload.depth == 2,
    "preempted often": lambda drive: drive.stats.preemptions > 3,
    "preempted with windows": lambda drive: drive.stats.preemptions > 0 and drive.executor.out_of_sight > 0,
    "pages left a window": lambda drive: drive.executor.out_of_sight > 0,
    "token for a row used again": lambda drive: "token" in drive.executor.late,
    "fault in a row used again": lambda drive: "fault" in drive.executor.late,
    **{
        reason.value: lambda drive, r=reason: any(t.end.reason is r for t in drive.told.values()) for reason in OUTCOMES
    },
}


@pytest.mark.slow
def test_drawn_workloads_reach_what_the_laws_speak_of():
    drawn = workloads() | workloads(cancels=True, queue_timeout=True) | workloads(faults=True, depths=(2,))
    assert unreached(drawn, NOTES) == set()


@many
@given(workloads())
def test_tokens_do_not_depend_on_the_schedule(workload):
    told = SchedulerDriver(workload).run().told
    assert all(one.end.reason in (EndReason.STOP, EndReason.LENGTH) for one in told.values())


@few
@given(workloads(cancels=True))
def test_a_client_that_leaves_disturbs_nobody(workload):
    SchedulerDriver(workload).run()


@few
@given(workloads(cancels=True, queue_timeout=True))
def test_a_queue_with_bounds_refuses_in_time_or_serves(workload):
    SchedulerDriver(workload).run()


@many
@given(workloads(faults=True))
def test_a_fault_ends_only_its_own_attempt(workload):
    SchedulerDriver(workload).run()


@few
@given(workloads(resumed=True))
def test_output_of_an_earlier_attempt_counts_as_output(workload):
    SchedulerDriver(workload).run()


@few
@given(workloads(cancels=True, queue_timeout=True, resumed=True, faults=True))
def test_all_of_it_at_once(workload):
    SchedulerDriver(workload).run()


@few
@given(workloads(cancels=True, resumed=True, faults=True))
def test_same_inputs_give_the_same_plans_and_outputs_byte_for_byte(workload):
    assert SchedulerDriver(workload).run().trace == SchedulerDriver(workload).run().trace


@few
@given(workloads(roomy=True))
def test_nothing_is_preempted_in_a_pool_that_holds_everything(workload):
    stats = SchedulerDriver(workload).run().stats
    assert (stats.preemptions, stats.recomputed_tokens) == (0, 0)


@few
@given(workloads(roomy=True, resumed=True, depths=(1,)))
def test_tokens_and_pages_held_follow_from_what_was_told(workload):
    drive = SchedulerDriver(workload.without_cache())
    while drive.turn < workload.most_turns:
        drive.next_turn()
        pages = 0
        running = {mirror.seed: mirror for mirror in drive.executor.rows.values()}
        for attempt, told in drive.told.items():
            if told.age is None or told.end is not None:
                continue
            arrival = told.arrival
            known, row = len(arrival.request.prompt) + len(arrival.known(0)), running[attempt]
            held = known + len(told.tokens) - 1
            if told.tokens:
                assert row.computed == held, "prompt + generated - 1 tokens are computed"
            for table in row.tables:
                end = -(-max(known, held) // table.size)
                if table.window is not None and not told.tokens:
                    end = len(table.told)  # slots for a prompt come as it is computed
                pages += end - table.seen(row.collected)
        assert drive.stats.pages_used == pages
    needs = [len(a.request.prompt) + len(a.output) - 1 for a in workload.arrivals]
    assert drive.stats.computed_tokens == sum(needs)


@few
@given(workloads(depths=(1,)))
def test_recomputed_tokens_are_what_was_computed_in_vain(workload):
    stats = SchedulerDriver(workload.without_cache()).run().stats
    needs = [len(a.request.prompt) + len(a.output) - 1 for a in workload.arrivals]
    assert stats.computed_tokens - stats.recomputed_tokens == sum(needs)


@pytest.mark.sample(2)
@pytest.mark.parametrize("pages", range(4, 9))
@pytest.mark.parametrize("depth", [1, 2])
def test_small_engines_of_every_size_serve_three_requests(depth, pages):
    requests = [make_request(1, 3, 6), make_request(2, 1, 7), make_request(3, 5, 3)]
    come = tuple(
        Arrival(i, turn, request) for i, (turn, request) in enumerate(zip((0, 0, 1), requests, strict=True), 1)
    )
    preempted = 0
    for budget in (2, 3, 5, 16):
        for rows in (1, 2, 3):
            for chunk in (None, 1, 2):
                if rows <= budget:
                    engine = SchedulerSettings(budget, rows, chunk, depth)
                    workload = Workload(come, make_layout(2), pages, engine)
                    preempted += SchedulerDriver(workload).run().stats.preemptions
    assert preempted > 5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_client_may_leave_in_any_turn(depth):
    requests = [make_request(1, 3, 6), make_request(2, 2, 7), make_request(3, 5, 3)]
    engine = SchedulerSettings(4, 2, None, depth)
    for attempt in (1, 2, 3):
        for turn in range(25):
            come = tuple(Arrival(i, 0, r, cancel=turn if i == attempt else None) for i, r in enumerate(requests, 1))
            SchedulerDriver(Workload(come, make_layout(2), 6, engine)).run()
