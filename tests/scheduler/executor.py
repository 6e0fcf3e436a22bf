"""An executor without tensors that mirrors rows as a device would and holds the scheduler to its contract.

Its "model" draws a token from what it reads out of the pages of a sequence: a wrong table, a stale page or a page that
another sequence wrote changes the tokens. Every position reads what it sees in each layer group: all before it, or
those within the window. `controls.seed` names the attempt of a row.

A row that joins on cached pages, or on those of another sequence of its prompt, is believed only after these were read;
pages that are freed, or of a row that faulted, hold no tokens any more. A search's row that has drawn computes nothing
until it is given a token: what it drew is no token.
"""

import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from scheduler.events import Logprobs
from scheduler.request import Request
from scheduler.settings import SchedulerSettings
from scheduler.step import NO_TOKEN, StepPlan, StepResult
from tests.scheduler.plan_checker import PlanChecker, Table, tables_of

VOCABULARY = 13
FAULT = "planted fault"
WIPED, SPOILED = -1, -2  # content of slots that no row may read
UNDECIDED = -3  # the last token of a hypothesis that waits


Slice = tuple[int, PlanChecker, int]  # a row, who has it, up to where it is computed


class LawBroken(AssertionError):
    """A law of the design or a clause of a contract does not hold."""


def law(holds: object, message: str) -> None:
    if not holds:
        raise LawBroken(message)


def next_token(tokens: list[int], index: int = 0) -> int:
    """Returns what the model draws after these tokens for a request's sequence of this index."""
    return zlib.crc32(np.array(tokens, np.int32).tobytes(), index) % VOCABULARY


def candidates(tokens: list[int]) -> NDArray[np.float32]:
    """[VOCABULARY] logprobs of what may come after these tokens. No two are equal, nor are two sums of them."""
    mixed = np.arange(1, VOCABULARY + 1, dtype=np.uint64) * 0x9E3779B1 ^ np.uint64(
        zlib.crc32(np.array(tokens, np.int32).tobytes())
    )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return -((mixed >> np.uint64(8)).astype(np.float32) + 1) / 2**20


def alone(request: Request, index: int = 0) -> list[int]:
    """The output of a request's sequence that no other disturbs."""
    tokens = request.prompt.tolist()
    output: list[int] = []
    while len(output) < request.max_tokens:
        token = next_token(tokens + output, index)
        if token in request.controls.logits_params.not_yet:  # here: where the model draws it, nothing is left to draw
            break
        output.append(token)
        if output[-1] in request.stop_ids:
            break
    return output


