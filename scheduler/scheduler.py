"""Continuous batching: every step mixes decodes with chunked prefill under a token budget.

After Yu et al., Orca, OSDI 2022 (iteration-level scheduling), Kwon et al., PagedAttention, SOSP 2023 (pages, preemption
by recompute) and Agrawal et al., Sarathi-Serve, OSDI 2024 (chunked prefill beside decodes). First come, first served:
decodes go first, then running prefills, then new requests in order; the victim of a preemption is the latest to come,
and it is queued again in front. The oldest running sequence is never a victim, so work always ends.

`schedule` and `commit` are pure: time comes in as an argument, and the same calls give the same plans.
"""

import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager, PageChanges
from scheduler.admission import Admission
from scheduler.events import End, EndReason, EngineStats, Event, Finish, Logprobs, Start, StepOutputs, Submit
from scheduler.queue import Queue
from scheduler.rows import Index, Rows, Sequence
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.step import Join, StepPlan, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A launched step: which rows draw in it, and the serial that every row had then."""

    step: int
    launched: float
    drawing: Index
    serials: NDArray[np.int64]
    tokens: int


class _Slices:
    """The work of a step as it is planned: [n, 3] of row, start, count, under a token budget."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.budget = settings.max_batched_tokens
        self._chunk = settings.prefill_chunk or settings.max_batched_tokens
        self._parts: list[Index] = []

    def decodes(self, rows: Index, starts: Index) -> None:
        """One token of each of these rows; there are never more rows than budget."""
        self._parts.append(np.stack((rows, starts, np.ones_like(rows)), axis=1))
        self.budget -= len(rows)

    def prefill(self, row: int, start: int, need: int) -> None:
        """As much of `need` tokens as chunk and budget allow."""
        count = min(need, self.budget, self._chunk)
        if count:
            self._parts.append(np.array([[row, start, count]], np.int32))
            self.budget -= count

    def array(self) -> Index:
        return np.concatenate(self._parts)


