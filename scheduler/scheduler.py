"""Continuous batching: every step mixes decodes with chunked prefill under a token budget.

After Yu et al., Orca, OSDI 2022 (iteration-level scheduling), Kwon et al., PagedAttention, SOSP 2023 (pages, preemption
by recompute) and Agrawal et al., Sarathi-Serve, OSDI 2024 (chunked prefill beside decodes). First come, first served:
decodes go first, then running prefills, then new requests in order; the victim of a preemption is the latest to come,
and it is queued again in front. The oldest running sequence is never a victim, so work always ends.

`schedule` and `commit` are pure: time comes in as an argument, and the same calls give the same plans.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.ledger import audit, page_map
from cache_manager.manager import CacheManager
from cache_manager.matching import NO_MATCH, Match
from cache_manager.page_names import PageNamer
from scheduler.admission import Admission
from scheduler.costs import SwapCost
from scheduler.events import (
    Answer,
    Ask,
    End,
    EndReason,
    EngineStats,
    Event,
    Finish,
    Logprobs,
    PromptPart,
    Question,
    Start,
    StepOutputs,
    Submit,
)
from scheduler.queue import Queue
from scheduler.rows import Index, Rows, Sequence
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.slices import Slices
from scheduler.step import NO_TOKEN, Join, StepPlan, StepResult
from scheduler.tally import Tally

AUDIT_STEPS = 1024  # between two looks at the ledger
SWAP_RETRY_STEPS = 256  # where swapping takes longer than computing anew: between two tries whether it still does

log = logging.getLogger("quire.scheduler")


@dataclass(frozen=True, slots=True, eq=False)
class _InFlight:
    """A launched step: its slices, which rows draw in it, the serial that every row had then, and how many pages it
    swaps.
    """

    step: int
    launched: float
    slices: Index
    drawing: Index
    serials: NDArray[np.int64]
    swapped: int


class Scheduler:
    """Plans steps for one engine, on the pages of `cache`. namer: None goes without a prefix cache."""

    def __init__(
        self,
        settings: SchedulerSettings,
        queue_limits: QueueLimits,
        cache: CacheManager,
        namer: PageNamer | None = None,
    ) -> None:
        self.settings = settings
        self.queue_limits = queue_limits
        self.cache = cache
        self._namer = namer
        layout, pages = cache.layout, cache.pool.total
        self.admission = Admission(queue_limits, layout.tokens_in(pages), settings.max_sequences)
        self.rows = Rows(settings.max_sequences)
        self.queue = Queue()
        self._in_flight: deque[_InFlight] = deque()
        self._steps = 0
        self._retired = -1
        self._swap_cost = SwapCost()
        self._last_commit = -math.inf
        self._arrivals = 0
        self._tally = Tally()
        self._leaves: list[int] = []
        self._starts: list[Start] = []
        self._ends: list[End] = []
        self._answers: list[Answer] = []

    # What the engine's loop asks

    @property
    def has_work(self) -> bool:
        """Something runs, waits, or is in flight."""
        return bool(self.rows.used or len(self.queue) or self._in_flight)

    @property
    def has_news(self) -> bool:
        """`commit` would tell of something even without a step."""
        return bool(self._ends or self._starts or self._answers)

    @property
    def untold_ends(self) -> tuple[End, ...]:
        """Ends that the next `commit` will tell."""
        return tuple(self._ends)

    def stats(self) -> EngineStats:
        return self._tally.stats(self.rows, self.queue, self.cache)

    def live_attempts(self) -> list[int]:
        return self.rows.attempts() + self.queue.attempts()

    # Planning

    def schedule(self, now: float, events: Seq[Event]) -> StepPlan | None:
        """The next step, or None where there is nothing to compute. `now`: seconds on a monotonic clock."""
        self.cache.pool.begin(now, self._steps)
        self.cache.pool.swaps = self.cache.pool.tier is not None and self._swapping_pays()
        for event in events:
            if isinstance(event, Submit):
                self._submit(event, now)
            elif isinstance(event, Finish):
                self._finish(event)
            else:
                self._answers.append(self._answer(event))
        for sequence in self.queue.expired(now):
            waited = now - sequence.submitted
            message = f"not scheduled within {waited:.1f} s"
            self._ends.append(End(sequence.attempt, EndReason.QUEUE_TIMEOUT, message=message, retry_after=1.0))
        joins = list[Join]()
        preempted = self._make_room()
        slices = self._running_slices()
        if not preempted:
            self._admit(now, slices, joins)
        work = slices.array()
        return self._plan(now, work, joins) if len(work) else None

    def _swapping_pays(self) -> bool:
        """Whether pages come from the host sooner than they are computed, as far as is known."""
        layout, page = self.cache.layout, self._swap_cost.page_seconds
        _, token = self.admission.cost.fit()
        if page is None or not token or self._steps % SWAP_RETRY_STEPS == 0:
            return True
        return page * len(layout.groups) < token * layout.page_size

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
        mean = -(-self.queue.tokens // max(queued, 1))
        startable = min(
            self.rows.size - self.rows.used,
            self.cache.pool.free // max(1, self.cache.layout.pages_for(mean, self.settings.ahead)),
        )
        waiting = max(0, queued - startable)
        return waiting, self.queue.tokens * waiting // max(queued, 1)

    def _finish(self, event: Finish) -> None:
        row = self.rows.row_of(event.attempt)
        if row is not None:
            self._end_row(row, End(event.attempt, EndReason.FINISHED))
        elif self.queue.remove(event.attempt) is not None:
            self._ends.append(End(event.attempt, EndReason.FINISHED))

    def _answer(self, ask: Ask) -> Answer:
        if ask.question is Question.PAGE_MAP:
            return Answer(ask.ticket, page_map=page_map(self.cache))
        return Answer(ask.ticket, forgotten=self.cache.reset())

    def _make_room(self) -> bool:
        """Gives running rows the pages that this step writes; preempts from the back where they are lacking."""
        rows, cache = self.rows, self.cache
        active, starts, need = self._wants()
        ends = starts + np.minimum(need, self.settings.chunk)
        lacking = ~cache.covers(active, ends)
        active, ends = active[lacking], ends[lacking]
        if not len(active) or (cache.lack_a_page(active, ends) and cache.grow_by_page(active)):
            return False
        preempted = False
        for row, end in zip(active.tolist(), ends.tolist(), strict=True):
            start = int(rows.scheduled[row])
            while rows.serial[row] and not cache.grow(row, start, end):
                if cache.pool.returning:
                    break  # pages come back when the step in flight retires: this row sits out one step
                self._preempt(int(rows.active()[-1]))
                preempted = True
        return preempted

    def _wants(self) -> tuple[Index, Index, Index]:
        """Rows that have tokens to compute, from which position on, and how many."""
        rows = self.rows
        active = rows.active()
        need = np.minimum(rows.length, rows.goal - 1)[active] - rows.scheduled[active]
        active, need = active[need > 0], need[need > 0]
        return active, rows.scheduled[active], need

    def _running_slices(self) -> Slices:
        """Work for the rows that run: decodes first, then prefills in order while the budget lasts."""
        slices = Slices(self.settings)
        active, starts, need = self._wants()
        covered = self.cache.covers(active, starts + np.minimum(need, self.settings.chunk))
        decodes = covered & (need == 1)
        slices.decodes(active[decodes], starts[decodes])
        for i in np.flatnonzero(covered & (need > 1)).tolist():
            slices.prefill(int(active[i]), int(starts[i]), int(need[i]))
        return slices

    def _admit(self, now: float, slices: Slices, joins: list[Join]) -> None:
        """New rows in order, while rows, budget and pages for the whole of the next one last.

        Who needs a page that a running row computes at this moment is passed over until it has: it takes no longer
        than to compute it here, since that row is served first.
        """
        for sequence in self.queue.in_order():
            if not slices.budget or self.rows.used == self.rows.size:
                return
            if sequence.awaited is not None and self.cache.is_computing(sequence.awaited):
                continue
            match = self._match(sequence)
            sequence.awaited = match.awaited
            if match.awaited is not None:
                continue
            if self.cache.pool.free - self._spare() < self.cache.needed(match, sequence.length):
                return
            self._start(now, sequence, match, joins)
            slices.prefill(joins[-1].row, match.tokens, sequence.length - match.tokens)

    def _spare(self) -> int:
        """Pages that stay free for running rows when another one starts, which else would be the next victim: one for
        each, and what windows will take on for prompts.
        """
        active = self.rows.active()
        return len(active) * len(self.cache.layout.groups) + self.cache.promised(active, self.rows.length[active])

    def _match(self, sequence: Sequence) -> Match:
        if self._namer is None:
            return NO_MATCH
        if sequence.chain is None:
            sequence.chain = self._namer.chain(sequence.request.scope)
        named = len(sequence.chain.names) * self.cache.layout.page_size
        if sequence.length - named >= self.cache.layout.page_size:
            sequence.chain.extend(sequence.tokens()[named:])
        if sequence.request.controls.prompt_logprobs:
            return NO_MATCH
        return self.cache.match(sequence.chain, sequence.length - 1)  # the last token's logits are needed

    def _start(self, now: float, sequence: Sequence, match: Match, joins: list[Join]) -> None:
        """Gives the sequence a row, with pages for all its tokens, of which the match has the first ones."""
        prompt = len(sequence.request.prompt)
        self.queue.remove(sequence.attempt)
        row = self.rows.add(sequence)
        self.cache.open(row, sequence.attempt, sequence.chain, match)
        self.cache.grow(row, match.tokens, sequence.length)
        self.cache.fetch(row, match)
        self.rows.scheduled[row] = match.tokens
        joins.append(Join(row, sequence.tokens(), prompt, sequence.request.controls))
        if sequence.preempted:
            return
        self._starts.append(Start(sequence.attempt, now - sequence.submitted, min(match.tokens, prompt)))
        if sequence.chain is not None and not sequence.request.controls.prompt_logprobs:
            self._tally.queries += sequence.length
            self._tally.hits += match.tokens

    def _plan(self, now: float, work: Index, joins: list[Join]) -> StepPlan:
        rows, step = self.rows, self._steps
        which, starts, counts = work.T
        self._tally.recomputed += int(np.maximum(np.minimum(rows.lost[which], starts + counts) - starts, 0).sum())
        rows.scheduled[which] += counts
        rows.last_step[which] = step
        draws = np.flatnonzero((rows.scheduled[which] == rows.length[which]) & (rows.length[which] < rows.goal[which]))
        drawing = which[draws]
        rows.length[drawing] += 1
        logits = np.stack((np.cumsum(counts)[draws] - 1, drawing), axis=1).astype(np.int32)
        leaves, self._leaves = np.array(self._leaves, np.int32), []
        changes = self.cache.pool.take_changes()
        outs, ins = changes.swap_outs(), changes.swap_ins()
        self._in_flight.append(_InFlight(step, now, work, drawing, rows.serial.copy(), len(outs) + len(ins)))
        self._steps += 1
        self._tally.peak = max(self._tally.peak, self.cache.pool.total - self.cache.pool.free)
        return StepPlan(
            step,
            leaves,
            tuple(joins),
            changes.grown(),
            changes.copies(),
            outs,
            ins,
            changes.freed_pages(),
            work,
            logits,
        )

    # Results

    def commit(self, result: StepResult | None, now: float) -> StepOutputs:
        """Takes in the oldest step in flight (None: no step ran, there are only starts and ends to tell)."""
        tokens = np.empty(0, np.int32)
        attempts, positions, logprobs = np.empty(0, np.int64), tokens, Logprobs.none()
        took: tuple[float, ...] = ()
        parts: tuple[PromptPart, ...] = ()
        if result is not None:
            flown = self._in_flight.popleft()
            if flown.step != result.step:
                raise RuntimeError(f"step {result.step} was collected, step {flown.step} is the oldest in flight")
            seconds = now - max(flown.launched, self._last_commit)  # with two in flight, a step starts when one ends
            took, self._last_commit = (seconds,), now
            computed = int(flown.slices[:, 1 if self.settings.recompute else 2 :].sum())
            self._tally.computed += computed
            self.admission.observe_step(computed, seconds - result.swap_seconds)
            if flown.swapped:
                self._swap_cost.observe(flown.swapped, result.swap_seconds)
            self.cache.pool.begin(now, self._steps)
            self._retire(result.step)
            for row in self.cache.arrived(result.step, result.lost_pages):
                self._preempt(row)  # what it went on from was lost: it computes that
            if result.step % AUDIT_STEPS == 0:
                self._audit()
            for row, message in result.faults:
                self._fault(flown, row, message)
            for row in flown.drawing[result.tokens == NO_TOKEN].tolist():
                self._end_if_same(flown, row, End(int(self.rows.attempt[row]), EndReason.STUCK))
            self._publish(flown)
            # A row that ended or was preempted since it was planned has another serial: its token is dropped.
            parts = tuple(
                PromptPart(int(self.rows.attempt[row]), start, logprobs)
                for row, start, logprobs in result.prompt_parts
                if self.rows.serial[row] and self.rows.serial[row] == flown.serials[row]
            )
            same = self.rows.serial[flown.drawing] == flown.serials[flown.drawing]
            valid = np.flatnonzero(same & (result.tokens >= 0))
            tokens, logprobs = result.tokens[valid], result.logprobs.select(valid)
            attempts, positions = self._append(flown.drawing[valid], tokens)
        starts, self._starts = tuple(self._starts), []
        ends, self._ends = tuple(self._ends), []
        answers, self._answers = tuple(self._answers), []
        return StepOutputs(attempts, positions, tokens, logprobs, starts, ends, self.stats(), took, answers, parts)

    def _retire(self, step: int) -> None:
        self._retired = step
        self._tally.steps = step + 1
        self.cache.pool.retire(step)

    def _publish(self, flown: _InFlight) -> None:
        """Pages that a step has filled are there for others, before their rows may end; those that no later step of
        their rows will see are let go.
        """
        rows, size = self.rows, self.cache.layout.page_size
        row, start, count = flown.slices[rows.serial[flown.slices[:, 0]] == flown.serials[flown.slices[:, 0]]].T
        computed = start + count
        for i in np.flatnonzero(computed // size > self.cache.named[row]).tolist():
            which, last = int(row[i]), int(rows.last_step[row[i]])
            rows.name_pages(which, int(computed[i]), size)
            self.cache.publish(which, int(computed[i]), last if last > self._retired else None)
        self.cache.slide(row, computed)

    def _audit(self) -> None:
        """A wrong page is a bug of ours that must not become anybody's wrong token, nor everybody's outage."""
        wrong = audit(self.cache)
        if wrong:
            log.error("%s. They are set aside; please report this", wrong)

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
        end = End(int(self.rows.attempt[row]), EndReason.FAULT, message=message)
        self._end_if_same(flown, row, end, distrust=True)

    def _end_if_same(self, flown: _InFlight, row: int, end: End, distrust: bool = False) -> None:
        """distrust: what the row computed may be wrong."""
        serial = self.rows.serial[row]
        if serial and serial == flown.serials[row]:
            if distrust:
                self.cache.distrust(row)
            self._end_row(row, end)

    # Rows that leave

    def _end_row(self, row: int, end: End) -> None:
        self._drop_row(row)
        self._ends.append(end)

    def _preempt(self, row: int) -> None:
        sequence = self.rows.sequence(row)
        sequence.preempted = True
        sequence.lost = max(sequence.lost, int(self.rows.scheduled[row]))
        self._tally.preemptions += 1
        self._drop_row(row)
        self.queue.push_front(sequence)

    def _drop_row(self, row: int) -> None:
        last = int(self.rows.last_step[row])
        self.rows.remove(row)
        self.cache.release(row, last if last > self._retired else None)
        self._leaves.append(row)
