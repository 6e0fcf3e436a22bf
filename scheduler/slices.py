"""The work of a step as it is planned."""

import numpy as np

from scheduler.rows import Index
from scheduler.settings import SchedulerSettings


class Slices:
    """[n, 3] of row, start, count, under a token budget."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.budget = settings.max_batched_tokens
        self._chunk = settings.chunk
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
