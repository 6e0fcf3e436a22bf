"""Laws of swapping: tokens do not depend on what went to the host and came back, nor on copies that were spoilt."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.allocator import LedgerError
from cache_manager.manager import CacheManager
from cache_manager.tier import HostTier
from scheduler.events import EngineStats
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from tests.scheduler.executor import LawBroken
from tests.scheduler.play import play
from tests.scheduler.swapping import SwappingExecutor
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads
from tests.support.examples import examples
from tests.support.swaps import always_swap


def run(workload: Workload, slots: int, spoils: float) -> EngineStats:
    """Runs the workload with a host tier of `slots` pages, under the laws of `play`."""
    cache = workload.cache
    cache.pool.tier = HostTier(slots * len(workload.layout.groups), len(workload.layout.groups))
    scheduler = Scheduler(workload.settings, workload.queue, cache, workload.hasher)
    executor = SwappingExecutor(workload.layout, workload.pages, workload.settings)
    executor.spoils, executor.rng = spoils, Random(slots)
    with pytest.MonkeyPatch.context() as monkeypatch:
        always_swap(monkeypatch)
        play(workload, scheduler, executor, patience=10)
    return scheduler.stats()


@settings(max_examples=examples(150), deadline=None)
@given(workloads(resumed=True), st.integers(1, 40), st.sampled_from([0.0, 0.5]))
def test_tokens_do_not_depend_on_swapping(workload: Workload, slots: int, spoils: float) -> None:
    run(workload, slots, spoils)


def returning(depth: int = 2) -> Workload:
    """Three prompts that come again and again, in a pool for one of them."""
    layout = make_layout(2)
    rows = SchedulerSettings(max_batched_tokens=8, max_sequences=2, prefill_chunk=4, steps_in_flight=depth)
    prompts = [tuple(range(first, first + 13)) for first in (0, 5, 9)]
    come = [Arrival(i, 12 * i, make_request(i, tuple(token % 13 for token in prompts[i % 3]), 3)) for i in range(1, 13)]
    return Workload(tuple(come), layout, layout.pages_for(20), rows)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("spoils", [0.0, 1.0])
def test_prompts_that_come_again(spoils: float, depth: int) -> None:
    stats = run(returning(depth), 40, spoils)
    assert stats.swapped_out > 10
    assert stats.swapped_in > 10
    assert bool(stats.swap_lost) == bool(spoils)
    assert stats.host_slots_used > 10


FAULTS = {
    "a spoilt page is overlooked": ("arrived", lambda self, step, lost: []),
    "copies are not fetched": ("fetch", lambda self, row, match: None),
    "nothing is dropped of what was spoilt": (
        "arrived",
        lambda self, step, lost: [
            row for row in range(len(self.owners)) if set(self.tables.row(row).tolist()) & set(lost)
        ],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, stand_in = FAULTS[name]
    monkeypatch.setattr(CacheManager, target, stand_in)
    with pytest.raises((AssertionError, LawBroken, LedgerError)):
        run(returning(), 40, spoils=1.0)
