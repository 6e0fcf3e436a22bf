"""An executor without tensors that mirrors rows as a device would and holds the scheduler to its contract.

Its "model" draws a token from what it reads out of the pages of a sequence: a wrong table, a stale page or a page that
somebody else wrote changes the tokens. `controls.seed` names the attempt of a row.
"""

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from scheduler.events import Logprobs
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan, StepResult

VOCABULARY = 13
FAULT = "planted fault"


class LawBroken(AssertionError):
    """A law of the design or a clause of a contract does not hold."""


def law(holds: object, message: str) -> None:
    if not holds:
        raise LawBroken(message)


def next_token(tokens: list[int]) -> int:
    """What the model draws after these tokens."""
    return zlib.crc32(np.array(tokens, np.int32).tobytes()) % VOCABULARY


def alone(request: Request) -> list[int]:
    """The output of a request that nobody disturbs."""
    tokens = request.prompt.tolist()
    output: list[int] = []
    while len(output) < request.max_tokens:
        output.append(next_token(tokens + output))
        if output[-1] in request.stop_ids:
            break
    return output


@dataclass(eq=False)
class Mirror:
    """A row. known: its tokens, drawn ones included. joined: how many came with the join. computed: KV written so far.
    broken: it has faulted, whatever it draws is void.
    """

    seed: int
    known: list[int]
    joined: int
    tables: list[list[int]]
    computed: int = 0
    broken: bool = False

    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table]


@dataclass
class FakeExecutor:
    """faulty: for an attempt, the position whose computation fails. rows: the live mirrors by row.

    late: "token" and "fault", where a result came back for a row that another sequence had got meanwhile.
    """

    layout: KVLayout
    pages: int
    settings: SchedulerSettings
    faulty: Mapping[int, int] = field(default_factory=dict)
    rows: dict[int, Mirror] = field(default_factory=dict)
    computed_tokens: int = 0
    late: set[str] = field(default_factory=set)
    closed: int = 0

    def __post_init__(self) -> None:
        self._slots = np.full(self.pages * self.layout.page_size, -1, np.int32)
        self._touched: deque[set[int]] = deque()  # pages of each step in flight
        self._results: deque[tuple[StepResult, dict[int, Mirror]]] = deque()
        self._next_step = 0

    def launch(self, plan: StepPlan) -> None:
        law(not self.closed, "a step for an executor that is closed")
        law(len(self._results) < self.settings.steps_in_flight, "more steps in flight than the settings allow")
        law(plan.step == self._next_step, f"step {plan.step} was planned, {self._next_step} is next")
        self._next_step += 1
        self._leave(plan)
        self._join(plan)
        self._grow(plan)
        self._results.append((self._compute(plan), {row: self.rows[row] for row, _, _ in plan.slices.tolist()}))

    def collect(self) -> StepResult:
        self._touched.popleft()
        result, mirrors = self._results.popleft()
        gone = {row for row, mirror in mirrors.items() if self.rows.get(row, mirror) is not mirror}
        faulted = {row for row, _ in result.faults}
        self.late |= {"fault" if row in faulted else "token" for row in gone}
        return result

    def close(self) -> None:
        self.closed += 1

    def _leave(self, plan: StepPlan) -> None:
        for row in plan.leaves.tolist():
            law(row in self.rows, f"row {row} leaves but is free")
            del self.rows[row]

    def _join(self, plan: StepPlan) -> None:
        for join in plan.joins:
            law(join.row not in self.rows, f"a sequence joins row {join.row} that another still has")
            law(0 <= join.row < self.settings.max_sequences, f"row {join.row} does not exist")
            law(0 < join.prompt_count <= len(join.tokens), "a join without its prompt")
            tables: list[list[int]] = [[] for _ in self.layout.groups]
            self.rows[join.row] = Mirror(join.controls.seed, join.tokens.tolist(), len(join.tokens), tables)

    def _grow(self, plan: StepPlan) -> None:
        owned = {page for mirror in self.rows.values() for page in mirror.pages()}
        in_flight = set().union(*self._touched)
        for group, row, index, page in plan.grown.tolist():
            law(row in self.rows, f"row {row} grows but is free")
            table = self.rows[row].tables[group]
            law(index == len(table), f"page {index} of row {row} comes after {len(table)}")
            law(0 <= page < self.pages, f"page {page} is not in the pool")
            law(page not in owned, f"page {page} is in two live tables")
            law(page not in in_flight, f"page {page} is given out while a step in flight can touch it")
            owned.add(page)
            table.append(page)
            size = self.layout.page_size
            self._slots[page * size : (page + 1) * size] = -1

    def _compute(self, plan: StepPlan) -> StepResult:
        slices, logits = plan.slices.tolist(), plan.logits.tolist()
        total = sum(count for _, _, count in slices)
        law(slices, "a step without work")
        law(total <= self.settings.max_batched_tokens, f"{total} tokens pass the budget")
        law(len({row for row, _, _ in slices}) == len(slices), "a row has two slices")
        law(all(row in self.rows for row, _, _ in slices), "a slice of a row that is free")
        self._touched.append({page for row, _, _ in slices for page in self.rows[row].pages()})
        self.computed_tokens += total
        faults = tuple((row, FAULT) for row, start, count in slices if self._advance(row, start, count))
        ends = np.cumsum([count for _, _, count in slices]) - 1
        due = [
            [int(end), row]
            for end, (row, _, _) in zip(ends, slices, strict=True)
            if self.rows[row].computed == len(self.rows[row].known)
        ]
        law(logits == due, f"the rows at the end of their known tokens draw: {due}, not {logits}")
        drawn = np.array([self._draw(self.rows[row]) for _, row in logits], np.int32)
        return StepResult(plan.step, drawn, logprobs_of(drawn), faults)

    def _advance(self, row: int, start: int, count: int) -> bool:
        """Writes the slice's tokens to its slots. True where the row faults."""
        mirror, end, size = self.rows[row], start + count, self.layout.page_size
        law(count > 0, f"row {row} has an empty slice")
        law(count <= (self.settings.prefill_chunk or count), f"a slice of {count} passes the prefill chunk")
        law(start == mirror.computed, f"row {row} goes on at {start}, {mirror.computed} tokens are computed")
        law(end <= len(mirror.known), f"row {row} computes {end} tokens, {len(mirror.known)} are known")
        for table in mirror.tables:
            law(end <= len(table) * size, f"row {row} has no slot for position {end - 1}")
            for position in range(start, end):
                self._slots[self._slot(table, position)] = mirror.known[position]
        mirror.computed = end
        mirror.broken |= start <= self.faulty.get(mirror.seed, -1) < end
        return mirror.broken

    def _slot(self, table: list[int], position: int) -> int:
        size = self.layout.page_size
        return table[position // size] * size + position % size

    def _draw(self, mirror: Mirror) -> int:
        if mirror.broken:
            mirror.known.append(-1)
            return -1
        for table in mirror.tables:
            read = [int(self._slots[self._slot(table, position)]) for position in range(mirror.computed)]
            law(read == mirror.known, f"the pages of attempt {mirror.seed} hold something else")
        token = next_token(mirror.known)
        mirror.known.append(token)
        return token


def logprobs_of(tokens: NDArray[np.int32]) -> Logprobs:
    """Made up, but so that each token's can be told from another's."""
    top = np.stack((tokens, tokens + 1), axis=1)
    return Logprobs(-tokens.astype(np.float32), tokens + 1, top, -top.astype(np.float32))
