"""Freed pages filled with NaN change nothing, and make a read of memory that is not the sequence's own show."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from model.attention.visible_keys import VisibleKeys
from model.cpu.attention_backend import CpuAttention
from model.input_batch import InputBatch
from model.reference.attention_backend import ReferenceAttention
from model.runner import Runner
from scheduler.events import EndReason
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.engines import LogitsChangedError, Rig, make_request, make_rig
from tests.support.planted import plant

NEW = 12
LENGTHS = [20, 3, 33, 16, 1, 47, 9, 31, 15, 5]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(LENGTHS, seed=6)


def run(
    directory: Path, prompts: list[list[int]], poison: bool = True, page_size: int = 4, backend: str = "auto"
) -> Rig:
    """Few rows and a small pool, so that pages change hands all the time, some of them by preemption."""
    scheduling = SchedulerSettings(max_sequences=4, max_batched_tokens=32, prefill_chunk=8, steps_in_flight=2)
    rig = make_rig(
        directory, page_size, 100, scheduling, record_logits=True, poison=poison, queue=ENDLESS, backend=backend
    )
    rig.run({i: make_request(rig, prompt, NEW) for i, prompt in enumerate(prompts)})
    return rig


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_poison_changes_nothing(tiny: Path, prompts: list[list[int]], page_size: int) -> None:
    plain, poisoned = (run(tiny, prompts, poison, page_size) for poison in (False, True))
    assert {i: r.tokens for i, r in poisoned.results.items()} == {i: r.tokens for i, r in plain.results.items()}
    assert all(poisoned.logits_of(i) == plain.logits_of(i) for i in range(len(prompts)))


@pytest.mark.parametrize("page_size", [1, 7, 16])
@pytest.mark.parametrize("poison", [False, True])
def test_a_sequence_on_the_pages_of_another_is_as_on_fresh_ones(tiny: Path, page_size: int, poison: bool) -> None:
    first, second = random_prompts([40, 23], seed=7)
    fresh, used = (make_rig(tiny, page_size, 55, record_logits=True, poison=poison) for _ in range(2))
    pages: list[set[int]] = []
    batch = used.loaded.runner.batch
    apply = batch.apply

    def watching(plan: StepPlan) -> None:
        pages.extend(set() for _ in plan.joins)
        if len(plan.grown):
            pages[-1].update(plan.grown[:, 3].tolist())
        apply(plan)

    batch.apply = watching  # type: ignore[method-assign]
    used.run({0: make_request(used, first, 16)})
    used.run({1: make_request(used, second, 16)})
    fresh.run({1: make_request(fresh, second, 16)})
    assert pages[1] <= pages[0], "the second sequence was to get the first one's pages"
    assert used.results[1].tokens == fresh.results[1].tokens
    assert used.logits_of(1) == fresh.logits_of(1)


# Planted faults: each makes the executor read or write what is not the sequence's own. The harness must see them all.

Plant = Callable[[pytest.MonkeyPatch], None]


def see_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels look at one position too many."""
    of = VisibleKeys.of

    def longer(shape, window, chunked=False):  # type: ignore[no-untyped-def]
        seen = of(shape, window, chunked)
        return replace(seen, last=seen.last + 1)

    monkeypatch.setattr(VisibleKeys, "of", longer)


def look_past_the_end(monkeypatch: pytest.MonkeyPatch, later: int) -> None:
    """Attention reads a key past the end, and each query stands `later` positions later."""

    def stand_in(block):  # type: ignore[no-untyped-def]
        def longer(self, keys, slices, whole, positions, window):  # type: ignore[no-untyped-def]
            return block(self, keys, slices + np.array([0, 0, 1]), whole, positions + later, window)

        return longer

    plant(monkeypatch, ReferenceAttention, "_block", stand_in)


def read_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention looks at one position too many."""
    look_past_the_end(monkeypatch, 1)


def show_the_key_past_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys past the end are hidden, but read where they would stand."""
    look_past_the_end(monkeypatch, 0)


def keep_a_stale_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input batch keeps the first page of a row's last tenant."""
    apply = InputBatch.apply

    def stale(self: InputBatch, plan: StepPlan) -> None:
        before = self._tables.copy()
        apply(self, plan)
        for join in plan.joins:
            if before[0, join.row, 0]:
                self._tables[0, join.row, 0] = before[0, join.row, 0]

    monkeypatch.setattr(InputBatch, "apply", stale)


def lose_a_grown_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input batch misses the last page that a step adds."""
    apply = InputBatch.apply
    monkeypatch.setattr(InputBatch, "apply", lambda self, plan: apply(self, replace(plan, grown=plan.grown[:-1])))


def write_one_slot_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values land one slot before their own."""
    for attention in (ReferenceAttention, CpuAttention):
        plan = attention.plan

        def early(self, shape, plan=plan):  # type: ignore[no-untyped-def]
            return plan(self, replace(shape, slots=np.maximum(shape.slots - 1, 0)))

        monkeypatch.setattr(attention, "plan", early)


def poison_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of a row that still runs counts as freed."""
    launch = Runner.launch

    def wrong(self: Runner, plan: StepPlan) -> None:
        rows = np.flatnonzero(self.batch._held)[:1]
        launch(self, replace(plan, freed=np.append(plan.freed, self.batch._tables[0, rows, 0])))

    monkeypatch.setattr(Runner, "launch", wrong)


ANYWHERE = (keep_a_stale_table, lose_a_grown_page, write_one_slot_early, poison_too_early)
PLANTS = [
    *(("reference", 4, plant) for plant in (read_past_the_end, show_the_key_past_the_end, *ANYWHERE)),
    *(("cpu", page_size, plant) for page_size in (4, 16) for plant in (see_one_more, *ANYWHERE)),
]


@pytest.fixture
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("quire.runner")
    logger.disabled = True
    yield
    logger.disabled = False


def shows(directory: Path, prompts: list[list[int]], healthy: Rig, poison: bool, page_size: int, backend: str) -> bool:
    """Whether a run differs from the healthy one: a fault, other logits, or other logits when computed again."""
    try:
        rig = run(directory, prompts, poison, page_size, backend)
    except LogitsChangedError:
        return True
    faults = [r for r in rig.results.values() if r.end is not None and r.end.reason is EndReason.FAULT]
    return bool(faults) or any(rig.logits_of(i) != healthy.logits_of(i) for i in range(len(prompts)))


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize(("backend", "page_size", "plant"), PLANTS)
@pytest.mark.sample(3)
def test_the_harness_catches(
    tiny: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, backend: str, page_size: int, plant: Plant
) -> None:
    healthy = run(tiny, prompts, True, page_size, backend)
    assert all(r.end is not None and r.end.reason is EndReason.LENGTH for r in healthy.results.values())
    assert not shows(tiny, prompts, healthy, True, page_size, backend)
    plant(monkeypatch)
    assert shows(tiny, prompts, healthy, True, page_size, backend)


@pytest.mark.usefixtures("_quiet")
def test_only_poison_shows_a_hidden_read_past_the_end(
    tiny: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Poison shows a hidden read: weight 0 times a stale number is 0, so nothing shows, until the number is a NaN."""
    healthy = run(tiny, prompts, poison=False, backend="reference")
    show_the_key_past_the_end(monkeypatch)
    assert not shows(tiny, prompts, healthy, False, 4, "reference")
    assert shows(tiny, prompts, healthy, True, 4, "reference")
