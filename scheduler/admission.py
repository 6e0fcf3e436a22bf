"""Admission: waiting sequences get rows, in the policy's order, while rows, budget and pages last."""

from dataclasses import dataclass

import numpy as np

from cache_manager.block_hash import BlockHasher
from cache_manager.manager import CacheManager
from cache_manager.matching import NO_MATCH, Match
from scheduler.counters import Counters
from scheduler.events import Start
from scheduler.page_forecast import PageForecast
from scheduler.policy import SchedulingPolicy
from scheduler.preemption_cause import PreemptionCause
from scheduler.rows import Index, Sequence
from scheduler.running import Running
from scheduler.settings import SchedulerSettings
from scheduler.slices import Slices
from scheduler.step import transfer_bytes

TRANSFER_BYTES = 2**25  # bytes of KV transfers in a step: more would hold up the other rows
MOST_PASSED = 8  # sequences without room that others may pass in a step: each costs a look-up of its prefix


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Rows and pages that a waiting sequence lacks."""

    rows: int
    pages: int

    def less(self, rows: int, pages: int) -> "Shortfall":
        """Returns what is lacking once so many come free."""
        return Shortfall(max(0, self.rows - rows), max(0, self.pages - pages))


class Admission:
    """Takes sequences out of the waiting queue.

    Writes `isolated_steps`, `awaited`, `blocked` and `chain` of waiting sequences.

    Attributes:
        isolated: Attempt that runs without others, or did in the last step.
        made_way_for: Key of the last sequence that running ones were preempted for; None for none. Their room is its
            own, whatever is expected of the others: it is admitted without a forecast.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        running: Running,
        cache: CacheManager,
        hasher: BlockHasher | None,
        counters: Counters,
        policy: SchedulingPolicy,
        forecast: PageForecast,
    ) -> None:
        """Makes the admission of a scheduler; `hasher` None goes without a prefix cache."""
        self._settings, self._policy, self._counters = settings, policy, counters
        self._running, self._rows, self._queue = running, running.rows, running.queue
        self._cache, self._hasher, self._forecast = cache, hasher, forecast
        self.isolated: int | None = None
        self.made_way_for: tuple[int, int] | None = None
        self._until = 0  # the step until which it is
        self._started: list[tuple[int, float, int]] = []  # attempt, when, cached prompt tokens: not reported yet

    def is_isolated(self, step: int) -> bool:
        """Whether one attempt runs without others."""
        return self.isolated is not None and self.isolated in self._running.attempts and step < self._until

    @property
    def has_news(self) -> bool:
        """`take_starts` would return some."""
        return bool(self._started)

    def take_starts(self, now: float) -> tuple[Start, ...]:
        """Returns attempts that got their first row since the last call, with their ages at `now`."""
        if not self._started:
            return ()
        started, self._started = self._started, []
        return tuple(Start(attempt, now - moment, cached) for attempt, moment, cached in started)

    def admit(self, now: float, step: int, slices: Slices) -> None:
        """Admits sequences while rows, budget and pages for the whole of the next one last, also those of its output.

        Skips a sequence whose next prefix page is being computed by a running row. It waits no longer than it would
        take to compute the page, since that row is served first. A sequence that lacks rows or pages is passed where
        the policy lets it.
        """
        if self.isolated is not None and not self.is_isolated(step):
            for sequence in self._queue.in_order():
                sequence.isolated_steps *= sequence.attempt != self.isolated
            self.isolated = None
        if not self._rows.free and not self._running.idle():
            return  # most steps under load end here: the order need not be found out
        passed = 0
        for sequence in self._policy.waiting(self._queue, self._rows, now):
            if not slices.budget:
                return
            if self.isolated is not None and sequence.attempt != self.isolated:
                continue
            if sequence.attempt in self._running.held:
                continue  # it holds up nothing: its room may go to those behind it
            match = self._room_for(sequence, slices, now)
            if match is not None:
                row, tokens = self._start(now, step, sequence, match), match.tokens
                slices.prefill(row, tokens, sequence.length - tokens, sequence.request.scope.bidirectional)
            elif sequence.awaited is None:
                passed += 1
                if passed > MOST_PASSED or sequence.isolated_steps or self._policy.holds_the_line(sequence, now):
                    return

    def next_in_line(self, now: float, step: int) -> tuple[Sequence, Match] | None:
        """Returns the sequence that `admit` tries first, and its cached prefix.

        None where there is none, where an attempt runs isolated or is to, and where a suspended hypothesis makes room.
        """
        if self.is_isolated(step):
            return None
        for sequence in self._policy.waiting(self._queue, self._rows, now):
            if sequence.attempt in self._running.held:
                continue
            if sequence.awaited is not None and self._cache.published.is_computing(sequence.awaited):
                continue
            match = self._match(sequence)
            if match.awaited is None:
                return None if sequence.isolated_steps or len(self._suspendable(sequence)) else (sequence, match)
        return None

    def lacking(self, sequence: Sequence, match: Match) -> Shortfall:
        """Returns what a sequence lacks beside what is free, or comes back from steps in flight."""
        free = self._cache.pool.free + self._cache.pool.returning - self._spare()
        needed = self._cache.needed(match, sequence.length)
        return Shortfall(1 + len(sequence.siblings), needed).less(self._rows.free, free)

    def _room_for(self, sequence: Sequence, slices: Slices, now: float) -> Match | None:
        """Returns the prefix that a sequence goes on from, where it can be admitted now.

        None where it lacks budget, with `sequence.awaited` set where it waits for a page, and with `sequence.blocked`
        set where it lacks rows or pages.
        """
        if not self._free_rows(sequence):
            sequence.awaited = None
            self._note_blocked(sequence, now)
            return None
        if sequence.isolated_steps and self.isolated is None and not self._no_rows():
            sequence.awaited = None
            return None
        if sequence.awaited is not None and self._cache.published.is_computing(sequence.awaited):
            return None
        match = self._match(sequence)
        sequence.awaited = match.awaited
        if match.awaited is not None or not slices.fits(match.tokens, sequence.request.scope.bidirectional):
            return None
        while self._cache.pool.free - self._spare() < self._cache.needed(match, sequence.length):
            if not self._suspend_for(sequence):
                self._note_blocked(sequence, now)
                return None
        if self._heeds_forecast(sequence, now) and not self._forecast.leaves_room(sequence, match):
            self._note_blocked(sequence, now)
            return None
        if match.transferred and transfer_bytes(self._running.joins) > TRANSFER_BYTES:
            return None
        return match

    def _heeds_forecast(self, sequence: Sequence, now: float) -> bool:
        """Whether a sequence that fits waits where pages are expected to lack later.

        Not where a waiting sequence may preempt running ones: these give way to it, and it need not wait for their
        pages.
        """
        return sequence.key != self.made_way_for and not self._policy.wants_room(self._queue, self._rows, now)

    def _note_blocked(self, sequence: Sequence, now: float) -> None:
        """Notes since when a sequence lacks rows or pages at its turn."""
        if sequence.blocked is None:
            sequence.blocked = now

    def _no_rows(self) -> bool:
        """Whether all rows are free, as an isolated sequence needs them.

        Suspends hypotheses that wait in rows for others queued behind the sequence: these would wait for ever.
        """
        for row in self._running.idle():
            self._running.preempt(row, PreemptionCause.SEARCH)
        return not self._rows.used

    def _free_rows(self, sequence: Sequence) -> bool:
        """Whether there are rows for the sequence and those that go on from its prompt."""
        while self._rows.free <= len(sequence.siblings):
            if not self._suspend_for(sequence):
                return False
        return True

    def _suspend_for(self, sequence: Sequence) -> bool:
        """Suspends a hypothesis that waits in its row for others, where the sequence goes before it.

        Without this, suspended hypotheses could hold for ever what a sequence needs that they wait for.
        """
        idle = self._suspendable(sequence)
        if len(idle):
            self._running.preempt(int(idle[np.argmax(self._rows.order[idle])]), PreemptionCause.SEARCH)
        return bool(len(idle))

    def _suspendable(self, sequence: Sequence) -> Index:
        """Returns the rows of hypotheses that wait for others and that the sequence goes before."""
        idle = np.array(self._running.idle(), np.int32)
        return idle[self._policy.goes_before(sequence, self._rows, idle)]

    def _spare(self) -> int:
        """Pages that stay free for running rows when another sequence is admitted, which else would be the next victim.

        Those of all rows in use, and of one recurrent state.
        """
        return self.spare(self._rows.active()) + self._cache.layout.states.pages

    def spare(self, those: Index) -> int:
        """Pages that stay free for these rows.

        One for each row and layer group, also for sequences that are to go on from a running prompt, and what windows
        and states will take on for prompts.
        """
        rows = len(those) + int(self._rows.siblings[those].sum())
        more = self._cache.pages_still_to_take(those, self._rows.length[those])
        return rows * len(self._cache.layout.groups) + more

    def _match(self, sequence: Sequence) -> Match:
        if self._hasher is None:
            return NO_MATCH
        if sequence.chain is None:
            sequence.chain = self._hasher.chain(sequence.request.scope)
        named = len(sequence.chain.hashes) * self._cache.layout.page_size
        if sequence.length - named >= self._cache.layout.page_size:
            sequence.chain.extend(sequence.tokens()[named:])
        if sequence.request.controls.prompt_logprobs:
            return NO_MATCH
        # The last token's logits are needed.
        return self._cache.lookup.match(sequence.chain, sequence.length - 1, sequence.transferred)

    def _start(self, now: float, step: int, sequence: Sequence, match: Match) -> int:
        row = self._running.start(sequence, match)
        if sequence.key == self.made_way_for:
            self.made_way_for = None
        if sequence.isolated_steps and self.isolated is None:
            prefill = -(-(sequence.length - match.tokens) // self._settings.chunk)
            self.isolated, self._until = sequence.attempt, step + prefill + sequence.isolated_steps
        sequence.isolated_steps = 0  # after a preemption it comes back as an ordinary one
        if sequence.preempted:
            return row
        self._running.serve(sequence.attempt)
        cached = min(match.tokens, len(sequence.request.prompt))
        self._started.append((sequence.attempt, now, cached))
        if sequence.chain is not None and not sequence.request.controls.prompt_logprobs:
            self._counters.queries += sequence.length
            self._counters.hits += match.tokens - len(match.transferred) * self._cache.layout.page_size
        return row
