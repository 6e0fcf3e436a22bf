"""Time that constrained outputs have left, in tokens, so that the executor closes them before it is over.

The executor closes an output within a number of tokens (`model.structured.closing`). A request with a deadline has
fewer than its `max_tokens` where steps are slow. A row draws a token a step, so its time divided by that of a step is
what it has. It is told only near its end: of more tokens nothing would be closed yet.
"""

import numpy as np

from scheduler.rows import Rows
from scheduler.step import NO_CLOSING, Ints

WITHIN = 1024  # tokens; with more left a row is not told
PART = 0.9  # of the time, which is planned for: steps may become longer
SLACK = 4  # tokens, by which a row may have fewer than it was told
MEMORY = 0.9  # weight of a step's time against the one after it: about ten steps count


class ClosingTime:
    """Says how many tokens the rows of one engine have time for."""

    def __init__(self, rows: Rows) -> None:
        self._rows, self._seconds = rows, 0.0
        self._told: dict[int, tuple[int, int]] = {}  # by row: its serial, and tokens of its output

    def observe(self, seconds: float) -> None:
        """Learns from a step that drew tokens."""
        self._seconds = MEMORY * self._seconds + (1 - MEMORY) * seconds if self._seconds else seconds

    def take(self, now: float) -> Ints:
        """Returns what the next plan tells the executor, as `StepPlan.closing`. now: seconds on the engine's clock."""
        rows, seconds = self._rows, self._seconds
        if not seconds or not np.count_nonzero(soon := rows.closes_at < now + WITHIN * seconds / PART):
            return NO_CLOSING
        told = list[tuple[int, int]]()
        for row in np.flatnonzero(soon).tolist():
            left = max(1, int(PART * (float(rows.closes_at[row]) - now) / seconds))
            serial, most = int(rows.serial[row]), int(rows.emitted[row]) + left
            if (last := self._told.get(row)) is None or last[0] != serial or most < last[1] - SLACK:
                self._told[row] = serial, most
                told.append((row, most))
        return np.array(told, np.int32).reshape(-1, 2)
