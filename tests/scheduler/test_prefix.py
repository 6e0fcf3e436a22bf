"""The prefix cache seen from the scheduler, one case at a time. Its laws are in `test_prefix_laws`."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cache_manager.block_hash import Scope
from scheduler.events import EndReason
from scheduler.settings import SchedulerSettings
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.executor import alone
from tests.scheduler.workloads import EVERYBODY, Arrival, Workload, make_layout, make_request

PAGE = 4
LONG = tuple((i * i + 1) % 13 for i in range(40))  # ten pages
depths = pytest.mark.parametrize("depth", [1, 2])


def drive(
    arrivals: Sequence[Arrival],
    pages: int = 200,
    rows: int = 8,
    budget: int = 16,
    chunk: int | None = None,
    depth: int = 1,
    page_size: int = PAGE,
    cache: bool = True,
) -> SchedulerDriver:
    settings = SchedulerSettings(budget, rows, chunk, depth)
    return SchedulerDriver(Workload(tuple(arrivals), make_layout(page_size), pages, settings, prefix_cache=cache))


def arrival(
    attempt: int, prompt: tuple[int, ...], turn: int = 0, max_tokens: int = 3, scope: Scope = EVERYBODY, **values: int
) -> Arrival:
    return Arrival(attempt, turn, make_request(attempt, prompt, max_tokens, scope=scope), **values)


def cached(run: SchedulerDriver) -> list[int]:
    return [told.cached for told in run.told.values()]


def run_until(run: SchedulerDriver, reached) -> SchedulerDriver:
    while not reached():
        run.next_turn()
        assert run.turn < run.workload.most_turns
    return run


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 39, 40])
def test_a_prompt_that_comes_again_is_there_but_for_its_last_token(length):
    run = drive([arrival(1, LONG[:length]), arrival(2, LONG[:length], turn=30)]).run()
    assert cached(run) == [0, (length - 1) // PAGE * PAGE]


def test_a_conversation_goes_on_from_the_output_before():
    first = make_request(1, LONG[:10], 15)
    said = tuple(alone(first))
    second = LONG[:10] + said + (7, 7, 7)
    run = drive([arrival(1, LONG[:10], max_tokens=15), arrival(2, second, turn=40)]).run()
    assert cached(run) == [0, 24], "24 of the 25 tokens before the new ones; the last one drawn was never computed"


def test_a_request_goes_on_from_one_that_still_runs():
    run = drive([arrival(1, LONG, max_tokens=60), arrival(2, (*LONG, 1, 2), turn=10)])
    run_until(run, lambda: 2 in run.told and run.told[2].tokens)
    assert run.told[1].end is None
    assert run.stats.pages_shared == 10
    assert cached(run.run()) == [0, 40]


TOGETHER = 32
SHARED = tuple((i * i + i // 7) % 13 for i in range(1024))


def crowd(**values: int) -> list[Arrival]:
    """32 that come together, start with the same 1,024 tokens, and go on each in its own way. values: of the first."""
    tails = [(attempt % 13, attempt // 13, 5) for attempt in range(1, TOGETHER + 1)]
    return [arrival(i, SHARED + tail, max_tokens=2, **(values if i == 1 else {})) for i, tail in enumerate(tails, 1)]


@depths
def test_32_that_come_together_compute_what_they_share_once(depth):
    run = drive(crowd(), pages=400, rows=TOGETHER, budget=256, page_size=16, depth=depth).run()
    assert cached(run) == [0] + [1024] * (TOGETHER - 1)
    assert run.stats.computed_tokens == 1024 + TOGETHER * (3 + 1)
    assert run.stats.prefix_hits == 1024 * (TOGETHER - 1)


@depths
@pytest.mark.parametrize("turn", [1, 3, 7])
def test_where_the_first_is_aborted_the_next_takes_over(depth, turn):
    run = drive(crowd(cancel=turn), pages=400, rows=TOGETHER, budget=128, page_size=16, depth=depth).run()
    assert run.told[1].end.reason is EndReason.FINISHED
    assert {told.end.reason for told in run.told.values() if told.arrival.attempt > 1} == {EndReason.LENGTH}
    assert sum(found == [1024] for found in run.executor.found.values()) == TOGETHER - 2
    lost = run.stats.computed_tokens - 1024 - (TOGETHER - 1) * (3 + 1)
    assert 0 <= lost <= 128 * depth + 16, "no more than the steps in flight, and a page that was not full"


@depths
def test_where_the_first_is_preempted_nobody_computes_anew(depth):
    """An older one that decodes takes the pages of the first that computes what the others wait for."""
    others = [arrival(i, LONG + LONG + (i, i), max_tokens=2) for i in (2, 3, 4)]
    run = drive([arrival(1, (9, 9, 9), max_tokens=40), *others], pages=27, budget=8, chunk=2, depth=depth)
    run_until(run, lambda: run.scheduler.stats().preemptions)
    assert not run.told[2].tokens, "was to be preempted while it computes its prompt"
    run.run()
    assert run.stats.computed_tokens - run.stats.recomputed_tokens == 3 + 39 + 80 + 3 * (2 + 1)


@depths
@pytest.mark.parametrize("chunk", [None, 3, 8])
@pytest.mark.parametrize("length", [8, 37, 40])
def test_nobody_waits_longer_than_it_would_have_computed(depth, chunk, length):
    def first_tokens(cache: bool) -> list[int]:
        come = [arrival(i, (*LONG[:length], i, i), turn=i // 3, max_tokens=4) for i in (1, 2, 3, 4)]
        run = drive(come, depth=depth, chunk=chunk, cache=cache)
        turns = []
        for attempt in (1, 2, 3, 4):
            run_until(run, lambda a=attempt: a in run.told and run.told[a].tokens)
            turns.append(run.turn)
        run.run()
        return turns

    # The page is there once the step that fills it is committed: as late as the steps in flight.
    for on, off in zip(first_tokens(True), first_tokens(False), strict=True):
        assert on <= off + depth


@depths
def test_nor_where_the_one_it_waits_for_leaves(depth):
    """In the worst case the wait was in vain, and all is computed as if it had just come."""
    alone_takes = drive([arrival(1, LONG, max_tokens=1)], depth=depth).run().turn
    for turn in range(1, 12):
        run = drive([arrival(1, LONG, cancel=turn), arrival(2, LONG, max_tokens=1)], depth=depth)
        run_until(run, lambda r=run: 2 in r.told and r.told[2].tokens)
        assert run.turn <= turn + alone_takes + depth
        run.run()


def test_those_behind_one_that_waits_are_not_held_up():
    come = [arrival(1, LONG), arrival(2, LONG), arrival(3, (5,)), arrival(4, (*LONG, 1)), arrival(5, (6, 6))]
    run = drive(come, chunk=8)
    run.next_turn()
    assert run.scheduler.rows.attempts() == [1, 3, 5]
    assert run.scheduler.queue.attempts() == [2, 4]
    run.run()
    assert cached(run) == [0, 36, 0, 40, 0]


def test_one_that_was_overtaken_comes_before_a_later_one_that_is_preempted():
    """First come, first served: 3 starts while 2 waits for a page of 1's, and loses its own pages before 2 starts."""
    come = [arrival(1, LONG + LONG), arrival(2, LONG + LONG), arrival(3, (5, 5, 5), max_tokens=30)]
    run = drive(come, pages=24, budget=8, chunk=2)
    run_until(run, lambda: run.scheduler.stats().preemptions)
    assert run.scheduler.rows.attempts() == [1]
    assert run.scheduler.queue.attempts() == [2, 3]
    run.run()


