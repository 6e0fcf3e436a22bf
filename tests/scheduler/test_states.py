"""Laws of recurrent states as pages: a row goes on from the state after exactly the tokens before it.

The executor here keeps for each page of a state which tokens it has seen, as a checksum. A row that reads the state of
another position, another sequence or another time draws other tokens.
"""

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHasher
from cache_manager.layout import MOST_INTERVAL, KVLayout, KVShape, LayerGroup
from cache_manager.ledger import verify
from cache_manager.manager import CacheManager
from cache_manager.policies import POLICIES
from cache_manager.states import RecurrentLayer
from cache_manager.tier import HostTier
from scheduler.events import Abort, EndReason, EngineStats, Event, Logprobs, Submit
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import FAULTED, StepPlan, StepResult
from tests.scheduler.executor import law
from tests.scheduler.reaching import unreached_runs
from tests.scheduler.workloads import PATIENT, make_request
from tests.support.examples import examples
from tests.support.swaps import always_swap
from tests.support.transfers import transferred

VOCABULARY = 13
SECRET = bytes(16)
few = settings(max_examples=examples(60), deadline=None)


def make_layout(page_size: int = 4, units: int = 3, window: int | None = None) -> KVLayout:
    """A token of 128 bytes a group, and a state of so many units of a page each."""
    shape = KVShape(1, 16, 16)
    groups = [LayerGroup((0,), shape)] + ([LayerGroup((1,), shape, window)] if window else [])
    unit = 128 * page_size // 64 * 64
    return KVLayout(tuple(groups), 4, page_size, recurrent=(RecurrentLayer(9, (unit,) * units),))


def seen(tokens: Sequence[int], before: int = 0) -> int:
    return zlib.crc32(np.array(tokens, "<i4").tobytes(), before)


def alone(request: Request) -> list[int]:
    tokens = request.prompt.tolist()
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(seen(tokens + output) % VOCABULARY)
        if output[-1] in request.stop_ids:
            break
    return output


