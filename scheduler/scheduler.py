"""Continuous batching: every step mixes decodes with chunked prefill under a token budget.

After Yu et al., Orca, OSDI 2022 (iteration-level scheduling), Kwon et al., PagedAttention, SOSP 2023 (pages, preemption
by recompute) and Agrawal et al., Sarathi-Serve, OSDI 2024 (chunked prefill beside decodes). First come, first served,
those with a lower priority before all others:
decodes go first, then running prefills, then new requests in order, those of several tenants by turns; the victim of a
preemption is the latest to come, and it is queued again in front. The oldest running sequence is never a victim, so
work always ends.

`schedule` and `commit` are pure: time comes in as an argument, and the same calls give the same plans.
"""

import logging
import math
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np

from cache_manager.ledger import audit, page_map
from cache_manager.manager import CacheManager
from cache_manager.page_names import DEFAULT_TENANT, PageNamer
from scheduler.admission import Admission, Refusal
from scheduler.beam import BeamSearch
from scheduler.costs import SwapCost
from scheduler.events import (
    SHORT_NAME,
    Answer,
    Ask,
    End,
    EndReason,
    EngineStats,
    Event,
    Finish,
    NameChanges,
    PromptPart,
    Question,
    StepOutputs,
    Submit,
    Tokens,
)
from scheduler.queue import Load
from scheduler.results import InFlight, Results
from scheduler.rows import Index, Sequence, sequences_of
from scheduler.running import Running
from scheduler.settings import QueueLimits, SchedulerSettings
from scheduler.slices import Slices, Wanted
from scheduler.starting import Starting
from scheduler.step import StepPlan, StepResult, fill_bytes
from scheduler.tally import Tally

AUDIT_STEPS = 1024  # between two looks at the ledger
EARLIER = 2**60  # what another engine had taken came before all that came here
PRIORITY_BITS = 44  # below which an order says who came first: 2^44 sequences
SWAP_RETRY_STEPS = 256  # where swapping takes longer than computing anew: between two tries whether it still does

log = logging.getLogger("quire.scheduler")

