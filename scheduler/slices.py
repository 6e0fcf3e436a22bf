"""Work of a step while it is planned."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scheduler.rows import Index
from scheduler.settings import SchedulerSettings
from scheduler.step_time import Pace


@dataclass(slots=True, eq=False)
class Wanted:
    """Running rows that have tokens to compute, in the policy's order.

    Attributes:
        rows: [n] int32.
        starts: [n] int32. First position to compute.
        need: [n] int32. Tokens to compute.
        covered: [n] bool. Whether the row has pages for them; None where all have.
    """

    rows: Index
    starts: Index
    need: Index
    covered: NDArray[np.bool_] | None = None


class Slices:
    """Slices of a step, [n, 3] int32 of row, start, count, under a token budget."""

    def __init__(self, settings: SchedulerSettings, pace: Pace | None = None) -> None:
        """pace: Bounds prefill in time too."""
        self.budget = settings.step_tokens
        self._chunk, self._pace = settings.chunk, pace
        self._parts: list[Index] = []

    def decodes(self, rows: Index, starts: Index) -> None:
        """Adds one token of each row. Settings see to it that there are never more rows than budget."""
        part = np.empty((len(rows), 3), np.int32)
        part[:, 0], part[:, 1], part[:, 2] = rows, starts, 1
        self._parts.append(part)
        self.budget -= len(rows)
        if self._pace is not None:
            self._pace.decodes(len(rows), float(starts.sum()) + len(rows))

    def fits(self, start: int, bidirectional: int) -> bool:
        """Whether a prompt can go on at `start` without cutting its bidirectional prefix, which no pace bounds."""
        if self._pace is not None and bidirectional <= start and self._pace.most(start) < 1:
            return False
        return min(self.budget, self._chunk) >= max(1, bidirectional - start)

    def prefill(self, row: int, start: int, need: int, bidirectional: int = 0) -> None:
        """Adds as many of `need` tokens as chunk and budget allow, none where that cuts the bidirectional prefix."""
        count = min(need, self.budget, self._chunk)
        if not self.fits(start, bidirectional):
            return
        if self._pace is not None:
            wanted, count = count, min(count, max(self._pace.most(start), bidirectional - start))
            self._pace.taken(start, count)
            if count < wanted:
                self.budget = count  # others would make the step longer still
        self._parts.append(np.array([[row, start, count]], np.int32))
        self.budget -= count

    def several(self, row: int, start: int, need: int) -> None:
        """Adds tokens of a row that decodes: its last one with drafts or a jump, as far as chunk and budget go."""
        if count := min(need, self.budget, self._chunk):
            self._parts.append(np.array([[row, start, count]], np.int32))
            self.budget -= count
            if self._pace is not None:
                self._pace.several(start, count)

    def array(self) -> Index:
        return self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
