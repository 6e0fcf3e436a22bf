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

    def fits(self, start: int, whole: int) -> bool:
        """Whether a prompt can go on at this position, of which so many tokens cannot be divided."""
        return min(self.budget, self._chunk) >= max(1, whole - start)

    def prefill(self, row: int, start: int, need: int, whole: int = 0) -> None:
        """As much of `need` tokens as chunk and budget allow; nothing where that divides what cannot be divided."""
        count = min(need, self.budget, self._chunk)
        if self.fits(start, whole):
            self._parts.append(np.array([[row, start, count]], np.int32))
            self.budget -= count

    def array(self) -> Index:
        return np.concatenate(self._parts)
