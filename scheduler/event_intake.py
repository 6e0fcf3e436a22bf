"""Takes in events between steps: sequences that begin to wait or are refused, aborts, and an operator's questions."""

import math
from collections.abc import Sequence as Seq

from cache_manager.block_hash import DEFAULT_TENANT
from cache_manager.ledger import page_map
from cache_manager.manager import CacheManager
from scheduler.admission import Admission
from scheduler.backpressure import Backpressure, Refusal
from scheduler.beam import BeamSearch
from scheduler.events import Abort, AdminAnswer, AdminQuery, AdminQuestion, EndReason, Event, Ready, Submit
from scheduler.policy import EARLIER, SchedulingPolicy
from scheduler.queue import QueueLoad
from scheduler.rows import Sequence, sequences_of
from scheduler.running import Running
from scheduler.settings import QueueLimits, SchedulerSettings


class EventIntake:
    """Changes the queue and the rows as events say. Writes the number of arrivals and the answers.

    Args:
        settings: Settings of the scheduler.
        queue_limits: Bounds of the waiting queue.
        cache: Pages, which a submit may lack and a question is about.
        running: Rows and queue that events change.
        admission: Says whether a request runs isolated.
        backpressure: Predicts waits, and refuses what would wait too long.
        policy: Order of sequences.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        queue_limits: QueueLimits,
        cache: CacheManager,
        running: Running,
        admission: Admission,
        backpressure: Backpressure,
        policy: SchedulingPolicy,
    ) -> None:
        self._settings, self._queue_limits, self._cache = settings, queue_limits, cache
        self._running, self._rows, self._queue = running, running.rows, running.queue
        self._attempts, self._admission = running.attempts, admission
        self._backpressure, self._policy = backpressure, policy
        self._arrivals = 0
        self._answers: list[AdminAnswer] = []

    @property
    def has_answers(self) -> bool:
        return bool(self._answers)

    def take_answers(self) -> tuple[AdminAnswer, ...]:
        """Returns the answers since the last call."""
        if not self._answers:
            return ()
        answers, self._answers = tuple(self._answers), []
        return answers

    def take(self, event: Event, now: float) -> None:
        """Takes in an event.

        Args:
            event: The event.
            now: Seconds on the scheduler's clock.
        """
        if isinstance(event, Submit):
            self._submit(event, now)
        elif isinstance(event, Abort):
            self._finish(event)
        elif isinstance(event, Ready):
            self._ready(event)
        else:
            self._answers.append(self._answer(event))

    def expire(self, now: float) -> None:
        """Ends sequences that have waited as long as they may."""
        for sequence in self._queue.expired(now):
            waited = now - sequence.submitted
            message = f"not scheduled within {waited:.1f} s"
            if sequence.attempt in self._running.held:
                message += ": its logits processors were not ready"
            self._running.end_attempt(sequence.attempt, EndReason.QUEUE_TIMEOUT, message=message, retry_after=1.0)

    def _submit(self, event: Submit, now: float) -> None:
        request = event.request
        runs = self._backpressure.predicted_run(request)
        place = self._policy.order(request, self._arrivals + 1, now, runs)
        sequences = sequences_of(event, now, place - (EARLIER if event.again else 0))
        self._arrivals += request.count if request.beam is None else request.beam.width
        self._attempts.open(event.attempt, [i for s in sequences for i in (s.index, *s.siblings) if i < request.count])
        for sequence in sequences:
            # The engine that drew the last token may have died before it reported the end.
            if len(sequence.emitted) and sequence.emitted[-1] in request.stop_ids:
                stop = int(sequence.emitted[-1])
                self._attempts.end(event.attempt, sequence.index, EndReason.STOP, stop_token_id=stop)
            elif len(sequence.emitted) >= request.max_tokens:
                self._attempts.end(event.attempt, sequence.index, EndReason.LENGTH)
        sequences = [s for s in sequences if self._attempts.has(event.attempt, s.index)]
        if not sequences:
            self._attempts.end_all(event.attempt, EndReason.FINISHED)  # none of its sequences was left to run
            return
        longest_wait = math.inf if event.again else self._queue_limits.wait
        if request.queue_timeout is not None:
            longest_wait = min(request.queue_timeout, longest_wait)
        idle = not self._rows.used and not len(self._queue)  # a prediction that is wrong is put right by steps alone
        if not event.again and not idle:
            longest_wait = min(longest_wait, self._policy.patience(request, runs))
        if not event.again and (refusal := self._refusal(sequences, longest_wait)) is not None:
            message, retry_after = refusal.message, refusal.retry_after
            self._attempts.end_all(event.attempt, EndReason.QUEUE_FULL, message=message, retry_after=retry_after)
            return
        search = BeamSearch.of(request)
        if search is not None:
            self._running.beams[event.attempt] = search
        expected = round(self._backpressure.lengths.expected(request))
        for sequence in sequences:
            sequence.expected = expected
            self._running.wait(sequence, now + longest_wait)

    def _refusal(self, sequences: Seq[Sequence], longest_wait: float) -> Refusal | None:
        """Returns why sequences may not queue, None where they may."""
        waiting, tenant, tokens = self.will_wait(), sequences[0].tenant, sum(s.length for s in sequences)
        own, queued = self._queue.load_of(tenant), max(len(self._queue), 1)
        staying = QueueLoad(own.requests * waiting.requests // queued, own.tokens * waiting.requests // queued)
        if tenant != DEFAULT_TENANT and (refusal := self._backpressure.refuse_tenant(staying, tokens)) is not None:
            return refusal
        ahead = self._policy.ahead(self._queue, sequences[0], waiting)
        return self._backpressure.refuse(waiting, ahead, tokens, longest_wait, self._queue.mean_output)

    def will_wait(self) -> QueueLoad:
        """Returns queued requests beyond those for which rows and pages are free at this moment."""
        queued = len(self._queue)
        mean = -(-self._queue.tokens // max(queued, 1))
        startable = min(
            self._rows.free if self._admission.isolated is None else 0,
            self._cache.pool.free // max(1, self._cache.layout.pages_for(mean, self._settings.ahead)),
        )
        waiting = max(0, queued - startable)
        return QueueLoad(waiting, self._queue.tokens * waiting // max(queued, 1))

    def _observe(self, event: Abort) -> None:
        """Learns the lengths of outputs that a client ends, as stop strings do: those that end otherwise are longer."""
        if event.attempt in self._running.beams:
            return
        for index in self._attempts.indices(event.attempt) if event.index is None else [event.index]:
            row = self._rows.row_of(event.attempt, index)
            if row is not None and (drawn := int(self._rows.emitted[row])) > 0:
                self._backpressure.observe_output(drawn, self._rows.sequence(row).request)

    def _finish(self, event: Abort) -> None:
        self._observe(event)
        if event.index is None or event.attempt in self._running.beams:
            self._running.end_attempt(event.attempt, EndReason.FINISHED)
        elif self._attempts.has(event.attempt, event.index):
            self._running.finish(event.attempt, event.index)
            self._attempts.end(event.attempt, event.index, EndReason.FINISHED)

    def _ready(self, event: Ready) -> None:
        if self._running.held.pop(event.attempt, None) is not None and event.fault:
            self._running.end_attempt(event.attempt, EndReason.FAULT, message=event.fault)

    def _answer(self, ask: AdminQuery) -> AdminAnswer:
        if ask.question is AdminQuestion.PAGE_MAP:
            return AdminAnswer(ask.ticket, page_map=page_map(self._cache))
        for sequence in self._queue.in_order():
            sequence.transferred = {}
        return AdminAnswer(ask.ticket, forgotten=self._cache.published.reset())
