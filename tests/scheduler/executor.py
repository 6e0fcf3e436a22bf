"""An executor without tensors that mirrors rows as a device would and holds the scheduler to its contract.

Its "model" draws a token from what it reads out of the pages of a sequence: a wrong table, a stale page or a page that
somebody else wrote changes the tokens. `controls.seed` names the attempt of a row. A row that joins on cached pages is
believed only after these were read; pages that are freed, or of a row that faulted, hold no tokens any more.
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
WIPED, SPOILED = -1, -2  # what slots hold that nobody may read


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
    """A row. known: its tokens, drawn ones included. joined: how many came with the join. cached: how many of these
    were in the pages that it joined on. computed: KV written so far, or found. broken: it has faulted, whatever it
    draws is void.
    """

    seed: int
    known: list[int]
    joined: int
    tables: list[list[int]]
    cached: int = 0
    computed: int = 0
    broken: bool = False

    def pages(self) -> list[int]:
        return [page for table in self.tables for page in table]


@dataclass
class FakeExecutor:
    """faulty: for an attempt, the position whose computation fails. rows: the live mirrors by row.

    found: by attempt, the cached tokens of each of its joins. recomputed: tokens that their attempt had had before.
    late: "token" and "fault", where a result came back for a row that another sequence had got meanwhile. taken_over:
    pages that a running row exchanged for others of the same content.
    """

    layout: KVLayout
    pages: int
    settings: SchedulerSettings
    faulty: Mapping[int, int] = field(default_factory=dict)
    rows: dict[int, Mirror] = field(default_factory=dict)
    computed_tokens: int = 0
    recomputed: int = 0
    taken_over: int = 0
    found: dict[int, list[int]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    closed: int = 0

    def __post_init__(self) -> None:
        self._slots = np.full(self.pages * self.layout.page_size, WIPED, np.int32)
        self._touched: deque[set[int]] = deque()  # pages of each step in flight
        self._written: deque[set[int]] = deque()  # those of them that it writes to
        self._results: deque[tuple[StepResult, dict[int, Mirror]]] = deque()
        self._distrusted: set[int] = set()  # pages of rows that have faulted
        self._reached: dict[int, int] = {}  # by attempt, how many of its tokens have been computed or found
        self._next_step = 0

    def launch(self, plan: StepPlan) -> None:
        law(not self.closed, "a step for an executor that is closed")
        law(len(self._results) < self.settings.steps_in_flight, "more steps in flight than the settings allow")
        law(plan.step == self._next_step, f"step {plan.step} was planned, {self._next_step} is next")
        self._next_step += 1
        self._wipe(plan.freed.tolist())
        self._leave(plan)
        self._join(plan)
        self._grow(plan)
        self._copy(plan.copies.tolist())
        self._believe(plan)
        self._results.append((self._compute(plan), {row: self.rows[row] for row, _, _ in plan.slices.tolist()}))

    def collect(self) -> StepResult:
        self._touched.popleft()
        self._written.popleft()
        result, mirrors = self._results.popleft()
        gone = {row for row, mirror in mirrors.items() if self.rows.get(row, mirror) is not mirror}
        faulted = {row for row, _ in result.faults}
        self.late |= {"fault" if row in faulted else "token" for row in gone}
        return result

    def close(self) -> None:
        self.closed += 1

    def distrust(self, attempt: int) -> None:
        """The attempt has ended with a fault: from now on nobody may join on a page that it had."""
        for mirror in self.rows.values():
            if mirror.seed == attempt:
                self._distrusted.update(mirror.pages())

    def read(self, page: int) -> list[int]:
        size = self.layout.page_size
        return self._slots[page * size : (page + 1) * size].tolist()

    def _wipe(self, pages: list[int]) -> None:
        size = self.layout.page_size
        for page in pages:
            law(page not in set().union(*self._touched), f"page {page} is freed while a step in flight can touch it")
            self._slots[page * size : (page + 1) * size] = WIPED
            self._distrusted.discard(page)

    def _leave(self, plan: StepPlan) -> None:
        for row in plan.leaves.tolist():
            law(row in self.rows, f"row {row} leaves but is free")
            del self.rows[row]

    def _join(self, plan: StepPlan) -> None:
        starts = {row: start for row, start, _ in plan.slices.tolist()}
        for join in plan.joins:
            law(join.row not in self.rows, f"a sequence joins row {join.row} that another still has")
            law(0 <= join.row < self.settings.max_sequences, f"row {join.row} does not exist")
            law(0 < join.prompt_count <= len(join.tokens), "a join without its prompt")
            law(join.row in starts, f"row {join.row} joins, but nothing of it is computed")
            tables: list[list[int]] = [[] for _ in self.layout.groups]
            mirror = Mirror(join.controls.seed, join.tokens.tolist(), len(join.tokens), tables, starts[join.row])
            self.rows[join.row] = mirror
            self.found.setdefault(mirror.seed, []).append(mirror.cached)

    def _grow(self, plan: StepPlan) -> None:
        owned = {page for mirror in self.rows.values() for page in mirror.pages()}
        in_flight, size = set().union(*self._touched), self.layout.page_size
        copied = {target for _, target in plan.copies.tolist()}
        for group, row, index, page in plan.grown.tolist():
            law(row in self.rows, f"row {row} grows but is free")
            mirror = self.rows[row]
            table = mirror.tables[group]
            law(0 <= page < self.pages, f"page {page} is not in the pool")
            law(page not in table, f"page {page} stands in row {row} twice")
            if index < len(table) and page not in copied:
                law((index + 1) * size <= mirror.computed, f"page {index} of row {row} is exchanged while it is filled")
                same = self.read(page) == mirror.known[index * size : (index + 1) * size]
                law(same, f"page {page} takes the place of one with another content")
                self.taken_over += 1
                owned.discard(table[index])
                owned.add(page)
                table[index] = page
                continue
            if mirror.computed == 0 and index == len(table) and index * size < mirror.cached:
                owned.add(page)
                table.append(page)  # is read once all changes are applied
                continue
            law(index <= len(table), f"page {index} of row {row} comes after {len(table)}")
            law(page not in owned, f"page {page} is in two live tables")
            law(page not in in_flight, f"page {page} is given out while a step in flight can touch it")
            owned.add(page)
            table[index : index + 1] = [page]
            self._wipe([page])

    def _copy(self, copies: list[list[int]]) -> None:
        size = self.layout.page_size
        law({a for a, _ in copies}.isdisjoint(b for _, b in copies), "a page is copied from and to in one step")
        for source, target in copies:
            self._slots[target * size : (target + 1) * size] = self.read(source)

    def _believe(self, plan: StepPlan) -> None:
        """Reads the cached pages of rows that join."""
        size, unfinished = self.layout.page_size, set().union(*self._written)
        for join in plan.joins:
            mirror = self.rows[join.row]
            cached = mirror.cached
            law(cached < mirror.joined, f"attempt {mirror.seed} joins with nothing left to compute")
            law(cached % size == 0, f"attempt {mirror.seed} joins in the middle of a page")
            for table in mirror.tables:
                pages = table[: cached // size]
                held = [token for page in pages for token in self.read(page)]
                law(held == mirror.known[:cached], f"attempt {mirror.seed} joins on pages that hold something else")
                law(unfinished.isdisjoint(pages), f"attempt {mirror.seed} joins on a page that is being computed")
                law(self._distrusted.isdisjoint(pages), f"attempt {mirror.seed} joins on a page of a row that faulted")
            mirror.computed = cached
            self._reached[mirror.seed] = max(cached, self._reached.get(mirror.seed, 0))

    def _compute(self, plan: StepPlan) -> StepResult:
        slices, logits = plan.slices.tolist(), plan.logits.tolist()
        total = sum(count for _, _, count in slices)
        law(slices, "a step without work")
        law(total <= self.settings.max_batched_tokens, f"{total} tokens pass the budget")
        law(len({row for row, _, _ in slices}) == len(slices), "a row has two slices")
        law(all(row in self.rows for row, _, _ in slices), "a slice of a row that is free")
        self._touched.append({page for row, _, _ in slices for page in self.rows[row].pages()})
        self._written.append(set())
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
        reached = self._reached[mirror.seed]
        self.recomputed += max(0, min(reached, end) - start)
        self._reached[mirror.seed] = max(reached, end)
        mirror.broken |= start <= self.faulty.get(mirror.seed, -1) < end
        others = {page for other in self.rows.values() if other is not mirror for page in other.pages()}
        for table in mirror.tables:
            law(end <= len(table) * size, f"row {row} has no slot for position {end - 1}")
            pages = set(table[start // size : (end - 1) // size + 1])
            law(others.isdisjoint(pages), f"row {row} writes to a page that another row has too")
            self._written[-1] |= pages
            for position in range(start, end):
                self._slots[self._slot(table, position)] = SPOILED if mirror.broken else mirror.known[position]
        mirror.computed = end
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