class Scheduler:
    """Plans steps for one engine. pages: size of the pool."""

    def __init__(self, settings: SchedulerSettings, queue_limits: QueueLimits, layout: KVLayout, pages: int) -> None:
        self.settings = settings
        self.queue_limits = queue_limits
        self.cache = CacheManager(layout, pages, settings.max_sequences)
        self.admission = Admission(queue_limits, layout.tokens_in(pages), settings.max_sequences)
        self.rows = Rows(settings.max_sequences)
        self.queue = Queue()
        self._in_flight: deque[_InFlight] = deque()
        self._steps = 0
        self._retired = -1
        self._last_commit = -math.inf
        self._arrivals = 0
        self._computed = 0
        self._recomputed = 0
        self._preemptions = 0
        self._leaves: list[int] = []
        self._starts: list[Start] = []
        self._ends: list[End] = []

    # What the engine's loop asks

    @property
    def has_work(self) -> bool:
        """Something runs, waits, or is in flight."""
        return bool(self.rows.used or len(self.queue) or self._in_flight)

    @property
    def has_news(self) -> bool:
        """`commit` would tell of starts or ends even without a step."""
        return bool(self._ends or self._starts)

    @property
    def untold_ends(self) -> tuple[End, ...]:
        """Ends that the next `commit` will tell."""
        return tuple(self._ends)

    def live_attempts(self) -> list[int]:
        return self.rows.attempts() + self.queue.attempts()

    # Planning

    def schedule(self, now: float, events: Seq[Event]) -> StepPlan | None:
        """The next step, or None where there is nothing to compute. `now`: seconds on a monotonic clock."""
        for event in events:
            if isinstance(event, Submit):
                self._submit(event, now)
            else:
                self._finish(event)
        for sequence in self.queue.expired(now):
            waited = now - sequence.submitted
            message = f"not scheduled within {waited:.1f} s"
            self._ends.append(End(sequence.attempt, EndReason.QUEUE_TIMEOUT, message=message, retry_after=1.0))
        changes, joins = PageChanges(), list[Join]()
        preempted = self._make_room_for_decodes(changes)
        slices = self._running_slices()
        if not preempted:
            self._admit(now, slices, joins, changes)
        work = slices.array()
        return self._plan(now, work, joins, changes) if len(work) else None

    def _submit(self, event: Submit, now: float) -> None:
        request = event.request
        # The replica that drew the last token may have died before its end was told.
        if event.emitted and event.emitted[-1] in request.stop_ids:
            self._ends.append(End(event.attempt, EndReason.STOP, stop_token_id=event.emitted[-1]))
            return
        if len(event.emitted) >= request.max_tokens:
            self._ends.append(End(event.attempt, EndReason.LENGTH))
            return
        longest_wait = (
            self.queue_limits.wait if request.patience is None else min(request.patience, self.queue_limits.wait)
        )
        waiting, tokens = self._will_wait()
        length = len(request.prompt) + len(event.emitted)
        refusal = self.admission.refuse(waiting, tokens, length, longest_wait)
        if refusal is not None:
            reason = EndReason.QUEUE_FULL
            self._ends.append(End(event.attempt, reason, message=refusal.message, retry_after=refusal.retry_after))
            return
        self._arrivals += 1
        sequence = Sequence(event.attempt, request, np.array(event.emitted, np.int32), now, self._arrivals)
        self.queue.push(sequence, now + longest_wait)

    def _will_wait(self) -> tuple[int, int]:
        """Queued requests, and their tokens, beyond those for which rows and pages are free at this moment."""
        queued = len(self.queue)
        needed = self.cache.layout.pages_for(self.queue.tokens)
        startable = min(self.rows.size - self.rows.used, queued * self.cache.free // max(needed, 1))
        waiting = max(0, queued - startable)
        return waiting, self.queue.tokens * waiting // max(queued, 1)

    def _finish(self, event: Finish) -> None:
        row = self.rows.row_of(event.attempt)
        if row is not None:
            self._end_row(row, End(event.attempt, EndReason.FINISHED))
        elif self.queue.remove(event.attempt) is not None:
            self._ends.append(End(event.attempt, EndReason.FINISHED))

    def _make_room_for_decodes(self, changes: PageChanges) -> bool:
        """Gives running rows the pages that this step writes; preempts from the back where they are lacking."""
        rows = self.rows
        active = rows.active()
        ends = rows.scheduled[active] + 1
        wants = ends <= np.minimum(rows.length, rows.goal - 1)[active]
        preempted = False
        for row in active[wants & ~self.cache.covers(active, ends)].tolist():
            while rows.serial[row] and not self.cache.grow(row, int(rows.scheduled[row]) + 1, changes):
                if self.cache.returning:
                    break  # pages come back when the step in flight retires: this row sits out one step
                self._preempt(int(rows.active()[-1]))
                preempted = True
        return preempted

    def _running_slices(self) -> _Slices:
        """Work for the rows that run: decodes first, then prefills in order while the budget lasts."""
        rows, slices = self.rows, _Slices(self.settings)
        active = rows.active()
        start = rows.scheduled[active]
        need = np.minimum(rows.length, rows.goal - 1)[active] - start
        decodes = (need == 1) & self.cache.covers(active, start + 1)
        slices.decodes(active[decodes], start[decodes])
        for i in np.flatnonzero(need > 1).tolist():
            slices.prefill(int(active[i]), int(start[i]), int(need[i]))
        return slices

    def _admit(self, now: float, slices: _Slices, joins: list[Join], changes: PageChanges) -> None:
        """New rows in order, while rows, budget and pages for the whole of the next one last."""
        while slices.budget and self.rows.used < self.rows.size:
            sequence = self.queue.head()
            if sequence is None:
                return
            # One page for each running row stays free: else the newcomer would be the next victim.
            spare = self.rows.used * len(self.cache.layout.groups)
            if self.cache.free - spare < self.cache.layout.pages_for(sequence.length):
                return
            self.queue.remove(sequence.attempt)
            row = self.rows.add(sequence)
            self.cache.open(row)
            self.cache.grow(row, sequence.length, changes)
            joins.append(Join(row, sequence.tokens(), len(sequence.request.prompt), sequence.request.controls))
            if not sequence.preempted:
                self._starts.append(Start(sequence.attempt, now - sequence.submitted))
            slices.prefill(row, 0, sequence.length)

    def _plan(self, now: float, work: Index, joins: list[Join], changes: PageChanges) -> StepPlan:
        rows, step = self.rows, self._steps
        which, counts = work[:, 0], work[:, 2]
        rows.scheduled[which] += counts
        rows.last_step[which] = step
        draws = np.flatnonzero((rows.scheduled[which] == rows.length[which]) & (rows.length[which] < rows.goal[which]))
        drawing = which[draws]
        rows.length[drawing] += 1
        logits = np.stack((np.cumsum(counts)[draws] - 1, drawing), axis=1).astype(np.int32)
        self._in_flight.append(_InFlight(step, now, drawing, rows.serial.copy(), int(counts.sum())))
        self._steps += 1
        leaves, self._leaves = np.array(self._leaves, np.int32), []
        return StepPlan(step, leaves, tuple(joins), changes.array(), work, logits)

    # Results

    def commit(self, result: StepResult | None, now: float) -> StepOutputs:
        """Takes in the oldest step in flight (None: no step ran, there are only starts and ends to tell)."""
        tokens = np.empty(0, np.int32)
        attempts, positions, logprobs = np.empty(0, np.int64), tokens, Logprobs.none()
        took: tuple[float, ...] = ()
        if result is not None:
            flown = self._in_flight.popleft()
            if flown.step != result.step:
                raise RuntimeError(f"step {result.step} was collected, step {flown.step} is the oldest in flight")
            seconds = now - max(flown.launched, self._last_commit)  # with two in flight, a step starts when one ends
            took, self._last_commit = (seconds,), now
            self._computed += flown.tokens
            self.admission.observe_step(flown.tokens, seconds)
            self._retire(result.step)
            for row, message in result.faults:
                self._fault(flown, row, message)
            # A row that ended or was preempted since it was planned has another serial: its token is dropped.
            same = self.rows.serial[flown.drawing] == flown.serials[flown.drawing]
            valid = np.flatnonzero(same & (result.tokens >= 0))
            tokens, logprobs = result.tokens[valid], result.logprobs.select(valid)
            attempts, positions = self._append(flown.drawing[valid], tokens)
        starts, self._starts = tuple(self._starts), []
        ends, self._ends = tuple(self._ends), []
        return StepOutputs(attempts, positions, tokens, logprobs, starts, ends, self.stats(), took)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=self.rows.used,
            waiting=len(self.queue),
            waiting_tokens=self.queue.tokens,
            pages_used=self.cache.total - self.cache.free,
            pages_total=self.cache.total,
            steps=self._retired + 1,
            computed_tokens=self._computed,
            recomputed_tokens=self._recomputed,
            preemptions=self._preemptions,
        )

    def _retire(self, step: int) -> None:
        self._retired = step
        self.cache.retire(step)

    def _append(self, rows: Index, tokens: Index) -> tuple[NDArray[np.int64], Index]:
        attempts = self.rows.attempt[rows]
        positions, stopped, full = self.rows.append(rows, tokens)
        for i in np.flatnonzero(stopped | full).tolist():
            self.admission.observe_output(int(positions[i]) + 1)
            if stopped[i]:
                end = End(int(attempts[i]), EndReason.STOP, stop_token_id=int(tokens[i]))
            else:
                end = End(int(attempts[i]), EndReason.LENGTH)
            self._end_row(int(rows[i]), end)
        return attempts, positions

    def _fault(self, flown: _InFlight, row: int, message: str) -> None:
        """Ends the sequence that had this row when the step was planned, if it still has it."""
        serial = self.rows.serial[row]
        if serial and serial == flown.serials[row]:
            self._end_row(row, End(int(self.rows.attempt[row]), EndReason.FAULT, message=message))

    # Rows that leave

    def _end_row(self, row: int, end: End) -> None:
        self._drop_row(row)
        self._ends.append(end)

    def _preempt(self, row: int) -> None:
        sequence = self.rows.sequence(row)
        sequence.preempted = True
        self._preemptions += 1
        self._recomputed += int(self.rows.scheduled[row])
        self._drop_row(row)
        self.queue.push_front(sequence)

    def _drop_row(self, row: int) -> None:
        last = int(self.rows.last_step[row])
        self.rows.remove(row)
        self.cache.release(row, last if last > self._retired else None)
        self._leaves.append(row)
