"""Law: what a sequence goes on from in the prefix cache changes no bit of its logits. Real models, pages poisoned."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cache_manager.pool import PagePool
from cache_manager.publishing import PublishedPages
from model.inputs.tokenizer_files import load_tokenizer
from model.runner import Runner
from scheduler.events import Abort, EndReason, Event, Submit
from scheduler.settings import SchedulerSettings
from tests.model.test_parity import ENDLESS, random_prompts
from tests.support.engines import LogitsChangedError, Rig, make_request, make_rig
from tests.support.examples import examples

NEW = 10
SAMPLING = [{}, {"temperature": 1.0, "seed": 21}, {"temperature": 0.8, "top_p": 0.9, "seed": 22}]


@pytest.fixture(scope="module")
def cast(tiny: Path) -> list[list[int]]:
    """Prompts that start alike: with parts of each other, and with what was said to each other."""
    head, other = random_prompts([48, 40], seed=31)
    tails = random_prompts([3, 9, 1, 20], seed=32)
    first = head + tails[0]
    rig = make_rig(tiny, prefix_cache=False)
    said = rig.run({0: make_request(rig, first, NEW)})[0].tokens
    second = first + said + tails[1]
    third = second + rig.run({1: make_request(rig, second, NEW)})[1].tokens + tails[2]
    return [first, second, third, head, head[:33], head[:16], head[:31] + tails[3], other, other + tails[0], head * 3]


@pytest.fixture(scope="module")
def alone(tiny: Path, cast: list[list[int]]) -> Rig:
    """Each request alone and without a cache; attempt: place in the cast + 100 x place among the samplings."""
    rig = make_rig(tiny, record_logits=True, prefix_cache=False)
    for i, prompt in enumerate(cast):
        for j, sampling in enumerate(SAMPLING):
            rig.run({i + 100 * j: make_request(rig, prompt, NEW, **sampling)})
    assert not any(rig.started.values())
    return rig


@dataclass(frozen=True)
class Drawn:
    """events: (who in the cast, which sampling, turn of its Submit, turn of its Finish or None), by attempt."""

    events: list[tuple[int, int, int, int | None]]
    page_size: int
    spare: int
    scheduling: SchedulerSettings


@st.composite
def drawn_schedules(draw: st.DrawFn) -> Drawn:
    who = st.tuples(
        st.integers(0, 9),
        st.integers(0, len(SAMPLING) - 1),
        st.sampled_from([0, 0, 1, 8, 30, 45]),
        st.sampled_from([None, None, None, 3, 9]),
    )
    rows = draw(st.integers(1, 5))
    return Drawn(
        draw(st.lists(who, min_size=3, max_size=9)),
        page_size=draw(st.sampled_from([1, 7, 16])),
        spare=draw(st.sampled_from([0, 0, 16, 200])),
        scheduling=SchedulerSettings(
            max_batched_tokens=rows + draw(st.sampled_from([3, 20, 200])),
            max_sequences=rows,
            prefill_chunk=draw(st.sampled_from([None, 3, 16])),
            steps_in_flight=draw(st.integers(1, 2)),
        ),
    )


def play(directory: Path, cast: list[list[int]], drawn: Drawn) -> Rig:
    longest = max(len(cast[i]) + NEW for i, *_ in drawn.events)
    pool = -(-longest // drawn.page_size) * drawn.page_size + drawn.spare
    rig = make_rig(directory, drawn.page_size, pool, drawn.scheduling, record_logits=True, queue=ENDLESS)
    script: dict[int, list[Event]] = {}
    for attempt, (i, j, start, end) in enumerate(drawn.events):
        request = make_request(rig, cast[i], NEW, **SAMPLING[j])
        script.setdefault(start, []).append(Submit(attempt, request))
        if end is not None:
            script.setdefault(start + end, []).append(Abort(attempt))
    rig.play(script)
    return rig


def check_against(alone: Rig, drawn: Drawn, rig: Rig) -> None:
    for attempt, (i, j, _, end) in enumerate(drawn.events):
        expected, result = i + 100 * j, rig.results[attempt]
        assert result.end is not None
        if result.end.reason is EndReason.LENGTH:
            assert result.tokens == alone.results[expected].tokens
            assert rig.logits_of(attempt) == alone.logits_of(expected)
        else:
            assert (end is not None, result.end.reason) == (True, EndReason.FINISHED)
            assert rig.logits_of(attempt).items() <= alone.logits_of(expected).items()


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=drawn_schedules())
def test_hit_or_miss_the_logits_have_the_same_bits(tiny: Path, cast: list[list[int]], alone: Rig, drawn: Drawn) -> None:
    check_against(alone, drawn, play(tiny, cast, drawn))


NOTES: dict[str, Callable[[Rig], bool]] = {
    "hit": lambda rig: any(rig.started.values()),
    "hit and evicted": lambda rig: any(rig.started.values()) and rig.scheduler.stats().evicted_capacity > 20,
    "hit and preempted": lambda rig: any(rig.started.values()) and rig.preemptions > 0,
    "hit with two steps in flight": lambda rig: (
        any(rig.started.values()) and rig.scheduler.settings.steps_in_flight == 2
    ),
}


def test_drawn_schedules_reach_what_the_law_speaks_of(tiny: Path, cast: list[list[int]]) -> None:
    seen: set[str] = set()

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(drawn=drawn_schedules())
    def search(drawn: Drawn) -> None:
        if seen != set(NOTES):
            rig = play(tiny, cast, drawn)
            seen.update(note for note, reached in NOTES.items() if reached(rig))

    search()
    assert seen == set(NOTES)


PRESSED = SchedulerSettings(max_sequences=4, max_batched_tokens=24, prefill_chunk=8, steps_in_flight=2)


def pressed(directory: Path, cast: list[list[int]], page_size: int = 4, prefix_cache: bool = True) -> Rig:
    """All of the cast three times over, in a pool that holds the longest of them and little else."""
    rig = make_rig(directory, page_size, 164, PRESSED, record_logits=True, queue=ENDLESS, prefix_cache=prefix_cache)
    for again in range(3):
        rig.run({100 * again + i: make_request(rig, prompt, NEW) for i, prompt in enumerate(cast)})
    return rig


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pool_that_evicts_all_the_time(tiny: Path, cast: list[list[int]], alone: Rig, page_size: int) -> None:
    rig = pressed(tiny, cast, page_size)
    assert rig.scheduler.stats().evicted_capacity > 500 / page_size
    assert sum(rig.started.values()) > 500
    for i in range(len(cast)):
        for again in range(3):
            assert rig.results[100 * again + i].tokens == alone.results[i].tokens
            assert rig.logits_of(100 * again + i) == alone.logits_of(i)


def test_a_second_turn_goes_on_from_prompt_and_output(demo: Path) -> None:
    tokenizer = load_tokenizer(demo)
    first = tokenizer.encode("First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\n", False)
    on, off = (make_rig(demo, record_logits=True, prefix_cache=cache) for cache in (True, False))
    said = on.run({1: make_request(on, first, 40)})[1].tokens
    second = first + said + tokenizer.encode("\n\nSecond Citizen:\nSpeak, speak.\n", False)
    on.run({2: make_request(on, second, 40)})
    off.run({1: make_request(off, first, 40), 2: make_request(off, second, 40)})
    assert on.started[2] == (len(first) + len(said) - 1) // 16 * 16
    assert on.scheduler.stats().computed_tokens == off.scheduler.stats().computed_tokens - on.started[2]
    for attempt in (1, 2):
        assert on.results[attempt].tokens == off.results[attempt].tokens
        assert on.logits_of(attempt) == off.logits_of(attempt)


@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_a_prefix_of_several_attention_blocks(long: Path, page_size: int) -> None:
    head, *tails = random_prompts([300, 1, 30, 129], seed=33)
    scheduling = SchedulerSettings(max_sequences=8, prefill_chunk=50, steps_in_flight=2)
    on, off = (
        make_rig(long, page_size, 2048, scheduling, record_logits=True, prefix_cache=cache) for cache in (True, False)
    )
    for rig in (on, off):
        rig.run({i: make_request(rig, head + tail, NEW) for i, tail in enumerate(tails)})
    assert on.started == {0: 0, 1: 300 // page_size * page_size, 2: 300 // page_size * page_size}
    assert all(on.logits_of(i) == off.logits_of(i) for i in range(3))


# Planted faults.

Plant = Callable[[pytest.MonkeyPatch], None]


def poison_cached_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are kept for others are told as freed."""
    drop = PagePool.drop

    def wrong(self: PagePool, pages):  # type: ignore[no-untyped-def]
        drop(self, pages)
        self.changes.freed(pages)

    monkeypatch.setattr(PagePool, "drop", wrong)


