"""Layer groups with sliding windows seen from the scheduler, one case at a time. Their laws are in `test_laws`."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest

from scheduler.backpressure import FEWEST_STEPS
from scheduler.events import EndReason, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from tests.scheduler.driver import SchedulerDriver
from tests.scheduler.executor import alone
from tests.scheduler.test_prefix import LONG, PAGE, arrival, cached, depths, run_until
from tests.scheduler.test_scheduler import reasons, result_of, step
from tests.scheduler.workloads import PATIENT, Arrival, Workload, make_layout, make_request

LONGER = tuple((i * i + i // 7) % 13 for i in range(200))  # fifty pages
LAYOUTS = [(5,), (1,), (8,), (3, 10), (None, 6), (6, None), (None, None)]
layouts = pytest.mark.parametrize("windows", LAYOUTS, ids=str)


def drive(
    arrivals: Sequence[Arrival],
    windows: tuple[int | None, ...],
    pages: int = 200,
    rows: int = 4,
    budget: int = 16,
    chunk: int | None = None,
    depth: int = 1,
    cache: bool = True,
) -> SchedulerDriver:
    layout, settings = make_layout(PAGE, windows=windows), SchedulerSettings(budget, rows, chunk, depth)
    return SchedulerDriver(Workload(tuple(arrivals), layout, pages, settings, prefix_cache=cache))


def tokens(run: SchedulerDriver) -> dict[int, list[int]]:
    return {attempt: told.tokens for attempt, told in run.told.items()}


def due(arrivals: Sequence[Arrival]) -> dict[int, list[int]]:
    return {one.attempt: alone(one.request) for one in arrivals}


def held(run: SchedulerDriver, group: int, row: int = 0) -> int:
    """Pages of a row in a group."""
    return len(run.scheduler.cache.tables.pages_of(group, row))


# Requests that fit a pool


@depths
@pytest.mark.parametrize("windows", [(5,), (1,), (9, 3)], ids=str)
@pytest.mark.parametrize("cache", [True, False])
def test_a_prompt_much_longer_than_the_pool_runs_where_all_groups_have_windows(windows, depth, cache):
    settings = SchedulerSettings(6, 2, 4, depth)
    pages = make_layout(PAGE, windows=windows).pages_for(10**6, settings.ahead)
    assert pages * PAGE < len(LONGER) / 3
    come = [arrival(1, LONGER, max_tokens=40)]
    run = drive(come, windows, pages, 2, 6, 4, depth, cache).run()
    assert tokens(run) == due(come)
    assert (run.stats.preemptions, run.stats.recomputed_tokens) == (0, 0)


@depths
def test_two_prompts_longer_than_the_pool_run_beside_each_other(depth):
    come = [arrival(1, LONGER, max_tokens=20), arrival(2, LONGER[::-1], max_tokens=20)]
    run = drive(come, (5,), pages=12, budget=8, chunk=4, depth=depth)
    run_until(run, lambda: len(run.scheduler.rows.attempts()) == 2)
    assert tokens(run.run()) == due(come)


def test_a_request_that_is_decoded_holds_no_more_the_longer_it_gets():
    run = drive([arrival(1, LONG[:4], max_tokens=120)], (5, 9), budget=4)
    run_until(run, lambda: 1 in run.told and run.told[1].tokens)
    most = 0
    while run.told[1].end is None:
        most = max(most, run.stats.pages_used)
        run.take_turn()
    assert most == 2 + 3, "pages of 4 tokens: 5 lie in two of them, 9 in three"


def test_a_hybrid_model_runs_more_at_once_than_one_without_windows():
    def most_running(windows: tuple[int | None, ...]) -> int:
        come = [arrival(i, tuple((i * j) % 13 for j in range(40)), max_tokens=8) for i in range(1, 9)]
        run = drive(come, windows, pages=60, rows=8, budget=16, chunk=8)
        running = []
        while run.turn < run.workload.most_turns and (run.turn == 0 or run.scheduler.has_work):
            run.next_turn()
            running.append(run.scheduler.rows.used)
        assert tokens(run) == due(come)
        return max(running)

    full, hybrid, pure = (most_running(windows) for windows in [(None, None), (None, 6), (6, 6)])
    assert full < hybrid < pure


def test_a_prompt_gets_slots_of_a_window_as_it_is_computed():
    run = drive([arrival(1, LONG)], (None, 6), budget=8)
    reach = []
    while run.turn < 5:
        run.next_turn()
        first, end = run.scheduler.cache.tables.first[:, 0], run.scheduler.cache.tables.held[:, 0]
        reach.append([(int(a), int(b)) for a, b in zip(first, end, strict=True)])
    # 8 tokens a step are two pages; the sixth token before the next one lies two pages back.
    assert reach == [[(0, 10), (0, 2)], [(0, 10), (2, 4)], [(0, 10), (4, 6)], [(0, 10), (6, 8)], [(0, 10), (8, 10)]]


# Others beside it


@depths
@pytest.mark.parametrize("windows", [(6,), (None, 6)], ids=str)
def test_a_long_prefill_in_windows_delays_no_decode(windows, depth):
    come = [arrival(1, LONG[:3], max_tokens=60), arrival(2, LONG[5:9], max_tokens=60)]
    come.append(arrival(3, LONGER[:100], turn=4, max_tokens=2))
    run = drive(come, windows, pages=80, rows=3, budget=6, depth=depth)
    layout, most, chunks = run.workload.layout, 0, 0
    while not (3 in run.told and run.told[3].tokens):
        outputs = run.next_turn()
        if run.turn > 4:
            assert outputs is not None
            assert {1, 2} <= set(outputs.attempts.tolist())
        chunks += 3 in run.scheduler.rows.attempts()
        most = max(most, held(run, len(windows) - 1, row=2))
    assert 25 <= chunks <= 26 + depth, "4 tokens of it beside two decodes in every step"
    assert most <= layout.pages_within(6, run.workload.settings.ahead)
    assert tokens(run.run()) == due(come)


@depths
def test_a_prefill_that_lacks_slots_waits_for_those_behind_its_window(depth):
    """Pages for all that a row may hold are there when it starts, so it preempts no row and is not preempted."""
    come = [arrival(1, LONG[:6], max_tokens=50), arrival(2, LONGER[:90], turn=2, max_tokens=3)]
    for pages in range(7, 20):
        run = drive(come, (6,), pages, rows=2, budget=5, chunk=4, depth=depth).run()
        assert tokens(run) == due(come)
        assert run.stats.preemptions == 0


TWO = [arrival(1, LONG[:9], max_tokens=40), arrival(2, LONG[3:14], max_tokens=40)]
FIVE = [arrival(i, LONGER[5 * i : 5 * i + 2 + 3 * i], turn=i // 2, max_tokens=30) for i in range(1, 6)]


@depths
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("come", "windows", "pages"),
    [(TWO, (None, 6), 19), (TWO, (6, None), 22), (FIVE, (3, 10), 10)],
    ids=["hybrid", "window first", "pure"],
)
def test_preempted_in_mid_window_and_resumed_gives_the_same_tokens(come, windows, pages, cache, depth):
    run = drive(come, windows, pages, len(come), 6, 3, depth, cache)
    run_until(run, lambda: run.scheduler.stats().preemptions)
    victim = run.scheduler.queue.attempts()[0]
    assert len(run.told[victim].known()) > min(window for window in windows if window)
    run.run()
    assert len(run.executor.found[victim]) == 2
    assert tokens(run) == due(come)


def test_one_that_was_preempted_goes_on_from_what_its_window_sees():
    come = [arrival(1, LONG[:8], max_tokens=40), arrival(2, LONGER[:24], max_tokens=40)]
    run = drive(come, (None, 6), pages=32, rows=2)
    run_until(run, lambda: run.scheduler.stats().preemptions)
    computed = len(LONGER[:24]) + len(run.told[2].tokens) - 1
    run_until(run, lambda: len(run.executor.found[2]) == 2)
    assert run.executor.found[2][1] in (computed // PAGE * PAGE, computed // PAGE * PAGE - PAGE)
    row = run.scheduler.rows.row_of(2)
    assert run.scheduler.cache.tables.first[0, row] == 0
    assert run.scheduler.cache.tables.first[1, row] >= run.executor.found[2][1] // PAGE - 2
    assert tokens(run.run()) == due(come)


def test_a_page_is_let_go_of_when_the_step_is_committed_after_which_nobody_sees_it():
    settings, layout = SchedulerSettings(4, 2, 4, 2), make_layout(PAGE, windows=(4,))
    scheduler = Scheduler(settings, PATIENT, Workload((), layout, 20, settings).cache)
    plans = [scheduler.schedule(0.0, [Submit(1, make_request(1, 16, 3))]), scheduler.schedule(0.0, [])]
    freed = []
    for i in range(4):  # commits positions 4 i and on, while those of the next step are being computed
        scheduler.commit(result_of(plans[i], [1] * len(plans[i].logits)), 0.0)
        plans.append(scheduler.schedule(0.0, []))
        freed.append(plans[-1].freed.tolist())
    told = [page for plan in plans for _, _, _, page in plan.grown.tolist()]
    assert freed == [[], [told[0]], [told[1]], [told[2]]], "position 8 sees 5 to 8, and so on"


# The prefix cache


@layouts
@depths
@pytest.mark.parametrize("length", [1, 4, 5, 8, 17, 40])
def test_a_prompt_that_comes_again_is_there_but_for_its_last_token(windows, depth, length):
    come = [arrival(1, LONG[:length]), arrival(2, LONG[:length], turn=30)]
    run = drive(come, windows, chunk=5, depth=depth).run()
    assert cached(run) == [0, (length - 1) // PAGE * PAGE]


@pytest.mark.parametrize(("window", "pages"), [(1, 1), (4, 1), (5, 1), (6, 2), (9, 2), (10, 3), (40, 9)])
def test_who_goes_on_from_a_prefix_holds_what_its_window_sees(window, pages):
    come = [arrival(1, LONG), arrival(2, LONG, turn=30, max_tokens=1)]
    run = drive(come, (None, window), budget=4)
    run_until(run, lambda: 2 in run.executor.found)
    assert run.executor.found[2] == [36]
    assert [int(first) for first in run.scheduler.cache.tables.first[:, 0]] in ([0, 9 - pages], [0, 0])
    run.run()


@pytest.mark.parametrize(("again", "tight"), [(LONG[:24], 0), ((*LONG, 1, 2), 40)])
def test_a_prefix_is_found_only_as_far_as_no_window_has_lost_it(again, tight):
    """The window's early pages of the first prompt are gone when another needs room; the other group's stay, and so
    does the end of it.
    """
    come = [arrival(1, LONG, max_tokens=1), arrival(2, LONGER[:20], turn=20, max_tokens=1)]
    come.append(arrival(3, again, turn=30, max_tokens=1))
    for pages, there in ((60, (len(again) - 1) // PAGE * PAGE), (26, tight)):
        run = drive(come, (None, 6), pages, budget=8).run()
        assert cached(run) == [0, 0, there]
        assert tokens(run) == due(come)


def test_pages_that_were_computed_again_are_there_again():
    come = [arrival(1, LONG, max_tokens=1), arrival(2, LONGER[:20], turn=20, max_tokens=1)]
    come += [arrival(i, LONG[:24], turn=15 * i, max_tokens=1) for i in (3, 4)]
    run = drive(come, (None, 6), 23, budget=8).run()
    assert cached(run) == [0, 0, 0, 20]


@depths
def test_pages_that_left_the_window_of_one_that_faulted_are_hit_by_nobody(depth):
    for windows in [(5,), (None, 5), (5, 2)]:
        come = [arrival(1, LONG, fault=35), arrival(2, LONG[:20], turn=30), arrival(3, LONG[:20], turn=60)]
        run = drive(come, windows, chunk=8, depth=depth).run()
        assert run.told[1].end.reason is EndReason.FAULT
        assert cached(run) == [0, 0, 16]


def test_a_reset_forgets_what_left_a_window_too():
    come = [arrival(1, LONG, max_tokens=40), arrival(2, LONG[:20], turn=20), arrival(3, LONG, turn=80)]
    run = SchedulerDriver(replace(drive(come, (5,)).workload, resets=frozenset({15}))).run()
    assert cached(run) == [0, 0, 20], "2's, not 1's: who runs at a reset publishes no more"


@layouts
@depths
@pytest.mark.sample(2)
def test_the_cache_changes_no_token(windows, depth):
    stems = [LONG[:17], (*LONG[:12], 3, 3), LONG, LONGER[:30], (*LONGER[:16], 1)]
    come = [arrival(i, stems[i % 5], turn=2 * i, max_tokens=3 + 5 * (i % 3)) for i in range(1, 13)]
    layout = make_layout(PAGE, windows=windows)
    least = layout.pages_for(60, SchedulerSettings(9, 4, 5, depth).ahead)
    for pages in (least, least + 7, 100):
        on, off = (drive(come, windows, pages, 4, 9, 5, depth, cache).run() for cache in (True, False))
        assert tokens(on) == tokens(off) == due(come)


def test_small_engines_with_windows_of_every_size_serve_three_requests():
    requests = [make_request(1, 3, 6), make_request(2, 1, 7), make_request(3, 5, 3)]
    come = tuple(Arrival(i, turn, one) for i, (turn, one) in enumerate(zip((0, 0, 1), requests, strict=True), 1))
    kinds = [*product(range(1, 6)), *product((None,), range(1, 6)), (1, 4), (3, 2)]
    preempted = left = 0
    for windows, depth, (budget, rows, chunk) in product(kinds, (1, 2), [(2, 2, 1), (3, 3, None), (5, 2, 2)]):
        engine, layout = SchedulerSettings(budget, rows, chunk, depth), make_layout(2, windows=windows)
        least = max(layout.pages_for(one.longest, engine.ahead) for one in come)
        for pages in (least, least + 1, least + 3):
            run = SchedulerDriver(Workload(come, layout, pages, engine)).run()
            preempted += run.stats.preemptions
            left += run.executor.out_of_sight
    assert preempted > 50
    assert left > 500


# Bugs that were there


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_one_that_leaves_early_ranks_only_pages_that_it_had(policy):
    """Not a node that its names find, but that it has not come to, which is offered for eviction: that would lose its
    place among those offered, and the engine would end when a page is needed and nothing else is offered.
    """
    prompt = LONG[:8]
    come = [arrival(1, prompt, max_tokens=1), arrival(2, (9,) * 8, turn=5, max_tokens=1)]
    come += [arrival(3, prompt, turn=12, cancel=14), arrival(4, (8,) * 14, turn=20)]
    workload = drive(come, (3,), pages=3, rows=2, budget=4, chunk=2).workload
    SchedulerDriver(replace(workload, policy=policy)).run()


def test_a_fault_takes_no_names_from_pages_that_the_row_had_not_come_to():
    """The third recomputes a page that the first one's window has lost, and faults there.

    Pages that the first one has published after it stay, and it goes on to publish.
    """
    said = LONG[:8] + tuple(alone(make_request(1, LONG[:8], 40)))
    come = [arrival(1, LONG[:8], max_tokens=40), arrival(2, (9,) * 12, turn=4, max_tokens=1)]
    come += [arrival(3, LONG[:8], turn=14, fault=1), arrival(4, said[:22], turn=22)]
    run = drive(come, (3,), pages=8, rows=2, budget=5, chunk=4).run()
    assert cached(run) == [0, 0, 0, 20]


def test_a_newcomer_that_shares_pages_in_a_window_has_room_for_its_prompt():
    """A page that it shares leaves its window while the other keeps it, and another one is taken in its place."""
    come = [arrival(1, LONG, max_tokens=50), arrival(2, LONG[:36] + (5,) * 30, turn=14, max_tokens=2)]
    run = drive(come, (10,), pages=7, rows=2, budget=8, chunk=3).run()
    assert run.stats.preemptions == 0


def test_who_can_start_at_once_is_not_refused_for_a_predicted_wait():
    """Four prompts of 25 pages of which 4 are held at a time, and 40 pages that are free."""
    settings, layout = SchedulerSettings(64, 4, 8), make_layout(PAGE, windows=(4,))
    scheduler = Scheduler(settings, PATIENT, Workload((), layout, 40, settings).cache)
    for _ in range(FEWEST_STEPS):
        scheduler.backpressure.observe_step(4, 100.0)
    outputs = step(scheduler, 100.0, [Submit(i, make_request(i, 100, queue_timeout=1.0)) for i in (1, 2, 3, 4)])
    assert reasons(outputs) == []
