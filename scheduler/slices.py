"""The work of a step as it is planned."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import Index
from scheduler.settings import SchedulerSettings


@dataclass(slots=True, eq=False)
class Wanted:
    """Running rows that have tokens to compute, first come first. rows, starts, need: [n] from which position on, and
    how many. covered: [n] whether each has the pages for it; None where all have.
    """

    rows: Index
    starts: Index
    need: Index
    covered: NDArray[np.bool_] | None = None


class Slices:
    """[n, 3] of row, start, count, under a token budget."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.budget = settings.max_batched_tokens
        self._chunk = settings.chunk
        self._parts: list[Index] = []

    def decodes(self, rows: Index, starts: Index) -> None:
        """One token of each of these rows; there are never more rows than budget."""
        part = np.empty((len(rows), 3), np.int32)
        part[:, 0], part[:, 1], part[:, 2] = rows, starts, 1
        self._parts.append(part)
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
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
