"""Time that constrained outputs have left, in tokens, so that the executor closes them before it is over.

The executor closes an output within a number of tokens (`model.structured.closing`). A request with a deadline has
fewer than its `max_tokens` where steps are slow. A row draws a token a step, so its time divided by that of a step is
what it has. It is told near its end: of more tokens nothing would be closed yet.
"""

from collections import deque
from statistics import median

import numpy as np

from scheduler.rows import Rows
from scheduler.step import NO_CLOSING, Ints

WITHIN = 1024  # tokens; with more left a row is not told
PART = 0.9  # of the time, which is planned for: steps may become longer
MARGIN = 2  # steps, for the way to the client
FEWER, FEWER_PART = 4, 16  # tokens, or a part of those left: a row that has fewer by more is told again
MORE_PART = 4  # of those that it had left when it was told: one that has more by more is told again
STEPS = 15  # whose median counts: a kernel that is compiled, an image or a pause of the machine says nothing of others


class ClosingTime:
    """Says how many tokens the rows of one engine have time for."""

    def __init__(self, rows: Rows, steps_in_flight: int = 1) -> None:
        """Makes it without steps.

        Args:
            rows: Batch rows.
            steps_in_flight: A search has a token in one of so many steps, as it waits for the draws of its hypotheses.
        """
        self._rows, self._steps_in_flight = rows, steps_in_flight
        self._last = deque[float](maxlen=STEPS)
        self._told: dict[int, tuple[int, int, int]] = {}  # by row: its serial, tokens of its output, those it had left

    def observe(self, seconds: float) -> None:
        """Learns from a step that drew tokens."""
        self._last.append(seconds)

    def take(self, now: float) -> Ints:
        """Returns what the next plan tells the executor, as `StepPlan.closing`. now: seconds on the engine's clock."""
        rows = self._rows
        if len(self._last) < STEPS or not rows.closing:
            return NO_CLOSING
        seconds, told = median(self._last), list[tuple[int, int]]()
        for row in np.flatnonzero(rows.closes_at < now + WITHIN * seconds / PART).tolist():
            steps = PART * (float(rows.closes_at[row]) - now) / seconds - MARGIN if seconds else WITHIN
            left = max(1, int(steps / self._steps_in_flight if rows.searches[row] else steps))
            serial, most = int(rows.serial[row]), int(rows.emitted[row]) + left
            if self._is_news(row, serial, most, left):
                self._told[row] = serial, most, left
                told.append((row, most))
        return np.array(told, np.int32).reshape(-1, 2)

    def _is_news(self, row: int, serial: int, most: int, left: int) -> bool:
        """Returns whether a row has to be told. most: tokens of its output. left: those that it has left."""
        if (last := self._told.get(row)) is None or last[0] != serial:
            return True
        # What is kept back comes free as time goes by; the second bound is above that.
        return last[1] - most > min(FEWER, left // FEWER_PART) or most - last[1] > last[2] // MORE_PART
