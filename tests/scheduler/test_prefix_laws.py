"""The laws of the prefix cache over drawn workloads, half of whose prompts start as others do.

`SchedulerDriver` checks in every turn: a row joins on the longest published prefix of full pages, these pages hold its
tokens, a sequence that is passed over waits for a page which a running row computes, and the counts add up.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from scheduler.events import EndReason
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.reaching import unreached
from tests.scheduler.workloads import Workload, workloads
from tests.support.examples import examples

few = settings(max_examples=examples(60), deadline=None)


def found(drive: SchedulerDriver) -> list[list[int]]:
    """Cached tokens of each join, by attempt."""
    return list(drive.executor.found.values())


NOTES = {
    "a prompt was there in part": lambda drive: any(first for first, *_ in found(drive)),
    "a preempted one comes back on its pages": lambda drive: any(any(later) for _, *later in found(drive)),
    "only what a window sees was there": lambda drive: drive.executor.within > 0,
    "two rows had the same page": lambda drive: drive.executor.taken_over > 0,
    "pages were evicted": lambda drive: drive.stats.evicted_capacity > 0,
    "evicted and hit": lambda drive: drive.stats.evicted_capacity > 0 and drive.stats.prefix_hits > 0,
    "a fault took names": lambda drive: drive.stats.evicted_fault > 0,
    "a reset took names": lambda drive: drive.stats.evicted_reset > 0,
    "a request was overtaken": lambda drive: drive.overtaken > 0,
}


@pytest.mark.slow
def test_drawn_workloads_reach_what_the_laws_speak_of():
    drawn = workloads() | workloads(faults=True, resets=True) | workloads(cancels=True, last_turn=30)
    assert unreached(drawn, NOTES) == set()


def tokens_of(workload: Workload) -> dict[int, list[int]]:
    told = SchedulerDriver(workload).run().told
    assert all(one.end.reason in (EndReason.STOP, EndReason.LENGTH) for one in told.values())
    return {attempt: one.tokens for attempt, one in told.items()}


@few
@given(workloads(resumed=True, resets=True))
def test_the_cache_changes_no_token(workload):
    assert tokens_of(workload) == tokens_of(workload.without_cache())


@few
@given(workloads(cancels=True, queue_timeout=True, resumed=True, faults=True, resets=True, last_turn=20))
def test_all_of_it_at_once_the_same_byte_for_byte(workload):
    assert SchedulerDriver(workload).run().trace == SchedulerDriver(workload).run().trace


@few
@given(workloads(roomy=True, resumed=True, resets=True, depths=(1,)))
def test_what_is_found_is_not_computed(workload):
    stats = SchedulerDriver(workload).run().stats
    needs = [len(a.request.prompt) + len(a.output) - 1 for a in workload.arrivals]
    assert stats.computed_tokens + stats.prefix_hits == sum(needs)


@few
@given(workloads(cancels=True, faults=True, resets=True, last_turn=20))
def test_without_names_nothing_is_kept(workload):
    drive = SchedulerDriver(workload.without_cache()).run()
    assert not any(any(joins) for joins in found(drive))
    cache, stats = drive.scheduler.cache, drive.stats
    assert (cache.allocator.free, len(cache.prefix.index)) == (cache.pool.total, 0)
    assert (stats.prefix_queries, stats.prefix_hits, stats.evicted_capacity, stats.pages_cached) == (0, 0, 0, 0)


@few
@given(workloads(cancels=True, faults=True, last_turn=20))
def test_salts_of_their_own_share_nothing(workload):
    def salted(arrival):
        scope = replace(arrival.request.scope, salt=f"salt-{arrival.attempt}")
        return replace(arrival, request=replace(arrival.request, scope=scope))

    drive = SchedulerDriver(replace(workload, arrivals=tuple(map(salted, workload.arrivals)))).run()
    assert not any(first for first, *_ in found(drive))
    assert (drive.stats.prefix_hits, drive.stats.pages_shared) == (0, 0)
    # A preempted one that has lost pages of a window computes pages again that its own first life has published.
    assert not drive.executor.taken_over or (workload.layout.windows and drive.stats.preemptions)