@dataclass
class StateExecutor:
    """states: by page and table, the checksum of the tokens that the state there has seen.

    spoilt: the step that runs twice for all its rows, which have their states spoilt.
    """

    layout: KVLayout
    spoilt: frozenset[int] = frozenset()
    wrong: int = 0  # tokens by which a row that goes on from a cached prefix is wrong about it: a planted fault
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    hosts: dict[int, dict[int, int]] = field(default_factory=dict)
    tables: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    known: dict[int, list[int]] = field(default_factory=dict)
    computed: int = 0
    swapped: int = 0  # states that came from the host
    crossed: int = 0  # the most checkpoints that a row has written in one step
    exchanged: int = 0  # states that took the place of others of the same content

    def run(self, plan: StepPlan) -> StepResult:
        for page, slot in plan.swap_outs.tolist():
            self.hosts[slot] = {table: value for (there, table), value in self.states.items() if there == page}
        for page in plan.freed.tolist():
            for table in self.layout.state_tables:
                self.states.pop((page, table), None)
        for row in plan.leaves.tolist():
            del self.known[row]
        for join in plan.joins:
            self.known[join.row] = join.tokens.tolist()
            for table in range(self.layout.tables):
                self.tables[table, join.row] = {}
        for table, row, index, page in plan.grown.tolist():
            self.exchanged += index in self.tables[table, row] and table in self.layout.state_tables
            self.tables[table, row][index] = page
        for source, target in plan.copies.tolist():
            for table in self.layout.state_tables:
                if (source, table) in self.states:
                    self.states[target, table] = self.states[source, table]
        for slot, page in plan.swap_ins.tolist():
            self.swapped += bool(self.hosts[slot])
            self.states |= {(page, table): value for table, value in self.hosts[slot].items()}
        for fill in (join.transfer for join in plan.joins):
            for page, content in () if fill is None else zip(fill.pages.tolist(), fill.content, strict=True):
                self.states |= {(page, table): value for table, value in enumerate(content.view(np.int64)) if value}
        after = {row: self._compute(row, start, count) for row, start, count in plan.slices.tolist()}
        tokens = [after[self._owner(plan, offset)] % VOCABULARY for offset, _ in plan.logits.tolist()]
        for (_, row), token in zip(plan.logits.tolist(), tokens, strict=True):
            self.known[row].append(token)
        n = len(tokens)
        empty = Logprobs(
            np.zeros(n, np.float32), np.zeros(n, np.int32), np.zeros((n, 0), np.int32), np.zeros((n, 0), np.float32)
        )
        lost = self._spoil(plan) if plan.step in self.spoilt else ()
        return StepResult(plan.step, np.array(tokens, np.int32), empty, lost_pages=lost)

    def export(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Returns [n, page_bytes] uint8, of a state's page its checksum at the number of its table."""
        content = np.zeros((len(pages), self.layout.page_bytes // 8), np.int64)
        places = {page: i for i, page in enumerate(pages.tolist())}
        for (page, table), state in self.states.items():
            if page in places:
                content[places[page], table] = state
        return content.view(np.uint8)

    @staticmethod
    def _owner(plan: StepPlan, offset: int) -> int:
        ends = np.cumsum(plan.slices[:, 2])
        return int(plan.slices[np.searchsorted(ends, offset, side="right"), 0])

    def _spoil(self, plan: StepPlan) -> tuple[int, ...]:
        """The states that the step wrote are garbage, as where it has run twice."""
        lost = []
        for row, start, count in plan.slices.tolist():
            for table in self.layout.state_tables:
                page = self.tables[table, row][(start + count - 1) // self.layout.interval]
                self.states[page, table] = 666
                lost.append(page)
        return tuple(lost)

    def _compute(self, row: int, start: int, count: int) -> int:
        size, tokens = self.layout.interval, self.known[row]
        law(len(tokens) >= start + count, f"row {row} computes tokens that it does not have")
        self.computed += count
        state = self._read(row, start) if start else 0
        self.crossed = max(self.crossed, (start + count) // size - start // size)
        while count:
            entry = start // size
            here = min(count, (entry + 1) * size - start)
            state = seen(tokens[start : start + here], state)
            for table in self.layout.state_tables:
                law(entry in self.tables[table, row], f"row {row} has no page for its state at {start}")
                self.states[self.tables[table, row][entry], table] = state
            start, count = start + here, count - here
        return state

    def _read(self, row: int, start: int) -> int:
        """Returns the state before a position: all its pages must have seen the same."""
        entry = (start - 1 - self.wrong) // self.layout.interval
        found = {self.states.get((self.tables[table, row].get(entry, -1), table)) for table in self.layout.state_tables}
        law(len(found) == 1 and None not in found, f"row {row} reads states of {found} before {start}")
        return found.pop() or 0


@dataclass
class Run:
    """Drives a scheduler to the end of all requests, verifying the ledger after each step."""

    layout: KVLayout
    pages: int
    executor: StateExecutor
    scheduler: Scheduler
    output: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndReason] = field(default_factory=dict)
    steps: int = 0

    @staticmethod
    def of(
        layout: KVLayout, pages: int, rows: int, budget: int, chunk: int | None = None, depth: int = 1,
        host_slots: int = 0, spoilt: frozenset[int] = frozenset(), policy: str = "lru",
    ) -> "Run":  # fmt: skip
        chosen = SchedulerSettings(max(budget, rows), rows, chunk, depth)
        tier = HostTier(host_slots, layout.tables) if host_slots else None
        cache = CacheManager(layout, pages, rows, POLICIES[policy], chosen.ahead, tier)
        scheduler = Scheduler(chosen, PATIENT, cache, BlockHasher(SECRET, b"model", layout.page_size))
        return Run(layout, pages, StateExecutor(layout, spoilt), scheduler)

    @property
    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def __call__(self, events: dict[int, list[Event]]) -> "Run":
        """events: by step."""
        flying: deque[StepResult] = deque()
        last = max(events, default=0)
        depth = self.scheduler.settings.depth
        while self.steps <= last or self.scheduler.has_work:
            law(self.steps < 5000, "the work does not end")
            plan = self.scheduler.schedule(float(self.steps), events.get(self.steps, []))
            self.steps += 1
            if plan is not None:
                flying.append(self.executor.run(plan))
            if flying and (plan is None or len(flying) == depth):
                self._commit(flying.popleft())
            elif plan is None:
                self._commit(None)
            verify(self.scheduler.cache)
        while flying:
            self._commit(flying.popleft())
        return self

    def _commit(self, result: StepResult | None) -> None:
        outputs = self.scheduler.commit(result, float(self.steps))
        for attempt, token in zip(outputs.attempts.tolist(), outputs.tokens.tolist(), strict=True):
            if token != FAULTED:
                self.output.setdefault(attempt, []).append(token)
        self.ends |= {end.attempt: end.reason for end in outputs.ends}


def request(prompt: Sequence[int], most: int) -> Request:
    return make_request(0, tuple(prompt), most)


BASE = [(i * i + i // 7) % VOCABULARY for i in range(400)]


@st.composite
def traffic(draw):
    """Requests whose prompts begin alike, up to a length, and where each comes in."""
    made = []
    for attempt in range(1, draw(st.integers(1, 6)) + 1):
        shared, own = draw(st.integers(0, 60)), draw(st.lists(st.integers(0, 12), min_size=1, max_size=20))
        made.append((draw(st.integers(0, 12)), attempt, request(BASE[:shared] + own, draw(st.integers(1, 40)))))
    return made


@st.composite
def runs(draw):
    """A run that has ended, and its requests."""
    come = draw(traffic())
    layout = make_layout(
        draw(st.sampled_from((4, 1, 2, 3, 7))), draw(st.integers(1, 9)), draw(st.sampled_from(WINDOWS))
    )
    rows, chunk, depth = draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 8)), draw(st.sampled_from((1, 2)))
    budget, slots = rows + draw(st.integers(0, 12)), draw(st.sampled_from((0, 0, 40)))
    longest = max(len(one.prompt) + one.max_tokens for _, _, one in come)
    need = layout.pages_for(longest, SchedulerSettings(budget, rows, chunk, depth).ahead)
    pages = need + layout.tables + draw(st.sampled_from((0, 10, 60, 400)))
    run = Run.of(
        layout, pages, rows, budget, chunk, depth, slots and slots + layout.tables,
        draw(st.frozensets(st.integers(0, 40), max_size=3)), draw(st.sampled_from(sorted(POLICIES))),
    )  # fmt: skip
    events: dict[int, list[Event]] = {}
    for turn, attempt, one in come:
        events.setdefault(turn, []).append(Submit(attempt, one))
    with pytest.MonkeyPatch.context() as patch:
        always_swap(patch)
        return run(events), come


WINDOWS = (None, None, 3, 20)
NOTES = {
    "a prefix was there": lambda drawn: drawn[0].stats.prefix_hits > 0,
    "a row was preempted": lambda drawn: drawn[0].stats.preemptions > 0,
    "states were spoilt": lambda drawn: bool(drawn[0].executor.spoilt) and drawn[0].stats.preemptions > 0,
    "pages were evicted": lambda drawn: drawn[0].stats.evicted_capacity > 0,
    "a state came from the host": lambda drawn: drawn[0].executor.swapped > 0,
    "a row wrote two checkpoints in a step": lambda drawn: drawn[0].executor.crossed > 1,
    "two rows had the same page": lambda drawn: drawn[0].executor.exchanged > 0,
}


@pytest.mark.slow
def test_drawn_runs_reach_what_the_law_speaks_of() -> None:
    assert unreached_runs(runs(), NOTES) == set()


@few
@given(runs())
def test_every_row_goes_on_from_the_state_of_its_own_tokens(drawn) -> None:
    run, come = drawn
    assert run.output == {attempt: alone(one) for _, attempt, one in come}
    pool = run.scheduler.cache.pool
    assert pool.free == pool.total


@pytest.mark.parametrize("wrong", [1, 5])
def test_a_state_of_another_position_is_caught(wrong: int) -> None:
    run = Run.of(make_layout(), 400, 2, 16)
    run.executor.wrong = wrong
    prompt = BASE[:70]
    run({0: [Submit(1, request(prompt, 30))], 40: [Submit(2, request(prompt, 30))]})
    assert run.output[2] != alone(request(prompt, 30))


def test_shifted_prefixes_hit_and_compute_less_than_an_interval_again() -> None:
    """64 prompts that share a prefix, shifted by 0 to 100 tokens: each computes its own and at most n - 1 others."""
    layout = make_layout(4, 24)
    run = Run.of(layout, 20_000, 4, 64)
    rng, hits = np.random.default_rng(0), 0
    run({0: [Submit(1, request([*BASE[:300], 1, 2, 3], 2))]})
    for number in range(64):
        shared, own = 300 - int(rng.integers(0, 101)), rng.integers(0, 13, 9).tolist()
        computed = run.executor.computed
        run({run.steps: [Submit(2 + number, request([*BASE[:shared], *own], 2))]})
        assert run.output[2 + number] == alone(request([*BASE[:shared], *own], 2))
        again = run.executor.computed - computed - len(own) - 1
        hits += again < shared
        assert again <= layout.interval - 1 + layout.page_size
    assert hits >= 60


def test_the_interval_follows_from_the_sizes() -> None:
    """A checkpoint takes at most twice the memory of the KV of its tokens, or is as far away as it may be."""
    for page, units in ((4, 1), (4, 24), (16, 100), (1, 7), (7, 50)):
        layout = make_layout(page, units)
        state = layout.states.pages * layout.page_bytes
        assert layout.interval % page == 0
        assert state <= 2 * layout.interval * layout.token_bytes
        assert state > 2 * (layout.interval - page - 1) * layout.token_bytes
    assert make_layout(16, 10**4).interval == MOST_INTERVAL


@few
@given(st.integers(1, 100), st.integers(1, 120), st.integers(0, 40), st.sampled_from(WINDOWS), st.integers(1, 9))
def test_a_row_goes_on_from_a_state_of_another_engine(
    length: int, shared: int, most: int, window: int | None, units: int
) -> None:
    layout = make_layout(4, units, window)
    source, target = (Run.of(layout, 900, 2, 16) for _ in range(2))
    source({0: [Submit(1, request([*BASE[:shared], VOCABULARY], 2))]})  # the last token is in no other prompt
    one = request(BASE[:length], 9)
    come = transferred(source.scheduler, BlockHasher(SECRET, b"model", 4), source.executor.export, Submit(1, one), most)
    target({0: [Submit(1, one, transferred=come)]})
    assert target.output == {1: alone(one)}
    there = min(length - 1, shared, 4 * most) // layout.interval * layout.interval
    assert target.executor.computed == length + 8 - there, "it goes on from the last state that the other one has"
    assert len(come) == there // 4
    states = sum(np.count_nonzero(page.tables[layout.state_tables]) for page in come.values())
    assert states == (layout.states.pages if there else 0), "one state comes, whatever the length"


def test_a_forked_row_copies_the_state_before_it_writes() -> None:
    run = Run.of(make_layout(4, 5), 400, 6, 16)
    one = replace(request(BASE[:37], 12), count=3)
    run({0: [Submit(1, one)], 60: [Submit(2, request(BASE[:37], 12))]})
    assert run.output[2] == alone(request(BASE[:37], 12))


def test_a_cancelled_row_gives_its_states_back() -> None:
    run = Run.of(make_layout(4, 5), 400, 2, 16)
    run(
        {
            0: [Submit(1, request(BASE[:50], 40))],
            3: [Abort(1)],
            9: [Submit(2, request(BASE[:50], 5))],
        }
    )
    assert run.output[2] == alone(request(BASE[:50], 5))
    assert run.scheduler.cache.pool.free == run.scheduler.cache.pool.total
