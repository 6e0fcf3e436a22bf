"""Running sequences as arrays indexed by batch row: what the scheduler knows of each, and the checks that end them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, HashChain
from cache_manager.matching import Awaited
from cache_manager.transfers import TransferredPage
from scheduler.controls import NO_LOGITS_PARAMS
from scheduler.events import Submit
from scheduler.preemption_cause import PreemptionCause
from scheduler.request import Request
from scheduler.service import Service

Index = NDArray[np.int32]
Places = NDArray[np.intp]
"""Rows as numpy indexes with them: it converts int32 at every use, which costs more than what the use does."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence as it stands in the waiting queue.

    Attributes:
        attempt: Submission that it belongs to; sequences of one request have the same.
        request: The request.
        emitted: [n] int32. Output tokens known so far.
        submitted: Seconds on the engine's clock.
        order: Place in line, see `SchedulingPolicy.order`. Kept over preemptions.
        preempted: It had a row before, or another sequence of its attempt had.
        chain: Block hashes of its full pages; None without a prefix cache.
        awaited: Page that it waits for, which another sequence computes.
        lost: Tokens whose KV was computed before it was preempted.
        index: Index of the sequence in its request.
        siblings: Indices of sequences that go on from its prompt once that is computed.
        isolated_steps: Steps that it runs without other attempts.
        transferred: Transferred pages until its admission, see `Submit`.
        preemptions: Times that it lost its row for a cause that counts to `SchedulerSettings.max_preemptions`.
        served: Tokens of it that are counted in `Service`; 0 before its first row.
        blocked: Seconds on the engine's clock when it was first found to lack rows or pages; None before.
        expected: Output tokens that it was expected to have when it came.
        cause: Cause of its last preemption; None before the first.
    """

    attempt: int
    request: Request
    emitted: NDArray[np.int32]
    submitted: float
    order: int
    preempted: bool = False
    chain: HashChain | None = None
    awaited: Awaited | None = None
    lost: int = 0
    index: int = 0
    siblings: tuple[int, ...] = ()
    isolated_steps: int = 0
    transferred: Mapping[BlockHash, TransferredPage] = field(default_factory=dict)
    preemptions: int = 0
    served: int = 0
    blocked: float | None = None
    expected: int = 0
    cause: PreemptionCause | None = None

    def extended(self, index: int, token: int) -> "Sequence":
        """Returns the sequence of another index in the same request that goes on from this one with a token."""
        order = self.order + index - self.index
        emitted = np.append(self.emitted, np.int32(token))
        child = replace(self, index=index, order=order, emitted=emitted, preempted=True, chain=None, siblings=())
        child.served, child.cause = self.length, None
        return child

    @property
    def key(self) -> tuple[int, int]:
        return self.attempt, self.index

    @property
    def tenant(self) -> str:
        return self.request.scope.tenant

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.emitted)

    def tokens(self) -> NDArray[np.int32]:
        return np.concatenate((self.request.prompt, self.emitted))


def sequences_of(submit: Submit, now: float, order: int) -> list[Sequence]:
    """Returns the sequences to run of an attempt.

    A sequence that has output goes on by itself; all others go on from one prompt, computed once.

    Args:
        submit: Event.
        now: Seconds on the engine's clock.
        order: Order of the first sequence.
    """
    request = submit.request
    count = request.count if request.beam is None else request.beam.width
    emitted = submit.emitted or ((),) * count
    fresh = [index for index, tokens in enumerate(emitted) if tokens == ()]
    return [
        Sequence(
            submit.attempt,
            request,
            np.array(tokens, np.int32),
            now,
            order + index,
            index=index,
            siblings=() if tokens else tuple(fresh[1:]),
            isolated_steps=submit.isolated_steps,
            transferred=submit.transferred,
        )
        for index, tokens in enumerate(emitted)
        if tokens or index in fresh[:1]
    ]


class Rows:
    """Batch rows, as arrays indexed by row.

    A row is in use while its serial is above 0. Serials are never used twice, so a result that was planned for an
    earlier sequence of a row is recognised. `length` and `scheduled` are written by `Scheduler`, by `Drafting` where
    drafts are checked, and by `Running` where rows begin or fork; all else is written here.

    Attributes:
        size: Number of rows.
        serial: [size] int64. Number of the row's sequence, 0 for a free row.
        attempt: [size] int64.
        index: [size] int32. Index of the sequence in its request.
        siblings: [size] int32. Sequences that will go on from this one's prompt; rows are kept free for them.
        searches: [size] bool. The row is a beam search's, which decides what it goes on with.
        bidirectional: [size] int32. Tokens at the front that are computed in one step.
        prompt: [size] int32. Prompt tokens.
        emitted: [size] int32. Output tokens committed.
        length: [size] int32. All tokens, drawn ones in flight included.
        scheduled: [size] int32. Tokens whose KV is computed or being computed.
        max_length: [size] int32. Length at which the sequence ends.
        order: [size] int64. As in `Sequence`.
        tenant: [size] int32. By `tenant_number`.
        served: [size] int32. Tokens that are counted in `service`; those behind them were drawn in this row.
        last_step: [size] int64. Last step that touches the row's pages, -1 for none.
        lost: [size] int32. Tokens whose KV was computed before a preemption.
        drafts: [size] int32. Draft tokens in flight, counted in `length` and `scheduled` as though all held.
        closes_at: [size] float64. Time at which a constrained output should be complete, infinity where it need not be.
        may_draft: [size] bool. Draws depend on logits alone, not on the output before them.
        service: Tokens that tenants have had.
        departures: Rows that were removed so far.
        closing: Rows in use with a finite `closes_at`.
        total_scheduled: Sum of `scheduled` over the rows in use.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.serial = np.zeros(size, np.int64)
        self.attempt = np.zeros(size, np.int64)
        self.index = np.zeros(size, np.int32)
        self.siblings = np.zeros(size, np.int32)
        self.searches = np.zeros(size, np.bool_)
        self.bidirectional = np.zeros(size, np.int32)
        self.prompt = np.zeros(size, np.int32)
        self.emitted = np.zeros(size, np.int32)
        self._tokens = np.zeros((2, size), np.int32)
        self.length, self.scheduled = self._tokens  # views: one operation moves all rows on
        self.max_length = np.zeros(size, np.int32)
        self.order = np.zeros(size, np.int64)
        self.tenant = np.zeros(size, np.int32)
        self.served = np.zeros(size, np.int32)
        self.last_step = np.full(size, -1, np.int64)
        self.lost = np.zeros(size, np.int32)
        self.drafts = np.zeros(size, np.int32)
        self.closes_at = np.full(size, math.inf)
        self.may_draft = np.zeros(size, np.bool_)
        self._last = np.zeros(size, np.int32)  # position of the last token in the output
        self._stops = np.full((size, 4), -1, np.int32)
        self._stopping = 0  # rows in use that have stop tokens
        self._outputs = np.zeros((size, 64), "<i4")  # as block hashes need them
        self._sequences: list[Sequence | None] = [None] * size
        self._free = list(range(size - 1, -1, -1))
        self._serials = 0
        self.service = Service()
        self.departures = self.closing = 0
        self.total_scheduled = 0
        self._row_of: dict[tuple[int, int], int] = {}
        self._tenants: dict[str, int] = {}
        self._active: Index | None = None

    @property
    def used(self) -> int:
        return self.size - len(self._free)

    @property
    def free(self) -> int:
        """Number of rows that a new sequence can have."""
        return len(self._free) - int(self.siblings.sum())

    @property
    def tenants(self) -> int:
        """Number of tenants that have a number."""
        return len(self._tenants)

    def tenant_number(self, tenant: str) -> int:
        """Returns the tenant's number; a new tenant gets the next one."""
        return self._tenants.setdefault(tenant, len(self._tenants))

    def row_of(self, attempt: int, index: int = 0) -> int | None:
        return self._row_of.get((attempt, index))

    def attempts(self) -> list[int]:
        """Returns the attempt of each row in use."""
        return [attempt for attempt, _ in self._row_of]

    def active(self) -> Index:
        """Returns [n] int32, the rows in use by `order`. Cached until a row is added or removed."""
        if self._active is None:
            rows = np.flatnonzero(self.serial)
            self._active = rows[np.argsort(self.order[rows], kind="stable")].astype(np.int32)
        return self._active

    def add(self, sequence: Sequence) -> int:
        """Gives the sequence a free row. Sets all of the row's state, so nothing of an earlier sequence stays."""
        row = self._free.pop()
        request, known = sequence.request, len(sequence.emitted)
        self._serials += 1
        self.serial[row] = self._serials
        self.attempt[row] = sequence.attempt
        self.index[row] = sequence.index
        self.siblings[row] = len(sequence.siblings)
        self.searches[row] = request.beam is not None
        self.bidirectional[row] = request.scope.bidirectional
        self.prompt[row] = len(request.prompt)
        self.emitted[row] = known
        self.length[row] = sequence.length
        self.scheduled[row] = 0
        self.max_length[row] = len(request.prompt) + request.max_tokens
        self._last[row] = request.max_tokens - 1
        self.order[row] = sequence.order
        self.tenant[row] = self.tenant_number(sequence.tenant)
        if not sequence.served:
            self.service.admit(sequence.tenant, int(self.tenant[row]), sequence.length)
            sequence.served = sequence.length
        self.served[row] = sequence.served
        self.last_step[row] = -1
        self.lost[row] = sequence.lost
        self.drafts[row] = 0
        self.closes_at[row] = closes_at = request.closes_at(sequence.submitted)
        self.closing += closes_at < math.inf
        self.may_draft[row] = request.beam is None and request.controls.logits_params == NO_LOGITS_PARAMS
        self._stops = _with_columns(self._stops, len(request.stop_ids), -1)
        self._stops[row] = -1
        self._stops[row, : len(request.stop_ids)] = request.stop_ids
        self._stopping += bool(request.stop_ids)
        self._outputs = _with_columns(self._outputs, known + 1, 0)
        self._outputs[row, :known] = sequence.emitted
        self._sequences[row] = sequence
        self._row_of[sequence.key] = row
        self._active = None
        return row

    def take_siblings(self, row: int) -> list[Sequence]:
        """Returns the sequences that rows were kept free for, up to date with this row. Their chains are to be set."""
        parent = self.sequence(row)
        siblings, parent.siblings, self.siblings[row] = parent.siblings, (), 0
        fresh = replace(parent, chain=None, lost=0, preemptions=0, cause=None)
        return [replace(fresh, index=index, order=parent.order + index - parent.index) for index in siblings]

    def sequence(self, row: int) -> Sequence:
        """Returns the row's sequence with all committed output, as it would be queued again."""
        sequence = self._sequences[row]
        if sequence is None:
            raise LookupError(f"row {row} is free")
        sequence.emitted = self._outputs[row, : self.emitted[row]].copy()
        return sequence

    def preemptions(self, row: int) -> int:
        """Returns how often the row's sequence has lost its row to others, see `Sequence`."""
        sequence = self._sequences[row]
        return 0 if sequence is None else sequence.preemptions

    def hash_pages(self, row: int, computed: int, page_size: int) -> None:
        """Extends the chain of the row's sequence over its full pages below position `computed`."""
        sequence = self._sequences[row]
        if sequence is None or sequence.chain is None:
            return
        hashed = len(sequence.chain.hashes) * page_size
        if computed - hashed >= page_size:
            prompt, outputs = sequence.request.prompt, self._outputs[row]
            start, end = hashed - len(prompt), computed - len(prompt)
            sequence.chain.extend(np.concatenate((prompt[hashed:computed], outputs[max(start, 0) : max(end, 0)])))

    def hash_next(self, rows: Places, full: Index, page_size: int) -> None:
        """Hashes the last full page of each of several rows, whose earlier pages are hashed already.

        A fast path of `hash_pages` for decoding rows. Rows with other pages to hash are left to it.

        Args:
            rows: [n] intp.
            full: [n] int32. Full pages of each row.
            page_size: Tokens of a page.
        """
        for row, pages in zip(rows.tolist(), full.tolist(), strict=True):
            sequence = self._sequences[row]
            if sequence is not None and sequence.chain is not None:
                start, prompt = (pages - 1) * page_size, sequence.request.prompt
                first = start - len(prompt)  # of the page, in the output
                content: bytes = self._outputs[row, max(first, 0) : max(first + page_size, 0)].tobytes()
                if first < 0:
                    content = prompt[start : start + page_size].astype("<i4").tobytes() + content
                sequence.chain.extend_by_page(pages - 1, content)

    def remove(self, row: int) -> None:
        sequence = self._sequences[row]
        if sequence is None:
            raise LookupError(f"row {row} is free")
        del self._row_of[sequence.key]
        self._stopping -= bool(sequence.request.stop_ids)
        sequence.served = int(self.prompt[row] + self.emitted[row])
        self.service.leave(int(self.tenant[row]), sequence.served - int(self.served[row]))
        self.departures += 1
        self.closing -= bool(self.closes_at[row] < math.inf)
        self.closes_at[row] = math.inf
        self.total_scheduled -= int(self.scheduled[row])
        self._sequences[row] = None
        self.serial[row] = self.siblings[row] = 0
        self._free.append(row)
        self._active = None

    def schedule_from(self, row: int, start: int) -> None:
        """Sets the tokens of a row that need not be computed, or whose computation is taken back."""
        self.total_scheduled += start - int(self.scheduled[row])
        self.scheduled[row] = start

    def advance(self, rows: Places, ends: Index, computed: int, step: int) -> None:
        """Moves rows on to where a step computes them.

        Args:
            rows: [n] intp.
            ends: [n] int32. Position after the last one that the step computes.
            computed: Tokens that the step computes of all of them together.
            step: Number of the step.
        """
        self.scheduled[rows], self.last_step[rows] = ends, step
        self.total_scheduled += computed

    def advance_all(self, step: int) -> None:
        """As `advance` for a step that computes one token of every row in use, which draws the next one.

        Free rows move too: `add` sets all of a row's state.
        """
        self._tokens += 1
        self.last_step.fill(step)
        self.total_scheduled += self.used

    def append(
        self, rows: Places, tokens: Index, place: Index | None = None
    ) -> tuple[Index, NDArray[np.bool_], NDArray[np.bool_]]:
        """Commits drawn tokens.

        Args:
            rows: [n] intp. The tokens of one row stand together.
            tokens: [n] int32.
            place: [n] int32. Place of each among the tokens of its row; None where no row has two.

        Returns:
            Each token's output position, and what `ends` returns.
        """
        positions = self.emitted[rows] if place is None else self.emitted[rows] + place
        self._write(rows, positions, tokens)
        self.emitted[rows] = positions + 1  # of a row that stands here twice the last one counts
        return positions, *self.ends(rows, positions, tokens)

    def ends(self, rows: Places, positions: Index, tokens: Index) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns whether each token is a stop token of its row, and whether it is at the last output position."""
        full = positions >= self._last[rows]
        if not self._stopping:
            return np.zeros(len(rows), np.bool_), full
        stops = self._stops.take(rows, axis=0) == tokens[:, None]
        stopped = stops.any(axis=1) if np.count_nonzero(stops) else np.zeros(len(rows), np.bool_)
        return stopped, full

    def settle(self, row: int, computed: int, tokens: Index) -> None:
        """Sets a row's tokens once its drafts are checked.

        Args:
            row: Row.
            computed: Tokens whose KV is right.
            tokens: [n] int32. Draws that count. `append` commits them; they stand in the output from now on, since
                pages are hashed and published before.
        """
        start = self.emitted[row]
        self._write(np.full(len(tokens), row), np.arange(start, start + len(tokens), dtype=np.int32), tokens)
        self.schedule_from(row, computed)
        self.length[row], self.drafts[row] = computed + 1, 0

    def _write(self, rows: Places, positions: Index, tokens: Index) -> None:
        try:
            self._outputs[rows, positions] = tokens
        except IndexError:  # an output longer than any before it: numpy has checked all places before it writes
            self._outputs = _with_columns(self._outputs, int(positions.max()) + 1, 0)
            self._outputs[rows, positions] = tokens


def _with_columns(array: NDArray[np.int32], columns: int, fill: int) -> NDArray[np.int32]:
    """Returns the array, or a wider copy of it with at least `columns` columns."""
    have = array.shape[1]
    if columns <= have:
        return array
    return np.pad(array, ((0, 0), (0, max(columns, 2 * have) - have)), constant_values=fill)
