"""Laws of pages that come with a sequence from another engine: tokens do not depend on which of them came."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager import lookup
from cache_manager.allocator import LedgerError
from cache_manager.block_hash import BlockHash
from cache_manager.manager import CacheManager
from cache_manager.matching import Match
from cache_manager.tier import HostTier
from cache_manager.transfers import TransferredPage
from scheduler import admission
from scheduler.events import EngineStats, Submit
from scheduler.rows import Sequence as Waiting
from scheduler.rows import sequences_of
from scheduler.running import Running
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.scheduler.executor import LawBroken, law
from tests.scheduler.play import play
from tests.scheduler.swapping import SwappingExecutor
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.swaps import always_swap


class FilledExecutor(SwappingExecutor):
    """A page's content is its tokens.

    Attributes:
        joins_filled: Of each step, the joins that bring pages.
        after_copies: Pages that a join fills in the same step in which others of its pages come back from the host.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.joins_filled: list[int] = []
        self.after_copies = 0

    def _believe(self, plan: StepPlan) -> None:
        size = self.layout.page_size
        back = set(plan.swap_ins[:, 1].tolist())
        self.joins_filled.append(sum(join.transfer is not None for join in plan.joins))
        for join in plan.joins:
            if join.transfer is not None and not back.isdisjoint(self.rows[join.row].pages()):
                self.after_copies += len(join.transfer.pages)
        for fill in (join.transfer for join in plan.joins):
            for page, content in () if fill is None else zip(fill.pages.tolist(), fill.content, strict=True):
                self._slots[:, page * size : (page + 1) * size] = content.view(np.int32)
        super()._believe(plan)


def pages_of(
    workload: Workload, submit: Submit, which: Sequence[bool], seen: Sequence[bool] = (True,)
) -> dict[BlockHash, TransferredPage]:
    """Returns by hash those of the full pages of an attempt's sequences that `which` says, in turn.

    seen: in turn, whether those of groups with windows are among them.
    """
    assert workload.hasher is not None
    size, layout, brought = workload.layout.page_size, workload.layout, {}
    whole = np.array([layout.window(group) is None for group in range(layout.tables)])
    for sequence in sequences_of(submit, 0.0, 0):
        chain = workload.hasher.chain(submit.request.scope)
        chain.extend(sequence.tokens())
        for i, name in enumerate(chain.hashes):
            if which[i % len(which)]:
                tokens = sequence.tokens()[i * size : (i + 1) * size].astype(np.int32)
                tables = whole | seen[i % len(seen)]
                brought[name] = TransferredPage(tables, np.tile(tokens.view(np.uint8), (np.count_nonzero(tables), 1)))
    return brought


def with_pages(workload: Workload, which: Sequence[bool], seen: Sequence[bool]) -> Workload:
    """Returns the workload with `pages_of` each of its arrivals."""
    come = [replace(a, transferred=pages_of(workload, a.submit, which, seen)) for a in workload.arrivals]
    return replace(workload, arrivals=tuple(come))


def run(
    workload: Workload,
    which: Sequence[bool] = (True,),
    slots: int = 0,
    spoils: float = 0.0,
    seen: Sequence[bool] = (True,),
) -> tuple[EngineStats, FilledExecutor]:
    """Runs the workload with the pages that `which` says, under the laws of `play`.

    Args:
        workload: Workload.
        which: As in `pages_of`.
        slots: Pages of a host tier; 0 goes without.
        spoils: As in `SwappingExecutor`.
        seen: As in `pages_of`.
    """
    cache, groups = workload.cache, len(workload.layout.groups)
    if slots:
        cache.pool.tier = HostTier(slots * groups, groups)
    scheduler = Scheduler(workload.settings, workload.queue, cache, workload.hasher)
    executor = FilledExecutor(workload.layout, workload.pages, workload.settings)
    executor.spoils, executor.rng = spoils, Random(slots)

    def check_all_is_taken() -> None:
        rows = scheduler.rows
        law(not any(rows.sequence(row).transferred for row in rows.active().tolist()), "a row keeps what came with it")

    with pytest.MonkeyPatch.context() as monkeypatch:
        always_swap(monkeypatch)
        play(with_pages(workload, which, seen), scheduler, executor, patience=10, after_turn=check_all_is_taken)
    return scheduler.stats(), executor


WHICH = st.lists(st.booleans(), min_size=1, max_size=6)


@settings(max_examples=examples(100), deadline=None)
@given(workloads(resumed=True), WHICH, WHICH)
def test_tokens_do_not_depend_on_what_came(workload: Workload, which: list[bool], seen: list[bool]) -> None:
    run(workload, which, seen=seen)


@settings(max_examples=examples(100), deadline=None)
@given(workloads(resumed=True, alike=True), WHICH, WHICH, st.integers(1, 40), st.sampled_from([0.0, 0.5]))
def test_nor_on_what_comes_back_from_the_host_before_it(
    workload: Workload, which: list[bool], seen: list[bool], slots: int, spoils: float
) -> None:
    run(workload, which, slots, spoils, seen)