def test_scopes_share_only_what_they_may():
    salted, other, tenant = Scope(salt="a"), Scope(salt="b"), Scope("acme")
    scopes = [EVERYBODY, EVERYBODY, salted, other, tenant, salted, tenant]
    run = drive([arrival(i, LONG, turn=30 * i, scope=scope) for i, scope in enumerate(scopes)]).run()
    assert cached(run) == [0, 36, 0, 0, 0, 36, 36]


def test_tenants_share_a_public_prefix_and_nothing_after_it():
    scopes = [Scope("acme", public=10), Scope("umbrella", public=10), Scope("acme", public=10), Scope("x", "y", 10)]
    run = drive([arrival(i, LONG, turn=30 * i, scope=scope) for i, scope in enumerate(scopes)]).run()
    assert cached(run) == [0, 8, 36, 0]


@depths
def test_pages_of_one_that_faulted_are_hit_by_nobody(depth):
    """All of them: also those that were published before the fault."""
    come = [arrival(1, LONG, fault=35), *(arrival(i, LONG, turn=30 * i) for i in (2, 3))]
    run = drive(come, chunk=8, depth=depth).run()
    assert run.told[1].end.reason is EndReason.FAULT
    assert cached(run) == [0, 0, 36]
    assert run.stats.evicted_fault == 8


