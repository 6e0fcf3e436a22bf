"""The waiting queue: first come first, also those who come back, with the time until which each will wait."""

import heapq
import math
from bisect import bisect_left, insort
from typing import NamedTuple

from scheduler.rows import Sequence

Key = tuple[int, int]


def _place(sequence: Sequence) -> tuple[int, Key]:
    return sequence.order, sequence.key


class Load(NamedTuple):
    """So many requests with so many tokens."""

    requests: int = 0
    tokens: int = 0


class Queue:
    """Sequences that wait for a row, by attempt and index. tokens: all of theirs together.

    A list kept in order: who is in it is found in O(log n), and the pointers behind it are moved as one block.
    """

    def __init__(self) -> None:
        self._waiting: dict[Key, Sequence] = {}
        self._line: list[Sequence] = []
        self._deadlines: list[tuple[float, Key]] = []
        self._loads: dict[str, Load] = {}  # by tenant
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> int:
        """That wait."""
        return len(self._loads)

    def load_of(self, tenant: str) -> Load:
        """What waits of this one."""
        return self._loads.get(tenant, Load())

    def _add(self, sequence: Sequence, sign: int) -> None:
        tenant, tokens = sequence.tenant, sign * sequence.length
        self.tokens += tokens
        load = self.load_of(tenant)
        self._loads[tenant] = Load(load.requests + sign, load.tokens + tokens)
        if not self._loads[tenant].requests:
            del self._loads[tenant]

    def attempts(self) -> list[int]:
        """Of each sequence."""
        return [sequence.attempt for sequence in self._line]

    def push(self, sequence: Sequence, deadline: float = math.inf) -> None:
        """In line before all who came later, also where it has been served before; `expired` reports it once `deadline`
        has passed.
        """
        self._waiting[sequence.key] = sequence
        insort(self._line, sequence, key=_place)
        self._add(sequence, 1)
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, sequence.key))

    def get(self, attempt: int, index: int = 0) -> Sequence | None:
        return self._waiting.get((attempt, index))

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        """The heir takes the place of one that waits, and its deadline."""
        deadlines = [deadline for deadline, key in self._deadlines if key == sequence.key]
        self.remove(*sequence.key)
        self.push(heir)
        for deadline in deadlines:
            heapq.heappush(self._deadlines, (deadline, heir.key))

    def in_order(self) -> list[Sequence]:
        return list(self._line)

    def remove(self, attempt: int, index: int = 0) -> Sequence | None:
        sequence = self._waiting.pop((attempt, index), None)
        if sequence is not None:
            del self._line[bisect_left(self._line, _place(sequence), key=_place)]
            self._add(sequence, -1)
        return sequence

    def expired(self, now: float) -> list[Sequence]:
        """Removes and returns the sequences whose deadline has passed."""
        gone = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            sequence = self._waiting.get(key)
            if sequence is not None and not sequence.preempted:
                self.remove(*key)
                gone.append(sequence)
        return gone
