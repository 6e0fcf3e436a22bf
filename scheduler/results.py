"""What steps gave, for the sequences that still have the rows which they had when the step was planned."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.manager import CacheManager
from scheduler.admission import Admission
from scheduler.events import EndReason, Logprobs, PromptPart, Tokens
from scheduler.rows import Index
from scheduler.running import Running
from scheduler.step import NO_TOKEN, StepResult


@dataclass(frozen=True, slots=True, eq=False)
class InFlight:
    """A launched step: its slices, which rows draw in it, the serial that every row had then, how many rows had been
    removed by then, and how many pages it swaps.
    """

    step: int
    launched: float
    slices: Index
    drawing: Index
    serials: NDArray[np.int64]
    departures: int
    swapped: int


class Results:
    """Takes in one step after the other: ends, pages to publish, tokens, and what searches have found."""

    def __init__(self, running: Running, cache: CacheManager, admission: Admission) -> None:
        self.rows, self.cache, self.admission = running.rows, cache, admission
        self._running, self._attempts = running, running.attempts

    def take(self, flown: InFlight, result: StepResult) -> tuple[Tokens, tuple[PromptPart, ...]]:
        """The step's new tokens, and logprobs of prompts."""
        self._end_failed(flown, result)
        self._publish(flown)
        # A row that ended or was preempted since it was planned has another serial: its token is dropped.
        parts = tuple(
            PromptPart(int(self.rows.attempt[row]), start, logprobs)
            for row, start, logprobs in result.prompt_parts
            if self._is_same(flown, row)
        )
        return self._drawn(flown, result), parts

    def _is_same(self, flown: InFlight, row: int) -> bool:
        """Whether the sequence that had this row when the step was planned still has it."""
        return bool(self.rows.serial[row]) and bool(self.rows.serial[row] == flown.serials[row])

    def _end_failed(self, flown: InFlight, result: StepResult) -> None:
        """Ends the requests of which a sequence faulted (what it computed may be wrong), or has no token left."""
        for row, message in result.faults:
            if self._is_same(flown, row):
                self.cache.names.distrust(row)
                self._running.end_attempt(int(self.rows.attempt[row]), EndReason.FAULT, message=message)
        stuck = result.tokens == NO_TOKEN
        for row in flown.drawing[stuck].tolist() if np.count_nonzero(stuck) else ():
            if self._is_same(flown, row):
                self._running.end_attempt(int(self.rows.attempt[row]), EndReason.STUCK)

    def _publish(self, flown: InFlight) -> None:
        """Pages that a step has filled are there for others, before their rows may end; those that no later step of
        their rows will see are let go.
        """
        rows, size, slices = self.rows, self.cache.layout.page_size, flown.slices
        if rows.departures != flown.departures:
            slices = slices[rows.serial[slices[:, 0]] == flown.serials[slices[:, 0]]]
        row, start, count = slices.T
        computed = start + count
        full = computed // size
        (filled,) = (full > self.cache.names.named[row]).nonzero()
        if len(filled):
            self._name(row[filled], full[filled])
        self.cache.slide(row, computed)

    def _name(self, filled: Index, full: Index) -> None:
        """Of these rows so many pages are full, and not all are published."""
        rows, size = self.rows, self.cache.layout.page_size
        rows.name_next(filled, full, size)
        left = self.cache.names.publish_next(filled, full)
        last = int(rows.last_step.max()) if left else -1
        for i in left:
            row, pages = int(filled[i]), int(full[i])
            rows.name_pages(row, pages * size, size)
            self.cache.names.publish(row, pages * size, last if last > self._running.retired else None)

    def _drawn(self, flown: InFlight, result: StepResult) -> Tokens:
        """What the step drew for sequences that are still there, and what searches have found that are over now."""
        rows, tokens, logprobs = flown.drawing, result.tokens, result.logprobs
        valid = tokens >= 0
        if rows_left := self.rows.departures != flown.departures:
            valid &= self.rows.serial[rows] == flown.serials[rows]
        if not (self._running.beams or rows_left) and np.count_nonzero(valid) == len(valid):
            return self._new(rows, tokens, logprobs)
        searches = self.rows.searches[rows]
        taken = np.flatnonzero(valid & ~searches)
        new = self._new(rows[taken], tokens[taken], logprobs.select(taken))
        offers = np.flatnonzero(valid & searches)
        for i in offers.tolist():
            row = flown.drawing[i]
            search = self._running.beams[int(self.rows.attempt[row])]
            search.offer(int(self.rows.index[row]), result.logprobs.top_ids[i], result.logprobs.top[i])
        found = self._search_on(np.unique(self.rows.attempt[flown.drawing[offers]]).tolist())
        return Tokens.joined([new, *found]) if found else new

    def _new(self, rows: Index, tokens: Index, logprobs: Logprobs) -> Tokens:
        """Appends what these rows have drawn, and ends those for which it is the last."""
        attempts, indices = self.rows.attempt[rows], self.rows.index[rows]
        positions, stopped, full = self.rows.append(rows, tokens)
        for i in (stopped | full).nonzero()[0].tolist():
            self.admission.observe_output(int(positions[i]) + 1)
            attempt, index = int(self.rows.attempt[rows[i]]), int(self.rows.index[rows[i]])
            self._running.drop(int(rows[i]))
            if stopped[i]:
                self._attempts.end(attempt, index, EndReason.STOP, stop_token_id=int(tokens[i]))
            else:
                self._attempts.end(attempt, index, EndReason.LENGTH)
        return Tokens(attempts, indices, positions, tokens, logprobs)

    def _search_on(self, attempts: list[int]) -> list[Tokens]:
        """What those of these searches have found that are over now."""
        results = []
        for attempt in attempts:
            search = self._running.beams[attempt]
            if search.is_ready:
                self._running.advance(attempt)
            if search.is_over:
                del self._running.beams[attempt]
                results.append(search.result(attempt))
                for index, found in enumerate(search.finished):
                    self.admission.observe_output(found.last.length)
                    if found.stopped:
                        self._attempts.end(attempt, index, EndReason.STOP, stop_token_id=found.last.token)
                    else:
                        self._attempts.end(attempt, index, EndReason.LENGTH)
        return results
