"""The bound on preemptions, and their causes, as laws under every policy, in small pools."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.block_hash import Scope
from cache_manager.tier import HostTier
from scheduler.admission import Admission
from scheduler.parameters import Beam
from scheduler.policies import POLICIES
from scheduler.preemption import Preemption
from scheduler.preemption_cause import PreemptionCause
from scheduler.rows import Rows
from scheduler.running import Running
from scheduler.running_work import RunningWork
from scheduler.scheduler import Scheduler
from scheduler.settings import MOST_PREEMPTIONS, SCHEDULING_POLICIES, SchedulerSettings
from tests.scheduler.executor import FakeExecutor, LawBroken
from tests.scheduler.play import play
from tests.scheduler.preemptions import PreemptionWatch
from tests.scheduler.reaching import unreached_runs
from tests.scheduler.swapping import SwappingExecutor
from tests.scheduler.test_policy import of_tenants
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request
from tests.support.examples import examples
from tests.support.planted import plant
from tests.support.swaps import always_swap


@st.composite
def bounded(draw, workload: Workload) -> Workload:
    """A workload under any policy, with a small bound."""
    chosen = replace(
        workload.settings,
        policy=draw(st.sampled_from((*SCHEDULING_POLICIES, "priority", "priority"))),
        max_preemptions=draw(st.sampled_from((1, 1, 0, 2))),
        priority_ageing=draw(st.sampled_from((0.0, 2.0))),
        schedule_conservativeness=draw(st.sampled_from((0.0, 2.0))),
    )
    return replace(workload, settings=chosen)


@st.composite
def storms(draw) -> Workload:
    """Short prompts and longer outputs, of several tenants and priorities, in a pool for one to three of them."""
    layout = make_layout(draw(st.sampled_from((1, 2, 3))), draw(st.integers(1, 2)))
    count, come = draw(st.integers(3, 7)), list[Arrival]()
    turns = sorted(draw(st.lists(st.integers(0, 30), min_size=count, max_size=count)))
    for attempt, turn in enumerate(turns, 1):
        scope = Scope(tenant=draw(st.sampled_from("aab")))
        request = make_request(attempt, draw(st.integers(1, 6)), draw(st.integers(4, 24)), scope=scope)
        come.append(Arrival(attempt, turn, replace(request, priority=draw(st.integers(-2, 2)))))
    rows = draw(st.integers(3, 5))
    config = SchedulerSettings(rows + draw(st.integers(2, 12)), rows, steps_in_flight=draw(st.sampled_from((1, 2))))
    most = max(layout.pages_for(one.longest, config.ahead) for one in come)
    pages = most + draw(st.integers(0, 2 * most))
    workload = Workload(tuple(come), layout, pages, config, prefix_cache=draw(st.booleans()))
    return draw(bounded(workload))


def run(workload: Workload) -> PreemptionWatch:
    """Plays a workload to its end in time under the laws of any policy, and those of preemptions."""
    config, pool = workload.settings, workload.layout.tokens_in(workload.pages)
    policy = POLICIES[config.policy](config, pool)
    scheduler = Scheduler(config, workload.queue, workload.cache, workload.hasher, policy=policy)
    watch = PreemptionWatch(scheduler)
    play(workload, scheduler, FakeExecutor(workload.layout, workload.pages, config), patience=4)
    watch.check_the_end()
    return watch


SEVERAL = of_tenants(several=True, last_turn=12).flatmap(bounded)


@settings(max_examples=examples(150), deadline=None)
@given(storms())
def test_the_bound_and_the_causes_hold_under_every_policy(workload: Workload) -> None:
    run(workload)


@settings(max_examples=examples(60), deadline=None)
@given(SEVERAL)
def test_also_with_searches_and_several_sequences(workload: Workload) -> None:
    run(workload)


NOTES: dict[str, Callable[[PreemptionWatch], object]] = {
    "for pages": lambda watch: watch.causes[PreemptionCause.PAGES],
    "for a more urgent one": lambda watch: watch.causes[PreemptionCause.PRIORITY],
    "of a hypothesis that waits": lambda watch: watch.causes[PreemptionCause.SEARCH],
    "for pages and a more urgent one": lambda watch: (
        watch.causes[PreemptionCause.PAGES] and watch.causes[PreemptionCause.PRIORITY]
    ),
    "beyond the bound": lambda watch: watch.beyond,
    "an earlier one gives way": lambda watch: watch.spared,
}


@pytest.mark.slow
def test_drawn_workloads_reach_what_the_laws_speak_of() -> None:
    assert unreached_runs((storms() | SEVERAL).map(run), NOTES) == set()


def test_a_lost_copy_is_a_cause_of_its_own() -> None:
    layout = make_layout(2)
    config = SchedulerSettings(max_batched_tokens=8, max_sequences=2, prefill_chunk=4)
    prompts = [tuple((first + i) % 13 for i in range(13)) for first in (0, 5, 9)]
    come = tuple(Arrival(i, 12 * i, make_request(i, prompts[i % 3], 3)) for i in range(1, 13))
    workload = Workload(come, layout, layout.pages_for(20), config)
    cache = workload.cache
    cache.pool.tier = HostTier(40, 1)
    scheduler = Scheduler(config, workload.queue, cache, workload.hasher)
    watch = PreemptionWatch(scheduler)
    executor = SwappingExecutor(layout, workload.pages, config)
    executor.spoils, executor.rng = 1.0, Random(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        always_swap(monkeypatch)
        play(workload, scheduler, executor, patience=10)
    watch.check_the_end()
    assert watch.causes[PreemptionCause.LOST_COPY]


def first_come(most: int, pages: int, come: tuple[Arrival, ...], rows: int) -> Workload:
    """Requests whose outputs outgrow their pool, with a bound on preemptions."""
    config = SchedulerSettings(16, rows, max_preemptions=most, schedule_conservativeness=0.0, policy="first-come")
    return Workload(come, make_layout(1), pages, config, prefix_cache=False)


def arrivals(come: tuple[tuple[int, int], ...]) -> tuple[Arrival, ...]:
    """come: turn and output tokens of each."""
    return tuple(Arrival(i, turn, make_request(i, 4, tokens)) for i, (turn, tokens) in enumerate(come, 1))


def uneven(most: int) -> Workload:
    """Five sequences that outgrow their pool, of which the fourth would give way twice before the third does once."""
    come = ((4, 18), (6, 10), (9, 18), (9, 9), (10, 8))
    return first_come(most, 41, arrivals(come), 5)


def lucky() -> Workload:
    """Six sequences, of which the first that runs has not reached the bound when the others have."""
    come = ((0, 16), (1, 29), (8, 18), (11, 10), (14, 3), (14, 27))
    return first_come(1, 45, arrivals(come), 6)


def outgrowing(most: int) -> Workload:
    """Four sequences that come at once and outgrow their pool, so that all behind the first reach a bound of 1."""
    return first_come(most, 40, arrivals(((0, 24),) * 4), 4)


def searching() -> Workload:
    """A beam search beside a request that takes the pages of a hypothesis that waits for the other one."""
    search = replace(make_request(2, 4, 8), beam=Beam(2, 1.0))
    return first_come(3, 11, (Arrival(1, 0, make_request(1, 2, 9)), Arrival(2, 2, search)), 3)


def urgent() -> Workload:
    """One row, and a request that urgent ones take it from once."""
    come = [Arrival(1, 0, replace(make_request(1, 4, 24), priority=2))]
    come += [Arrival(i, 3 * i, make_request(i, 4, 2)) for i in (2, 3, 4)]
    config = SchedulerSettings(16, 1, max_preemptions=1, policy="priority", priority_ageing=0.0)
    return Workload(tuple(come), make_layout(4), 16, config)


def times(workload: Workload) -> list[int]:
    """Runs a workload under the laws. Returns how often each attempt was preempted."""
    watch = run(workload)
    return [watch.total(one.attempt) for one in workload.arrivals]


def test_another_gives_way_for_one_that_has_reached_the_bound() -> None:
    assert times(uneven(MOST_PREEMPTIONS)) == times(uneven(2)) == times(uneven(0)) == [0, 0, 0, 2, 1]
    assert times(uneven(1)) == [0, 0, 1, 1, 1]


def test_where_all_have_reached_the_bound_the_newest_gives_way_and_the_first_never() -> None:
    watch = run(outgrowing(1))
    assert [watch.total(attempt) for attempt in (1, 2, 3, 4)] == [0, 1, 2, 2]
    assert watch.beyond == 2


def test_no_more_urgent_one_takes_the_row_of_one_that_has_reached_the_bound() -> None:
    watch = run(urgent())
    assert watch.causes == {PreemptionCause.PRIORITY: 1}


@pytest.mark.parametrize("value", [-1, MOST_PREEMPTIONS + 1])
def test_a_bound_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(ValueError, match=f"--max-preemptions is {value}, must be in "):
        SchedulerSettings(max_preemptions=value)


# Bugs, each with a workload that shows it.

FAULTS: dict[str, tuple[type, str, Callable, Workload]] = {}


def fault(target: type, name: str, workload: Workload) -> Callable[[Callable], Callable]:
    def register(make: Callable) -> Callable:
        FAULTS[make.__name__] = target, name, make, workload
        return make

    return register


@fault(Rows, "preemptions", uneven(1))
def the_bound_is_ignored(real):
    return lambda self, row: 0


@fault(RunningWork, "_victim", uneven(1))
def the_newest_always_gives_way(real):
    def victim(self, now):
        row, cause = real(self, now)
        return (
            (int(self._policy.running(self._rows, now)[-1]), cause) if cause is PreemptionCause.PAGES else (row, cause)
        )

    return victim


@fault(RunningWork, "_victim", lucky())
def the_first_gives_way_once_others_have_reached_the_bound(real):
    def victim(self, now):
        rows = self._policy.running(self._rows, now).tolist()
        below = [row for row in rows[::-1] if self._rows.preemptions(row) < self._settings.max_preemptions]
        row, cause = real(self, now)
        return (below[0] if below and cause is PreemptionCause.PAGES else row), cause

    return victim


@fault(RunningWork, "_victim", outgrowing(1))
def a_lack_of_pages_is_counted_as_priority(real):
    return lambda self, now: (real(self, now)[0], PreemptionCause.PRIORITY)


@fault(Preemption, "_enough", urgent())
def protected_rows_give_way_to_waiting_ones(real):
    def enough(self, sequence, match, those):
        return real(self, sequence, match, self._policy.gives_way(sequence, self._rows, 0.0).tolist())

    return enough


@fault(Running, "preempt", urgent())
def one_that_waits_is_counted_as_pages(real):
    def preempt(self, row, cause):
        real(self, row, PreemptionCause.PAGES if cause is PreemptionCause.PRIORITY else cause)

    return preempt


@fault(Running, "preempt", uneven(1))
def preemptions_for_pages_do_not_count_to_the_bound(real):
    def preempt(self, row, cause):
        sequence = self.rows.sequence(row)
        before = sequence.preemptions
        real(self, row, cause)
        sequence.preemptions = before if cause is PreemptionCause.PAGES else sequence.preemptions

    return preempt


@fault(Admission, "_suspend_for", searching())
def those_that_admission_suspends_are_counted_as_pages(real):
    def suspend_for(self, sequence):
        preempt = self._running.preempt
        self._running.preempt = lambda row, cause: preempt(row, PreemptionCause.PAGES)
        try:
            return real(self, sequence)
        finally:
            self._running.preempt = preempt

    return suspend_for


@pytest.mark.parametrize("name", FAULTS)
def test_laws_catch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, method, stand_in, workload = FAULTS[name]
    plant(monkeypatch, target, method, stand_in)
    with pytest.raises(LawBroken):
        run(workload)