def publish_before_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages get their names long before they are computed: in a step after the one of who goes on from them."""
    publish = PublishedPages.publish

    def early(self: PublishedPages, row: int, computed: int, after_step: int | None) -> None:
        chain = self.chains[row]
        known = len(chain.hashes) * self.layout.page_size if chain is not None else 0
        publish(self, row, min(computed + 8 * self.layout.page_size, known), after_step)

    monkeypatch.setattr(PublishedPages, "publish", early)


def lose_the_table_of_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The executor is not told the first page that a row goes on from."""
    launch = Runner.launch

    def forgetful(self: Runner, plan):  # type: ignore[no-untyped-def]
        starts = {row: start for row, start, _ in plan.slices.tolist()}
        rows = [join.row for join in plan.joins if starts[join.row]]
        for row in rows:
            plan.grown[(plan.grown[:, 1] == row) & (plan.grown[:, 2] == 0), 3] = 0
        launch(self, plan)

    monkeypatch.setattr(Runner, "launch", forgetful)


@pytest.fixture
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("quire.runner")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("plant", [poison_cached_pages, publish_before_computed, lose_the_table_of_a_hit])
def test_the_harness_catches(
    tiny: Path, cast: list[list[int]], alone: Rig, monkeypatch: pytest.MonkeyPatch, plant: Plant
) -> None:
    plant(monkeypatch)
    try:
        rig = pressed(tiny, cast)
    except LogitsChangedError:
        return
    ends = [result.end for result in rig.results.values()]
    faults = [end for end in ends if end is not None and end.reason is EndReason.FAULT]
    differ = any(rig.logits_of(100 * k + i) != alone.logits_of(i) for k in range(3) for i in range(len(cast)))
    assert faults or differ


def test_all_of_it_is_compared(alone: Rig, cast: list[list[int]]) -> None:
    """The comparisons above would be empty if the rig recorded nothing."""
    assert len(alone.logits) == len(cast) * len(SAMPLING) * NEW
    assert all(np.isfinite(logits).all() for logits in alone.logits.values())