def test_pages_that_a_faulted_one_had_from_another_are_hit_by_nobody():
    come = [arrival(1, LONG), arrival(2, (*LONG, 1, 2), turn=30, fault=41), arrival(3, LONG, turn=60)]
    run = drive(come).run()
    assert cached(run) == [0, 40, 0]
    assert run.stats.evicted_fault == 10


def test_output_of_an_earlier_attempt_is_looked_up_too():
    request = make_request(1, LONG[:6], 20)
    come = [Arrival(1, 0, request), Arrival(2, 40, make_request(2, LONG[:6], 20), emitted=(11,))]
    run = drive(come).run()
    assert cached(run) == [0, 6], "of the prompt"
    assert (run.stats.prefix_queries, run.stats.prefix_hits) == (6 + 17, 16)


def test_tokens_computed_again_are_those_that_were():
    """A preempted one goes on from the pages that it has published, and from no more."""
    come = [arrival(1, LONG[:4], max_tokens=12), arrival(2, LONG[4:8], max_tokens=12)]
    run = drive(come, pages=6, rows=2).run()
    assert run.stats.preemptions > 0
    again = run.stats.computed_tokens - 2 * (4 + 12 - 1)
    assert run.stats.recomputed_tokens == run.executor.recomputed == again
    assert again < sum(found for _, *later in run.executor.found.values() for found in later) + 12


def test_a_recomputation_that_is_cut_short_is_not_counted_whole():
    """Preempted, begun again from nothing, and then cancelled: only what was computed twice counts."""

    def run(**cancel: int) -> SchedulerDriver:
        come = [arrival(1, LONG[:4], max_tokens=24), arrival(2, LONG[:17], max_tokens=12, **cancel)]
        return drive(come, pages=10, rows=2, chunk=2, cache=False)

    begun = run_until(watched := run(), lambda: watched.executor.recomputed).turn
    cut = run(cancel=begun).run()
    assert cut.stats.recomputed_tokens == cut.executor.recomputed == watched.executor.recomputed


def test_evicted_pages_are_counted_with_their_lifetimes():
    come = [arrival(1, LONG[:8], max_tokens=1), arrival(2, LONG[8:16], max_tokens=1, turn=7)]
    run = drive(come, pages=3).run()
    assert (run.stats.evicted_capacity, run.stats.pages_cached) == (1, 3)
    assert run.stats.lifetimes == (0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0), "published in turn 0, evicted in turn 7"
    assert run.stats.lifetime_seconds == 7.0


def test_gauges_while_two_share():
    run = drive([arrival(1, LONG[:8], max_tokens=30), arrival(2, LONG[:9], turn=3, max_tokens=30)])
    run_until(run, lambda: 2 in run.told and run.told[2].tokens)
    rows = run.executor.rows.values()
    assert run.stats.pages_shared == 2
    assert run.stats.pages_used == sum(len(row.tables[0].told) for row in rows) - 2
    assert run.stats.slots_unused == sum(PAGE * len(row.tables[0].told) - row.computed for row in rows)
    assert run.stats.pages_cached == 0
    run.run()


def test_a_reset_forgets_and_hurts_nobody():
    come = [arrival(1, LONG, max_tokens=40), arrival(2, LONG, turn=20), arrival(3, LONG, turn=80)]
    run = SchedulerDriver(replace(drive(come).workload, resets=frozenset({15}))).run()
    assert cached(run) == [0, 0, 36], "2's, not 1's: who runs at a reset publishes no more"
    assert run.stats.evicted_reset > 0
