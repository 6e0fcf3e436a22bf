"""Laws of swapping: tokens do not depend on what went to the host and came back, nor on copies that were spoilt."""

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_manager.allocator import LedgerError
from cache_manager.ledger import verify
from cache_manager.manager import CacheManager
from cache_manager.tier import HostTier
from scheduler.events import EndReason, EngineStats, Submit
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan, StepResult
from tests.scheduler.executor import SPOILED, FakeExecutor, LawBroken, alone
from tests.scheduler.workloads import Arrival, Workload, make_layout, make_request, workloads


class SwappingExecutor(FakeExecutor):
    """spoils: how likely a step that brings pages back finds one of them spoilt."""

    rng = Random(0)
    spoils = 0.0

    def launch(self, plan: StepPlan) -> None:
        size = self.layout.page_size
        self._host = getattr(self, "_host", {})
        self._lost = getattr(self, "_lost", deque())
        for page, slot in plan.swap_outs.tolist():
            self._host[slot] = self._slots[:, page * size : (page + 1) * size].copy()
        super().launch(plan)

    def _believe(self, plan: StepPlan) -> None:
        size, ins = self.layout.page_size, plan.swap_ins.tolist()
        for slot, page in ins:
            self._slots[:, page * size : (page + 1) * size] = self._host[slot]
        super()._believe(plan)
        lost = [self.rng.choice(ins)[1]] if ins and self.rng.random() < self.spoils else []
        self._lost.append(tuple(lost))
        for page in lost:
            self._slots[:, page * size : (page + 1) * size] = SPOILED
            for mirror in self.rows.values():
                mirror.broken |= page in mirror.pages()

    def collect(self) -> StepResult:
        return replace(super().collect(), lost_pages=self._lost.popleft())


def run(workload: Workload, slots: int, spoils: float) -> EngineStats:
    """Checks every attempt's tokens, and the books in every turn."""
    cache = workload.cache
    cache.pool.tier = HostTier(slots * len(workload.layout.groups), len(workload.layout.groups))
    scheduler = Scheduler(workload.settings, workload.queue, cache, workload.namer)
    scheduler._swapping_pays = lambda: True  # type: ignore[method-assign]
    executor = SwappingExecutor(workload.layout, workload.pages, workload.settings)
    executor.spoils, executor.rng = spoils, Random(slots)
    tokens: dict[int, list[int]] = {a.attempt: a.known(0) for a in workload.arrivals}
    ends: dict[int, EndReason] = {}
    flying = turn = 0
    while len(ends) < len(workload.arrivals) or scheduler.has_work:
        assert turn < 10 * workload.most_turns
        events = [
            Submit(a.attempt, a.request, (tuple(tokens[a.attempt]),)) for a in workload.arrivals if a.turn == turn
        ]
        plan = scheduler.schedule(float(turn), events)
        if plan is not None:
            executor.launch(plan)
            flying += 1
        result = executor.collect() if flying and (plan is None or flying == workload.depth) else None
        flying -= result is not None
        outputs = scheduler.commit(result, float(turn))
        verify(cache)
        for attempt, token in zip(outputs.attempts.tolist(), outputs.tokens.tolist(), strict=True):
            tokens[attempt].append(token)
        ends |= {end.attempt: end.reason for end in outputs.ends}
        turn += 1
    for arrival in workload.arrivals:
        assert tokens[arrival.attempt] == alone(arrival.request)
        assert ends[arrival.attempt] in (EndReason.STOP, EndReason.LENGTH)
    assert cache.pool.free == cache.pool.total
    return scheduler.stats()


@settings(max_examples=150, deadline=None)
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
def test_harness_catches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, stand_in = FAULTS[name]
    monkeypatch.setattr(CacheManager, target, stand_in)
    with pytest.raises((AssertionError, LawBroken, LedgerError)):
        run(returning(), 40, spoils=1.0)
