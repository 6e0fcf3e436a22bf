"""The waiting queue: sequences in order of arrival, with the deadline of each."""

import heapq
import math
from bisect import bisect_left, insort
from typing import NamedTuple

from scheduler.rows import Sequence

Key = tuple[int, int]


def _place(sequence: Sequence) -> tuple[int, Key]:
    return sequence.order, sequence.key


class QueueLoad(NamedTuple):
    """Requests and their tokens."""

    requests: int = 0
    tokens: int = 0


class Queue:
    """Sequences that wait for a row, by attempt and index, in order of `Sequence.order`.

    The line is a sorted list: a place is found in O(log n), and the pointers behind it move as one block.

    Attributes:
        tokens: Tokens of all sequences together.
        expected: Output tokens that all of them together are expected to have, see `Sequence`.
    """

    def __init__(self) -> None:
        self._waiting: dict[Key, Sequence] = {}
        self._line: list[Sequence] = []
        self._deadlines: list[tuple[float, Key]] = []
        self._loads: dict[str, QueueLoad] = {}  # by tenant
        self._places: dict[str, list[int]] = {}  # `order` of the sequences of each tenant, sorted
        self.tokens = self.expected = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def tenants(self) -> int:
        """Number of tenants with a sequence that waits."""
        return len(self._loads)

    @property
    def waiting_tenants(self) -> list[str]:
        """Names of the tenants with a sequence that waits."""
        return list(self._loads)

    def load_of(self, tenant: str) -> QueueLoad:
        """Returns the waiting requests and tokens of one tenant."""
        return self._loads.get(tenant, QueueLoad())

    def _add(self, sequence: Sequence, sign: int) -> None:
        tenant, tokens = sequence.tenant, sign * sequence.length
        self.tokens += tokens
        self.expected += sign * sequence.expected
        load = self.load_of(tenant)
        self._loads[tenant] = QueueLoad(load.requests + sign, load.tokens + tokens)
        places = self._places.setdefault(tenant, [])
        if sign > 0:
            insort(places, sequence.order)
        else:
            del places[bisect_left(places, sequence.order)]
        if not self._loads[tenant].requests:
            del self._loads[tenant], self._places[tenant]

    @property
    def first(self) -> Sequence:
        """The first sequence in order, of a queue that is not empty."""
        return self._line[0]

    @property
    def mean_output(self) -> float | None:
        """Mean of the output tokens that the sequences are expected to have; None for an empty queue."""
        return self.expected / len(self) if len(self) else None

    def load_before(self, order: int, tenant: str | None = None) -> QueueLoad:
        """Returns the sequences in front of a place, and their part of all tokens, as though all had equally many.

        Args:
            order: The place.
            tenant: Counts sequences of this tenant alone; None counts all.
        """
        if tenant is None:
            before, load = bisect_left(self._line, order, key=lambda one: one.order), QueueLoad(len(self), self.tokens)
        else:
            before, load = bisect_left(self._places.get(tenant, ()), order), self.load_of(tenant)
        return QueueLoad(before, load.tokens * before // max(load.requests, 1))

    def attempts(self) -> list[int]:
        """Returns the attempt of each sequence, in order."""
        return [sequence.attempt for sequence in self._line]

    def push(self, sequence: Sequence, deadline: float = math.inf) -> None:
        """Adds a sequence at its place, before all that came later, also where it is queued again.

        Args:
            sequence: Sequence.
            deadline: Seconds on the engine's clock after which `expired` returns it, unless it was admitted before.
        """
        self._waiting[sequence.key] = sequence
        insort(self._line, sequence, key=_place)
        self._add(sequence, 1)
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, sequence.key))

    def get(self, attempt: int, index: int = 0) -> Sequence | None:
        return self._waiting.get((attempt, index))

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        """Puts `heir` in the place of a sequence that waits, with its deadline."""
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