@dataclass
class FakeExecutor:
    """faulty: for an attempt, the position whose computation fails. rows: the live mirrors by row.

    jumps: most tokens that it offers behind a draw. jumped: tokens that it was told to put behind draws.

    found: by attempt, the cached tokens of each of its joins. came_with: by attempt, the tokens of its first join.
    recomputed: tokens that their sequence had had before.
    late: "token" and "fault", where a result came back for a row that another sequence had got meanwhile. taken_over:
    pages that a running row exchanged for others of the same content. out_of_sight: pages that left the window of a row
    that went on. within: tables that began with a page after the first one.
    """

    layout: KVLayout
    pages: int
    settings: SchedulerSettings
    faulty: Mapping[int, int] = field(default_factory=dict)
    jumps: int = 0
    rows: dict[int, PlanChecker] = field(default_factory=dict)
    computed_tokens: int = 0
    recomputed: int = 0
    taken_over: int = 0
    out_of_sight: int = 0
    within: int = 0
    found: dict[int, list[int]] = field(default_factory=dict)
    came_with: dict[int, int] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    closed: int = 0
    jumped: int = 0

    def __post_init__(self) -> None:
        # By layer group, since a page written for one of them holds nothing for another.
        self._slots = np.full((len(self.layout.groups), self.pages * self.layout.page_size), WIPED, np.int32)
        self._touched: deque[set[int]] = deque()  # pages that each step in flight can read or write
        self._written: deque[set[int]] = deque()  # those of them that it writes to
        self._results: deque[tuple[StepResult, list[Slice]]] = deque()
        self._checked: deque[list[int]] = deque()  # rows that have drafts in each step in flight
        self.distrusted: set[int] = set()  # pages of rows that have faulted: no row is to join on them
        # By sequence, how many of its tokens have been computed or found.
        self._reached: dict[tuple[int, int], int] = {}
        self._next_step = 0

    def launch(self, plan: StepPlan) -> None:
        law(not self.closed, "a step for an executor that is closed")
        law(len(self._results) < self.settings.depth, "more steps in flight than the settings allow")
        law(plan.step == self._next_step, f"step {plan.step} was planned, {self._next_step} is next")
        self._next_step += 1
        self._wipe(plan.freed.tolist())
        self._leave(plan)
        self._join(plan)
        self._give(plan)
        self._jump(plan)
        self._grow(plan)
        self._copy(plan.copies.tolist())
        self._believe(plan)
        result = self._compute(plan)
        slices = [(row, self.rows[row], self.rows[row].computed) for row in plan.slices[:, 0].tolist()]
        self._results.append((result, slices))
        self._checked.append(plan.drafts[:, 0].tolist())
        for _, mirror, computed in slices:
            for table in mirror.tables:
                self.out_of_sight += table.forget(computed)

    def collect(self) -> StepResult:
        self._touched.popleft()
        self._written.popleft()
        result, slices = self._results.popleft()
        checked = set(self._checked.popleft())
        for row, mirror, computed in slices:
            mirror.collected = computed
            if row in checked:
                mirror.drafts = []
                for table in mirror.tables:
                    table.truncate(computed + 1)
        gone = {row for row, mirror, _ in slices if self.rows.get(row, mirror) is not mirror}
        faulted = {row for row, _ in result.faults}
        self.late |= {"fault" if row in faulted else "token" for row in gone}
        return result

    def close(self) -> None:
        self.closed += 1

    def distrust(self, attempt: int) -> None:
        """The attempt has ended with a fault: from now on no row is to join on a page that a row had which met it."""
        for mirror in self.rows.values():
            if mirror.seed == attempt and mirror.broken:
                self.distrusted.update(mirror.had)

    def read(self, group: int, page: int) -> list[int]:
        """Returns what a page holds for a layer group."""
        size = self.layout.page_size
        return self._slots[group, page * size : (page + 1) * size].tolist()

    def _wipe(self, pages: list[int]) -> None:
        size, in_flight = self.layout.page_size, set().union(*self._touched)
        for page in pages:
            law(page not in in_flight, f"page {page} is freed while a step in flight can touch it")
            self._slots[:, page * size : (page + 1) * size] = WIPED
            self.distrusted.discard(page)
            for mirror in self.rows.values():
                mirror.had.discard(page)

    def _leave(self, plan: StepPlan) -> None:
        for row in plan.leaves.tolist():
            law(row in self.rows, f"row {row} leaves but is free")
            del self.rows[row]

    def _join(self, plan: StepPlan) -> None:
        """A row that begins with a slice had what comes before it computed; one that draws at once had everything."""
        starts, draws = {row: start for row, start, _ in plan.slices.tolist()}, set(plan.logits[:, 1].tolist())
        for join in plan.joins:
            row, tokens = join.row, join.tokens.tolist()
            law(row not in self.rows, f"a sequence joins row {row} that another still has")
            law(0 <= row < self.settings.max_sequences, f"row {row} does not exist")
            law(0 < join.prompt_count <= len(tokens), "a join without its prompt")
            offers = max(join.controls.top_logprobs, 0)
            law(row in starts or row in draws or offers, f"row {row} joins, but nothing of it is computed")
            mirror = PlanChecker(
                join.controls.seed,
                tokens,
                len(tokens),
                tables_of(self.layout),
                starts.get(row, len(tokens) - (row not in draws)),
                stuck=frozenset(join.controls.logits_params.not_yet),
                index=join.index,
                offers=offers,
                bidirectional=join.bidirectional,
            )
            law(all(mirror.key != other.key for other in self.rows.values()), f"two rows have sequence {mirror.key}")
            self.rows[row] = mirror
            self.found.setdefault(mirror.seed, []).append(mirror.cached)
            self.came_with.setdefault(mirror.seed, len(tokens))

    def _give(self, plan: StepPlan) -> None:
        for row, token in plan.forced.tolist():
            law(row in self.rows, f"row {row} is given a token and is free")
            mirror = self.rows[row]
            law(mirror.waits or mirror.rejected, f"row {row} is given a token but waits for none")
            law(0 <= token < VOCABULARY, f"row {row} is given {token}, which is no token")
            right = mirror.waits or token == mirror.known[-1]
            law(right, f"row {row} is given {token}, the last of its draws that counts is {mirror.known[-1]}")
            mirror.known[-1], mirror.waits, mirror.rejected = token, False, False

    def _jump(self, plan: StepPlan) -> None:
        """Puts tokens behind draws: those that it has offered, all of them or the first."""
        for row, position, token in plan.jumps.tolist():
            law(row in self.rows, f"row {row} jumps and is free")
            mirror = self.rows[row]
            law(position == len(mirror.known), f"row {row} jumps at {position}, it has {len(mirror.known)} tokens")
            law(mirror.computed <= mirror.drawn_at, f"row {row} jumps behind a draw that it has gone on from")
            law(token == next_token(mirror.known, mirror.index), f"row {row} jumps to {token}, which was not offered")
            mirror.known.append(token)
            self.jumped += 1

    def _offer(self, row: int) -> list[list[int]]:
        """Tokens that a row's draw leaves no choice of: how many depends on the sequence's tokens alone."""
        mirror = self.rows[row]
        if mirror.broken or mirror.offers or mirror.stuck or mirror.drafts or mirror.known[-1] < 0:
            return []
        known, offered = list(mirror.known), list[list[int]]()
        for _ in range(sum(known) % (self.jumps + 1)):
            offered.append([row, next_token(known, mirror.index)])
            known.append(offered[-1][1])
        return offered

    def _grow(self, plan: StepPlan) -> None:
        owned = {page for mirror in self.rows.values() for page in mirror.pages()}
        in_flight = set().union(*self._touched)
        copied = {target for _, target in plan.copies.tolist()}
        for group, row, index, page in plan.grown.tolist():
            law(row in self.rows, f"row {row} grows but is free")
            mirror = self.rows[row]
            table = mirror.tables[group]
            law(0 <= page < self.pages, f"page {page} is not in the pool")
            law(page not in table.live, f"page {page} stands in row {row} twice")
            if index < len(table.told) and page not in copied:
                self._exchange(mirror, group, index, page, owned)
                if index < table.first:
                    continue  # behind the window no row looks, and others may get it
            elif not mirror.computed and self._joins_on(table, index, mirror.cached):
                table.told.append(page)  # is read once all changes are applied
            else:
                if not table.told and table.window is not None and index == table.seen(mirror.cached):
                    table.start(index)  # it goes on from another sequence, nothing of which it sees any more
                law(index <= len(table.told), f"page {index} of row {row} comes after {len(table.told)}")
                law(page not in owned, f"page {page} is in two live tables")
                law(page not in in_flight, f"page {page} is given out while a step in flight can touch it")
                table.told[index : index + 1] = [page]
                self._wipe([page])
            owned.add(page)
            mirror.had.add(page)

    def _joins_on(self, table: Table, index: int, cached: int) -> bool:
        """Whether a table that had nothing yet, or just this, is told its next page of those that are cached."""
        if not table.told and table.window is not None and index * table.size < cached:
            table.start(index)
            self.within += index > 0
        return index == len(table.told) and index * table.size < cached

    def _exchange(self, mirror: PlanChecker, group: int, index: int, page: int, owned: set[int]) -> None:
        """A page takes the place of another with the same content; behind the window that changes nothing."""
        table, size = mirror.tables[group], self.layout.page_size
        before = table.told[index]
        table.told[index] = page
        mirror.had.add(page)
        self.taken_over += 1
        if index < table.first:
            return
        name = f"page {index} of attempt {mirror.seed}"
        law((index + 1) * size <= mirror.computed, f"{name} is exchanged while it is filled")
        same = self.read(group, page) == mirror.known[index * size : (index + 1) * size]
        law(same, f"{name} is exchanged for {page}, which has another content")
        owned.discard(before)

    def _copy(self, copies: list[list[int]]) -> None:
        size = self.layout.page_size
        law({a for a, _ in copies}.isdisjoint(b for _, b in copies), "a page is copied from and to in one step")
        for source, target in copies:
            self._slots[:, target * size : (target + 1) * size] = self._slots[:, source * size : (source + 1) * size]

    def _believe(self, plan: StepPlan) -> None:
        """Reads the cached pages of rows that join."""
        size, unfinished = self.layout.page_size, set().union(*self._written)
        for join in plan.joins:
            mirror = self.rows[join.row]
            cached = mirror.cached
            for group, table in enumerate(mirror.tables):
                pages = table.told[table.first : cached // size]
                name = f"sequence {mirror.key} joins"
                law(table.first <= table.seen(cached), f"{name} without what its first token sees in group {group}")
                law(cached <= len(table.told) * size, f"{name} without all pages of group {group}")
                if cached < mirror.joined:  # else they are filled in this step, and read where it draws
                    held = self._slots[group, self._slots_of(table, table.first * size, cached)].tolist()
                    law(held == mirror.known[table.first * size : cached], f"{name} on pages that hold something else")
                    law(unfinished.isdisjoint(pages), f"{name} on a page that is being computed")
                table.forget(cached)
            mirror.computed = cached
            self._reached[mirror.key] = max(cached, self._reached.get(mirror.key, 0))

    def _compute(self, plan: StepPlan) -> StepResult:
        slices, logits = plan.slices.tolist(), plan.logits.tolist()
        total = sum(count for _, _, count in slices)
        law(slices, "a step without work")
        law(total <= self.settings.step_tokens, f"{total} tokens pass the budget")
        law(len({row for row, _, _ in slices}) == len(slices), "a row has two slices")
        law(all(row in self.rows for row, _, _ in slices), "a slice of a row that is free")
        tables = [(table, start) for row, start, _ in slices for table in self.rows[row].tables]
        self._draft(plan)
        self._touched.append({page for table, start in tables for page in table.told[table.seen(start) :]})
        self._written.append(set())
        self.computed_tokens += total
        # A row that draws from another's logits has the pages that are written in this step.
        along = {row for _, row in logits} - {row for row, _, _ in slices}
        faults = tuple((row, FAULT) for row, start, count in slices if self._advance(row, start, count, along))
        ends = np.cumsum([count for _, _, count in slices]) - 1
        due = [
            [int(end) - behind, row]
            for end, (row, _, _) in zip(ends, slices, strict=True)
            if self.rows[row].computed == len(self.rows[row].known)
            for behind in range(len(self.rows[row].drafts), -1, -1)
        ]
        law(logits[: len(due)] == due, f"the rows at the end of their known tokens draw: {due}, not {logits}")
        parents = {int(end): self.rows[row] for end, (row, _, _) in zip(ends, slices, strict=True)}
        for offset, row in logits[len(due) :]:
            law(row in along and offset in parents, f"row {row} draws from {offset}, which is none of its tokens")
            along.remove(row)
            self._read_along(self.rows[row], parents[offset])
        offered = [candidates(self.rows[row].known) for _, row in logits]
        drawn = np.array(self._draw_all([row for _, row in logits]), np.int32)
        offers = [self.rows[row].offers for _, row in logits]
        jumps = [offer for row in sorted({row for _, row in logits}) for offer in self._offer(row)]
        return StepResult(
            plan.step,
            drawn,
            logprobs_of(drawn, offers, offered),
            faults,
            jumps=np.array(jumps, np.int32).reshape(-1, 2),
        )

    def _draft(self, plan: StepPlan) -> None:
        counts = {row: count for row, _, count in plan.slices.tolist()}
        for row, token in plan.drafts.tolist():
            law(row in counts, f"row {row} has drafts and computes nothing")
            self.rows[row].drafts.append(token)
        for row in set(plan.drafts[:, 0].tolist()):
            mirror = self.rows[row]
            plain = not mirror.offers and not mirror.stuck and mirror.computed == len(mirror.known) - 1
            law(
                plain,
                f"row {row} has drafts, and more than its last token is not computed, or its draws depend on others",
            )
            law(counts[row] == 1 + len(mirror.drafts), f"row {row} computes {counts[row]} tokens, not its drafts")
            mirror.known += mirror.drafts

    def _draw_all(self, rows: list[int]) -> list[int]:
        """Returns what these rows draw; those with drafts come once for each and once more."""
        drawn: list[int] = []
        for i, row in enumerate(rows):
            if i and rows[i - 1] == row:
                continue  # has drawn with its first
            mirror = self.rows[row]
            drawn += self._check(mirror) if mirror.drafts else [self._draw(mirror)]
        return drawn

    def _check(self, mirror: PlanChecker) -> list[int]:
        """Draws at each draft. Goes back to what a row has that was given no draft that it would not have drawn."""
        drafts = mirror.drafts
        del mirror.known[-len(drafts) :]
        if mirror.broken:
            return [-1] * (1 + len(drafts))
        known = mirror.known
        drawn = [next_token(known + drafts[:i], mirror.index) for i in range(1 + len(drafts))]
        right = next((i for i, draft in enumerate(drafts) if drawn[i] != draft), len(drafts))
        mirror.computed = len(known) + right
        mirror.known = known + drawn[: right + 1]
        mirror.rejected = right < len(drafts)
        self._reached[mirror.key] = min(self._reached[mirror.key], mirror.computed)
        return drawn

    def _read_along(self, mirror: PlanChecker, parent: PlanChecker) -> None:
        """The row draws from what another has computed, of which it has the pages."""
        mirror.broken = parent.broken
        law(mirror.seed == parent.seed, f"sequence {mirror.key} draws from the logits of {parent.key}")
        for group, table in enumerate(mirror.tables):
            seen = table.sees(mirror.computed - 1)
            read = self._slots[group, self._slots_of(table, seen, mirror.computed)].tolist()
            same = mirror.broken or read == mirror.known[seen:]
            law(same, f"sequence {mirror.key} draws from pages that hold something else")

    def _advance(self, row: int, start: int, count: int, along: set[int]) -> bool:
        """Writes the slice's tokens to its slots. along: rows that may share these. True where the row faults."""
        mirror, end, size = self.rows[row], start + count, self.layout.page_size
        law(count > 0, f"row {row} has an empty slice")
        law(count <= (self.settings.prefill_chunk or count), f"a slice of {count} passes the prefill chunk")
        law(start == mirror.computed, f"row {row} goes on at {start}, {mirror.computed} tokens are computed")
        law(not mirror.waits and not mirror.rejected, f"row {row} goes on though no token was given to it")
        divided = start < mirror.bidirectional and end < min(mirror.bidirectional, len(mirror.known))
        law(not divided, f"row {row} divides its bidirectional prefix of {mirror.bidirectional} tokens at {end}")
        law(end <= len(mirror.known), f"row {row} computes {end} tokens, {len(mirror.known)} are known")
        reached = self._reached[mirror.key]
        self.recomputed += max(0, min(reached, end) - start)
        self._reached[mirror.key] = max(reached, end)
        mirror.broken |= start <= self.faulty.get(mirror.seed, -1) < end
        others = {
            page
            for who, other in self.rows.items()
            if other is not mirror and not (who in along and other.seed == mirror.seed)
            for page in other.pages()
        }
        for group, table in enumerate(mirror.tables):
            law(end <= len(table.told) * size, f"row {row} has no slot for position {end - 1}")
            pages = set(table.told[start // size : (end - 1) // size + 1])
            law(others.isdisjoint(pages), f"row {row} writes to a page that another row has too")
            self._written[-1] |= pages
            slots = self._slots_of(table, start, end)
            self._slots[:, slots] = WIPED
            self._slots[group, slots] = SPOILED if mirror.broken else mirror.known[start:end]
            seen = table.sees(start)
            read = self._slots[group, self._slots_of(table, seen, end)].tolist()
            same = mirror.broken or read == mirror.known[seen:end]
            law(same, f"the pages of attempt {mirror.seed} hold something else")
        mirror.computed = end
        return mirror.broken

    def _slots_of(self, table: Table, start: int, end: int) -> NDArray[np.int64]:
        """Returns the slots of these positions."""
        size = self.layout.page_size
        first, last = start // size, -(-end // size)
        pages = np.array(table.told[first:last], np.int64)
        return (pages[:, None] * size + np.arange(size)).reshape(-1)[start - first * size : end - first * size]

    def _draw(self, mirror: PlanChecker) -> int:
        # Its known tokens were read as it was computed.
        token = -1 if mirror.broken else next_token(mirror.known, mirror.index)
        if mirror.offers:
            mirror.known.append(UNDECIDED)
            mirror.waits = True
            return token
        if token in mirror.stuck:
            mirror.known.append(0)
            return NO_TOKEN
        mirror.drawn_at = len(mirror.known)
        mirror.known.append(token)
        return token


def logprobs_of(
    tokens: NDArray[np.int32], offers: Sequence[int] = (), offered: Sequence[NDArray[np.float32]] = ()
) -> Logprobs:
    """Made up, but so that each token's can be told from another's. offers: of each, how many of those that it could
    draw are told, whose logprobs are `offered`; 0 for those that no search goes by.
    """
    chosen, width = -tokens.astype(np.float32), max([2, *offers])
    top_ids, top = np.full((len(tokens), width), -1, np.int32), np.full((len(tokens), width), -np.inf, np.float32)
    top_ids[:, 0], top_ids[:, 1] = tokens, tokens + 1
    top[:, :2] = -top_ids[:, :2]
    for i in np.flatnonzero(offers).tolist():
        best = np.argsort(-offered[i], kind="stable")[: offers[i]]
        top_ids[i, : len(best)], top[i, : len(best)] = best, offered[i][best]
    return Logprobs(chosen, tokens + 1, top_ids, top)