def moved(depth: int = 2, windows: tuple[int | None, ...] = (), groups: int = 1, count: int = 1) -> Workload:
    """Four with prompts of 13 tokens and 3 of output, in pages of 2; two of them start alike."""
    layout = make_layout(2, groups, windows)
    rows = SchedulerSettings(max_batched_tokens=40, max_sequences=4, steps_in_flight=depth)
    prompts = [tuple((first + i) % 13 for i in range(13)) for first in (0, 5, 9)] + [(*range(8), 1, 2, 3, 4, 5)]
    requests = [replace(make_request(i, prompt, 6), count=count) for i, prompt in enumerate(prompts, 1)]
    come = [Arrival(i, i, request, emitted=(3,) * count) for i, request in enumerate(requests, 1)]
    return Workload(tuple(come), layout, 4 * count * layout.pages_for(20) + 40, rows)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_came_is_not_computed(depth: int, groups: int) -> None:
    stats, executor = run(moved(depth, groups=groups))
    # 15 of 16 tokens are looked up: 7 pages; the last one finds 4 of them with the first one, and they cost nothing.
    assert stats.pages_transferred == groups * (7 + 7 + 7 + 3)
    assert executor.computed_tokens == 4 * (16 - 14 + 2)
    assert stats.prefix_hits == 2 * 4, "what came is no hit"
    assert [executor.found[i] for i in (1, 2, 3, 4)] == [[14]] * 4


def test_of_groups_with_windows_comes_what_the_next_token_sees() -> None:
    stats, executor = run(moved(windows=(None, 4)))
    assert stats.pages_transferred == 3 * (7 + 2) + (3 + 2)
    assert executor.computed_tokens == 4 * 4


@pytest.mark.parametrize(("window", "lacking", "found"), [(4, 5, 10), (4, 6, 12), (3, 6, 12), (4, 0, 14)])
def test_what_lacks_pages_in_a_window_counts_up_to_where_it_has_them(window: int, lacking: int, found: int) -> None:
    """Pages of 2 tokens: behind a window of 4 the next token sees 2 pages, behind one of 3 one."""
    seen = [i != lacking for i in range(8)]
    _, executor = run(moved(windows=(None, window)), seen=seen)
    assert [executor.found[i] for i in (1, 2, 3)] == [[found]] * 3


def test_several_sequences_each_bring_their_own() -> None:
    """Pages that they share come once: the others wait for the first one."""
    workload = moved(count=2)
    names = [list(pages_of(workload, arrival.submit, [True])) for arrival in workload.arrivals]
    assert {len(each) for each in names} <= {9, 10}, "eight pages each, of which they share six or seven"
    stats, executor = run(workload)
    assert stats.pages_transferred == len(set().union(*names)) - 8, "the last page is computed"
    assert executor.computed_tokens == 8 * 4


def test_what_comes_after_a_gap_is_computed() -> None:
    stats, executor = run(moved(), which=[True, True, False, True, True, True, True])
    assert stats.pages_transferred == 3 * 2 + 3, "the fourth finds what the first has computed, and has no gap"
    assert executor.computed_tokens == 3 * (16 - 4 + 2) + (16 - 14 + 2)


def test_what_came_is_filled_in_after_the_copies_that_come_back() -> None:
    """The first prompt's pages go to the host; one that goes on from it comes with the pages after these."""
    layout = make_layout(2)
    rows = SchedulerSettings(max_batched_tokens=40, max_sequences=1)
    prompts = [tuple(range(9)), (*range(9, 13), *range(8), 5), (*range(9), 7, 7, 7, 7)]
    come = [Arrival(i, 9 * i, make_request(i, prompt, 2)) for i, prompt in enumerate(prompts, 1)]
    _, executor = run(Workload(tuple(come), layout, 8, rows), which=[False] * 4 + [True] * 2, slots=20)
    assert executor.after_copies == 2


@pytest.mark.parametrize(("most", "together"), [(0, 1), (admission.TRANSFER_BYTES, 3)])
def test_pages_that_a_step_fills_in_are_bounded(most: int, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four come at once; the last waits for pages of the first in any case."""
    monkeypatch.setattr(admission, "TRANSFER_BYTES", most)
    workload = moved()
    at_once = tuple(replace(arrival, turn=1) for arrival in workload.arrivals)
    stats, executor = run(
        replace(workload, arrivals=at_once, settings=replace(workload.settings, max_batched_tokens=80))
    )
    assert max(executor.joins_filled) == together
    assert (stats.pages_transferred, sum(executor.joins_filled)) == (7 + 7 + 7 + 3, 4)


def keeps_what_came(self: Running, sequence: Waiting, match: Match, start: Callable = Running.start) -> int:
    brought = sequence.transferred
    row: int = start(self, sequence, match)
    sequence.transferred = brought
    return row


FAULTS = {
    "what a window lacks is taken to be there": (lookup, "valid_pages", lambda pages, layout: pages.shape[1]),
    "what came is kept after the start": (Running, "start", keeps_what_came),
    "nothing is filled": (Running, "_transfer", lambda self, row, sequence, match: None),
    "the first page is not counted": (
        CacheManager,
        "transfer_targets",
        lambda self, row, match: self.tables.between(
            row, len(match.nodes) + 1, len(match.nodes) + 1 + len(match.transferred)
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, target, stand_in = FAULTS[name]
    monkeypatch.setattr(where, target, stand_in)
    with pytest.raises((AssertionError, LawBroken, LedgerError, IndexError)):
        run(moved(windows=(None, 4)), seen=[True] * 5 + [False] * 3)