FILL_RATE = 5e7  # bytes of them a second, at the very least


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
        layout, pages = cache.layout, cache.pool.total
        self.admission = Admission(queue_limits, layout.tokens_in(pages), settings.max_sequences)
        self._tally = Tally()
        self._running = Running(settings.max_sequences, cache, self._tally)
        self.rows, self.queue = self._running.rows, self._running.queue
        self._starting = Starting(settings, self._running, cache, namer, self._tally)
        self._attempts = self._running.attempts
        self._results = Results(self._running, cache, self.admission)
        self._in_flight: deque[InFlight] = deque()
        self._steps = 0
        self._swap_cost = SwapCost()
        self._last_commit = -math.inf
        self._arrivals = 0
        self._answers: list[Answer] = []

    # What the engine's loop asks

    @property
    def has_work(self) -> bool:
        """Something runs, waits, or is in flight."""
        return bool(self.rows.used or len(self.queue) or self._in_flight)

    @property
    def has_news(self) -> bool:
        """`commit` would tell of something even without a step."""
        return bool(self._attempts.ends or self._starting.has_news or self._answers)

    @property
    def untold_ends(self) -> tuple[End, ...]:
        """Ends that the next `commit` will tell."""
        return tuple(self._attempts.ends)

    def stats(self) -> EngineStats:
        seconds = self.admission.predicted_wait(*self._will_wait()) if len(self.queue) else 0.0
        isolated = self._starting.is_isolated(self._steps)
        return self._tally.stats(self.rows, self.queue, self.cache, seconds, isolated)

    def live_attempts(self) -> list[int]:
        return self._attempts.live()

    def expected_seconds(self, plan: StepPlan) -> float | None:
        """How long this step will take, as far as is known; None where no step has run yet, or it encodes images."""
        if any(join.images for join in plan.joins):
            return None
        computing = self.admission.cost.expected(self._computed(plan.slices))
        return None if computing is None else computing + fill_bytes(plan.joins) / FILL_RATE

    def _computed(self, slices: Index) -> int:
        """Tokens that such slices take to compute."""
        return int(slices[:, 1 if self.settings.recompute else 2 :].sum())

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
            self._running.end_attempt(sequence.attempt, EndReason.QUEUE_TIMEOUT, message=message, retry_after=1.0)
        wanted, preempted = self._make_room()
        slices = self._running_slices(wanted)
        if not preempted:
            self._starting.admit(now, self._steps, slices)
        work = slices.array()
        return self._plan(now, work) if len(work) else None

    def _swapping_pays(self) -> bool:
        """Whether pages come from the host sooner than they are computed, as far as is known."""
        layout, page = self.cache.layout, self._swap_cost.page_seconds
        _, token = self.admission.cost.fit()
        if page is None or not token or self._steps % SWAP_RETRY_STEPS == 0:
            return True
        return page * len(layout.groups) < token * layout.page_size

    def _submit(self, event: Submit, now: float) -> None:
        request = event.request
        place = (request.priority << PRIORITY_BITS) + self._arrivals + 1
        sequences = sequences_of(event, now, place - (EARLIER if event.again else 0))
        self._arrivals += request.count if request.beam is None else request.beam.width
        self._attempts.open(event.attempt, [i for s in sequences for i in (s.index, *s.siblings) if i < request.count])
        for sequence in sequences:
            # The replica that drew the last token may have died before its end was told.
            if len(sequence.emitted) and sequence.emitted[-1] in request.stop_ids:
                stop = int(sequence.emitted[-1])
                self._attempts.end(event.attempt, sequence.index, EndReason.STOP, stop_token_id=stop)
            elif len(sequence.emitted) >= request.max_tokens:
                self._attempts.end(event.attempt, sequence.index, EndReason.LENGTH)
        sequences = [s for s in sequences if self._attempts.has(event.attempt, s.index)]
        if not sequences:
            self._attempts.end_all(event.attempt, EndReason.FINISHED)  # where none was to be run
            return
        longest_wait = math.inf if event.again else self.queue_limits.wait
        if request.patience is not None:
            longest_wait = min(request.patience, longest_wait)
        if not event.again and (refusal := self._refusal(sequences, longest_wait)) is not None:
            message, retry_after = refusal.message, refusal.retry_after
            self._attempts.end_all(event.attempt, EndReason.QUEUE_FULL, message=message, retry_after=retry_after)
            return
        search = BeamSearch.of(request)
        if search is not None:
            self._running.beams[event.attempt] = search
        for sequence in sequences:
            self.queue.push(sequence, now + longest_wait)

    def _refusal(self, sequences: Seq[Sequence], longest_wait: float) -> Refusal | None:
        """Why these may not queue, None if they may."""
        waiting, tenant, tokens = self._will_wait(), sequences[0].tenant, sum(s.length for s in sequences)
        own, queued = self.queue.load_of(tenant), max(len(self.queue), 1)
        staying = Load(own.requests * waiting.requests // queued, own.tokens * waiting.requests // queued)
        if tenant != DEFAULT_TENANT and (refusal := self.admission.refuse_tenant(staying, tokens)) is not None:
            return refusal
        turns = self.queue.tenants + (not own.requests)  # tenants that start by turns
        before = Load(min(waiting.requests, own.requests * turns), min(waiting.tokens, own.tokens * turns))
        return self.admission.refuse(waiting, waiting if turns == 1 else before, tokens, longest_wait)

    def _will_wait(self) -> Load:
        """Queued requests, and their tokens, beyond those for which rows and pages are free at this moment."""
        queued = len(self.queue)
        mean = -(-self.queue.tokens // max(queued, 1))
        startable = min(
            self.rows.free if self._starting.alone is None else 0,
            self.cache.pool.free // max(1, self.cache.layout.pages_for(mean, self.settings.ahead)),
        )
        waiting = max(0, queued - startable)
        return Load(waiting, self.queue.tokens * waiting // max(queued, 1))

    def _finish(self, event: Finish) -> None:
        if event.index is None or event.attempt in self._running.beams:
            self._running.end_attempt(event.attempt, EndReason.FINISHED)
        elif self._attempts.has(event.attempt, event.index):
            self._running.finish(event.attempt, event.index)
            self._attempts.end(event.attempt, event.index, EndReason.FINISHED)

    def _answer(self, ask: Ask) -> Answer:
        if ask.question is Question.PAGE_MAP:
            return Answer(ask.ticket, page_map=page_map(self.cache))
        for sequence in self.queue.in_order():
            sequence.brought = {}
        return Answer(ask.ticket, forgotten=self.cache.names.reset())

    def _make_room(self) -> tuple[Wanted, bool]:
        """Gives running rows the pages that this step writes; preempts from the back where they are lacking. Returns
        what there is to compute then, and whether a row was preempted.
        """
        rows, cache, wanted = self.rows, self.cache, self._wanted()
        ends = wanted.starts + np.minimum(wanted.need, self.settings.chunk)
        covered = cache.covers(wanted.rows, ends)
        (lacking,) = (~covered).nonzero()
        if not len(lacking):
            return wanted, False
        active, ends = wanted.rows[lacking], ends[lacking]
        if cache.lack_a_page(active, ends) and cache.grow_by_page(active):
            return wanted, False
        preempted = False
        for row, end in zip(active.tolist(), ends.tolist(), strict=True):
            start = int(rows.scheduled[row])
            while rows.serial[row] and not cache.grow(row, start, end):
                if cache.pool.returning:
                    break  # pages come back when the step in flight retires: this row sits out one step
                self._running.preempt(max(self._running.idle(), key=rows.order.item, default=int(rows.active()[-1])))
                preempted = True
        wanted = self._wanted()
        ends = wanted.starts + np.minimum(wanted.need, self.settings.chunk)
        wanted.covered = cache.covers(wanted.rows, ends)
        return wanted, preempted

    def _wanted(self) -> Wanted:
        rows = self.rows
        active = rows.active()
        starts = rows.scheduled[active]
        need = np.minimum(rows.length[active], rows.goal[active] - 1) - starts
        some = need > 0
        if np.count_nonzero(some) < len(need):
            active, starts, need = active[some], starts[some], need[some]
        return Wanted(active, starts, need)

    def _running_slices(self, wanted: Wanted) -> Slices:
        """Work for the rows that run: decodes first, then prefills in order while the budget lasts."""
        slices, active, starts, need = Slices(self.settings), wanted.rows, wanted.starts, wanted.need
        if wanted.covered is None and not np.count_nonzero(need != 1):
            slices.decodes(active, starts)
            return slices
        covered = True if wanted.covered is None else wanted.covered
        decodes = covered & (need == 1)
        slices.decodes(active[decodes], starts[decodes])
        for i in np.flatnonzero(covered & (need > 1)).tolist():
            row = int(active[i])
            slices.prefill(row, int(starts[i]), int(need[i]), int(self.rows.whole[row]))
        return slices

    def _plan(self, now: float, work: Index) -> StepPlan:
        rows, step, running = self.rows, self._steps, self._running
        which, starts, counts = work.T
        ends, length, lost = starts + counts, rows.length[which], rows.lost[which]
        if np.count_nonzero(lost):
            self._tally.recomputed += int(np.maximum(np.minimum(lost, ends) - starts, 0).sum())
        rows.scheduled[which] = ends
        rows.last_step[which] = step
        (draws,) = ((ends == length) & (length < rows.goal[which])).nonzero()
        logits = np.empty((len(draws), 2), np.int32)
        logits[:, 0], logits[:, 1] = np.cumsum(counts)[draws] - 1, which[draws]
        logits = self._forked(logits)
        drawing = logits[:, 1]
        rows.length[drawing[~rows.searches[drawing]] if running.beams else drawing] += 1
        leaves, running.leaves = np.array(running.leaves, np.int32), []
        joins, running.joins = tuple(running.joins), []
        filled = sum(len(join.fill.pages) for join in joins if join.fill is not None)
        changes = self.cache.pool.take_changes()
        outs, ins = changes.swap_outs(), changes.swap_ins()
        self._in_flight.append(
            InFlight(step, now, work, drawing, rows.serial.copy(), rows.departures, len(outs) + len(ins) + filled)
        )
        self._steps += 1
        self._tally.peak = max(self._tally.peak, self.cache.pool.total - self.cache.pool.free)
        return StepPlan(
            step,
            leaves,
            joins,
            changes.grown(),
            changes.copies(),
            outs,
            ins,
            changes.freed_pages(),
            work,
            logits,
            running.take_given(),
        )

    def _forked(self, logits: Index) -> Index:
        """[n, 2] as in the plan. Rows of these that have computed a prompt for others too: each of those gets a row,
        and draws from the same logits.
        """
        rows, draws = self.rows, list[tuple[int, int]]()
        if not np.count_nonzero(rows.siblings):
            return logits
        forked = (rows.siblings[logits[:, 1]] > 0) & ~rows.searches[logits[:, 1]]
        for offset, row in logits[forked].tolist():
            draws += [(offset, self._running.fork(row, sibling)) for sibling in rows.take_siblings(row)]
        return np.concatenate((logits, np.array(draws, np.int32).reshape(-1, 2)))

    # Results

    def commit(self, result: StepResult | None, now: float) -> StepOutputs:
        """Takes in the oldest step in flight (None: no step ran, there are only starts and ends to tell)."""
        new, parts, took = Tokens.none(), tuple[PromptPart, ...](), tuple[float, ...]()
        if result is not None:
            flown = self._in_flight.popleft()
            if flown.step != result.step:
                raise RuntimeError(f"step {result.step} was collected, step {flown.step} is the oldest in flight")
            seconds = now - max(flown.launched, self._last_commit)  # with two in flight, a step starts when one ends
            took, self._last_commit = (seconds,), now
            self._observe(flown, result, seconds)
            self.cache.pool.begin(now, self._steps)
            self._retire(result.step)
            for row in self.cache.arrived(result.step, result.lost_pages):
                self._running.preempt(row)  # what it went on from was lost: it computes that
            if result.step % AUDIT_STEPS == 0:
                self._audit()
            new, parts = self._results.take(flown, result)
        answers, self._answers = tuple(self._answers), []
        ends, stats = self._attempts.take_ends(), self.stats()
        return StepOutputs(
            new.attempts,
            new.indices,
            new.positions,
            new.tokens,
            new.logprobs,
            self._starting.take_starts(now),
            ends,
            stats,
            took,
            answers,
            parts,
            names=self._name_changes(),
        )

    def _name_changes(self) -> tuple[NameChanges, ...]:
        log = self.cache.prefix.index.log
        if log is None:
            return ()
        removed, added = (b"".join(name[:SHORT_NAME] for name in names) for names in log.take())
        return (NameChanges(removed, added),) if removed or added else ()

    def _observe(self, flown: InFlight, result: StepResult, seconds: float) -> None:
        computed = self._computed(flown.slices)
        self._tally.computed += computed
        self._tally.images_encoded += result.images_encoded
        self.admission.observe_step(computed, seconds - result.swap_seconds)
        if flown.swapped:
            self._swap_cost.observe(flown.swapped, result.swap_seconds)

    def _retire(self, step: int) -> None:
        self._running.retired = step
        self._tally.steps = step + 1
        self.cache.pool.retire(step)

    def _audit(self) -> None:
        """A wrong page is a bug of ours that must not become anybody's wrong token, nor everybody's outage."""
        wrong = audit(self.cache)
        if wrong:
            log.error("%s. They are set aside; please report this", wrong)
