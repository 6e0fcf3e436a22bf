"""Results of steps, for sequences that still have the rows that they had when the step was planned."""

import numpy as np
from numpy.typing import NDArray

from cache_manager.manager import CacheManager
from scheduler.backpressure import Backpressure
from scheduler.drafting import Drafting, places
from scheduler.events import EndReason, Logprobs, NewTokens, PromptPart
from scheduler.in_flight import InFlight
from scheduler.jump_forward import JumpForward
from scheduler.rows import Index, Places
from scheduler.running import Running
from scheduler.step import NO_TOKEN, StepResult


class Results:
    """Takes in one step after the other: faults, pages to publish, tokens, and rounds of searches."""

    def __init__(
        self,
        running: Running,
        cache: CacheManager,
        backpressure: Backpressure,
        drafting: Drafting | None = None,
        jump_forward: JumpForward | None = None,
    ) -> None:
        self.rows, self.cache, self.backpressure = running.rows, cache, backpressure
        self._running, self._attempts, self._drafting = running, running.attempts, drafting
        self._jump_forward = jump_forward
        self._drew: Places | None = None  # rows that drew last, and attempt and index of each
        self._whose: tuple[NDArray[np.int64], Index] = np.empty(0, np.int64), np.empty(0, np.int32)

    def take(self, flown: InFlight, result: StepResult) -> tuple[NewTokens, tuple[PromptPart, ...]]:
        """Returns the step's new tokens, and logprobs of prompts."""
        all_drew = not np.count_nonzero(result.tokens < 0)
        if result.faults or not all_drew:
            self._end_failed(flown, result)
        if self._drafting is not None:
            flown, result = self._drafting.check(flown, result)
        self._publish(flown)
        parts = self._prompt_parts(flown, result) if result.prompt_parts else ()
        return self._drawn(flown, result, all_drew), parts

    def _prompt_parts(self, flown: InFlight, result: StepResult) -> tuple[PromptPart, ...]:
        """Returns the logprobs of prompts whose sequences are still there."""
        parts = [
            PromptPart(int(self.rows.attempt[row]), start, logprobs)
            for row, start, logprobs in result.prompt_parts
            if self._is_same(flown, row)
        ]
        return tuple(parts)

    def _is_same(self, flown: InFlight, row: int) -> bool:
        """Whether a row still has the sequence that it had when the step was planned."""
        return bool(self.rows.serial[row]) and bool(self.rows.serial[row] == flown.serials[row])

    def _end_failed(self, flown: InFlight, result: StepResult) -> None:
        """Ends requests of which a sequence faulted, so that its pages may be wrong, or has no token left to draw."""
        for row, message in result.faults:
            if self._is_same(flown, row):
                self.cache.published.distrust(row)
                self._running.end_attempt(int(self.rows.attempt[row]), EndReason.FAULT, message=message)
        stuck = result.tokens == NO_TOKEN
        for row in flown.drawing[stuck].tolist():
            if self._is_same(flown, row):
                self._running.end_attempt(int(self.rows.attempt[row]), EndReason.STUCK)

    def _publish(self, flown: InFlight) -> None:
        """Publishes pages that the step has filled, before their rows may end, and frees pages behind windows."""
        rows, size, slices = self.rows, self.cache.layout.page_size, flown.slices
        if flown.filling is not None:
            # Legal: all other full pages are published. One that was not, since a step in flight held it, was tried
            # again with the step before the first in lockstep, when no step from before that one was in flight.
            if not len(flown.filling):
                return
            slices = slices.take(flown.filling, axis=0)
        if rows.departures != flown.departures:
            slices = slices[rows.serial[slices[:, 0]] == flown.serials[slices[:, 0]]]
        row, computed = slices[:, 0].astype(np.intp), slices[:, 1] + slices[:, 2]
        full = computed // size
        (filled,) = (full > self.cache.published.count[row]).nonzero()
        if len(filled):
            self._name(row[filled], full[filled])
        self.cache.slide(row, computed)

    def _name(self, filled: Places, full: Index) -> None:
        """Hashes and publishes full pages. filled: [n] rows with unpublished ones. full: [n] full pages of each."""
        rows, size = self.rows, self.cache.layout.page_size
        rows.hash_next(filled, full, size)
        left = self.cache.published.publish_next(filled, full)
        last = int(rows.last_step.max()) if left else -1
        for i in left:
            row, pages = int(filled[i]), int(full[i])
            rows.hash_pages(row, pages * size, size)
            self.cache.published.publish(row, pages * size, last if last > self._running.retired else None)

    def _drawn(self, flown: InFlight, result: StepResult, all_drew: bool) -> NewTokens:
        """Returns new tokens of sequences that are still there, and results of searches that are over now."""
        rows, tokens, logprobs = flown.drawing, result.tokens, result.logprobs
        rows_left = self.rows.departures != flown.departures
        jumps = self._jump_forward is not None and (len(result.jumps) or self._running.sitting_out)
        if all_drew and not self._running.beams and not rows_left and not jumps:
            return self._new(rows, tokens, logprobs)
        valid = tokens >= 0
        if rows_left:  # one that ended or was preempted since it was planned has another serial: its token is dropped
            valid &= self.rows.serial[rows] == flown.serials[rows]
        searches = self.rows.searches[rows]
        taken = np.flatnonzero(valid & ~searches)
        drawn = rows[taken], tokens[taken], logprobs.select(taken)
        if jumps and self._jump_forward is not None:
            drawn = self._jump_forward.take(result.jumps, *drawn)
        new = self._new(*drawn, several=bool(jumps))
        offers = np.flatnonzero(valid & searches)
        for i in offers.tolist():
            row = flown.drawing[i]
            search = self._running.beams[int(self.rows.attempt[row])]
            search.offer(int(self.rows.index[row]), result.logprobs.top_ids[i], result.logprobs.top[i])
        found = self._search_on(np.unique(self.rows.attempt[flown.drawing[offers]]).tolist())
        return NewTokens.joined([new, *found]) if found else new

    def _new(self, rows: Places, tokens: Index, logprobs: Logprobs, several: bool = False) -> NewTokens:
        """Commits drawn tokens and ends rows that drew their last one. several: of a row there may be several."""
        # Legal: rows in lockstep are one and the same array in each step, and the caller has seen that none has left.
        if rows is not self._drew:
            self._drew, self._whose = rows, (self.rows.attempt[rows], self.rows.index[rows])
        attempts, indices = self._whose
        place = places(rows) if several or self._drafting is not None else None
        positions, stopped, full = self.rows.append(rows, tokens, place)
        for i in (stopped | full).nonzero()[0].tolist():
            self.backpressure.observe_output(int(positions[i]) + 1, self.rows.sequence(int(rows[i])).request)
            attempt, index = int(self.rows.attempt[rows[i]]), int(self.rows.index[rows[i]])
            self._running.drop(int(rows[i]))
            if stopped[i]:
                self._attempts.end(attempt, index, EndReason.STOP, stop_token_id=int(tokens[i]))
            else:
                self._attempts.end(attempt, index, EndReason.LENGTH)
        return NewTokens(attempts, indices, positions, tokens, logprobs)

    def _search_on(self, attempts: list[int]) -> list[NewTokens]:
        """Advances searches whose hypotheses have all offered. Returns the results of those that are over."""
        results = []
        for attempt in attempts:
            search = self._running.beams[attempt]
            if search.is_ready:
                self._running.advance(attempt)
            if search.is_over:
                if len(search.finished) < search.count:
                    message = f"the search found {len(search.finished)} outputs, sequence_count is {search.count}"
                    self._running.end_attempt(attempt, EndReason.STUCK, message=message)
                    continue
                del self._running.beams[attempt]
                results.append(search.result(attempt))
                for index, found in enumerate(search.finished):
                    self.backpressure.observe_output(found.last.length)
                    if found.stopped:
                        self._attempts.end(attempt, index, EndReason.STOP, stop_token_id=found.last.token)
                    else:
                        self._attempts.end(attempt, index, EndReason.LENGTH)
        return results
