"""Who waits gets a row: in order, while rows, budget and pages last."""

from cache_manager.manager import CacheManager
from cache_manager.matching import NO_MATCH, Match
from cache_manager.page_names import PageNamer
from scheduler.events import Start
from scheduler.rows import Sequence
from scheduler.running import Running
from scheduler.settings import SchedulerSettings
from scheduler.shares import Shares
from scheduler.slices import Slices
from scheduler.step import fill_bytes
from scheduler.tally import Tally

FILL_BYTES = 2**25  # of other engines' pages in a step, beyond which no more are taken in: others wait meanwhile


class Starting:
    """namer: None goes without a prefix cache. alone: the attempt that runs alone, or did just now. _started: attempts
    that got their first row and are not reported yet: attempt, when, and its cached prompt tokens.
    """

    def __init__(
        self, settings: SchedulerSettings, running: Running, cache: CacheManager, namer: PageNamer | None, tally: Tally
    ) -> None:
        self._settings, self._running, self._cache, self._namer, self._tally = settings, running, cache, namer, tally
        self._rows, self._queue = running.rows, running.queue
        self._shares = Shares(running.rows, cache.layout.tokens_in(cache.pool.total))
        self.alone: int | None = None
        self._until = 0  # the step until which it does
        self._started: list[tuple[int, float, int]] = []

    def is_isolated(self, step: int) -> bool:
        """One attempt runs alone."""
        return self.alone is not None and self.alone in self._running.attempts and step < self._until

    @property
    def has_news(self) -> bool:
        """`take_starts` would return some."""
        return bool(self._started)

    def take_starts(self, now: float) -> tuple[Start, ...]:
        """Attempts that got their first row since the last call, with their ages at `now`."""
        started, self._started = self._started, []
        return tuple(Start(attempt, now - moment, cached) for attempt, moment, cached in started)

    def admit(self, now: float, step: int, slices: Slices) -> None:
        """New rows in order, while rows, budget and pages for the whole of the next one last.

        Who needs a page that a running row computes at this moment is passed over until it has: it takes no longer
        than to compute it here, since that row is served first. Who is to run alone waits until all rows are free, and
        all others until it no longer has to.
        """
        if self.alone is not None and not self.is_isolated(step):
            for sequence in self._queue.in_order():
                sequence.alone *= sequence.attempt != self.alone
            self.alone = None
        if not self._rows.free and not self._running.idle():
            return  # as most steps do under load: whose turn it is need not be found out
        for sequence in self._shares.in_turn(self._queue):
            if not slices.budget or not self._free_rows(sequence):
                return
            if self.alone is not None and sequence.attempt != self.alone:
                continue
            if sequence.alone and self.alone is None and not self._rows_are_free():
                return
            if sequence.awaited is not None and self._cache.names.is_computing(sequence.awaited):
                continue
            match = self._match(sequence)
            sequence.awaited = match.awaited
            if match.awaited is not None:
                continue
            whole = sequence.request.scope.whole
            if not slices.fits(match.tokens, whole):
                return
            while self._cache.pool.free - self._spare() < self._cache.needed(match, sequence.length):
                if not self._park_for(sequence):
                    return
            if match.brought and fill_bytes(self._running.joins) > FILL_BYTES:
                return
            row = self._start(now, step, sequence, match)
            slices.prefill(row, match.tokens, sequence.length - match.tokens, whole)

    def _rows_are_free(self) -> bool:
        """All of them, for one that is to run alone. Hypotheses that wait in rows for some that are queued behind it
        give theirs away: they would wait for ever.
        """
        for row in self._running.idle():
            self._running.preempt(row)
        return not self._rows.used

    def _free_rows(self, sequence: Sequence) -> bool:
        """Whether there are rows for the sequence and those that go on from its prompt."""
        while self._rows.free <= len(sequence.siblings):
            if not self._park_for(sequence):
                return False
        return True

    def _park_for(self, sequence: Sequence) -> bool:
        """Takes the row of a hypothesis that waits for this sequence of its own search, or came later than it. Without
        this, those that wait could hold for ever what it needs.
        """
        first = sequence.order - sequence.index
        idle = [row for row in self._running.idle() if self._rows.order[row] >= first]
        if idle:
            self._running.preempt(max(idle, key=self._rows.order.item))
        return bool(idle)

    def _spare(self) -> int:
        """Pages that stay free for running rows when another one starts, which else would be the next victim: one for
        each, also of those that are still to come out of a prompt, and what windows will take on for prompts.
        """
        active = self._rows.active()
        rows = len(active) + int(self._rows.siblings.sum())
        return rows * len(self._cache.layout.groups) + self._cache.promised(active, self._rows.length[active])

    def _match(self, sequence: Sequence) -> Match:
        if self._namer is None:
            return NO_MATCH
        if sequence.chain is None:
            sequence.chain = self._namer.chain(sequence.request.scope)
        named = len(sequence.chain.names) * self._cache.layout.page_size
        if sequence.length - named >= self._cache.layout.page_size:
            sequence.chain.extend(sequence.tokens()[named:])
        if sequence.request.controls.prompt_logprobs:
            return NO_MATCH
        # The last token's logits are needed.
        return self._cache.match(sequence.chain, sequence.length - 1, sequence.brought)

    def _start(self, now: float, step: int, sequence: Sequence, match: Match) -> int:
        row = self._running.start(sequence, match)
        if sequence.alone and self.alone is None:
            prefill = -(-(sequence.length - match.tokens) // self._settings.chunk)
            self.alone, self._until = sequence.attempt, step + prefill + sequence.alone
        sequence.alone = 0  # where it is preempted later, it comes back as any other
        if sequence.preempted:
            return row
        self._running.serve(sequence.attempt)
        cached = min(match.tokens, len(sequence.request.prompt))
        self._started.append((sequence.attempt, now, cached))
        if sequence.chain is not None and not sequence.request.controls.prompt_logprobs:
            self._tally.queries += sequence.length
            self._tally.hits += match.tokens - len(match.brought) * self._cache.layout.page_size
        return row
