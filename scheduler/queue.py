"""The waiting queue: first come first, preempted sequences in front, with the time until which each will wait."""

import heapq
import math
from collections import OrderedDict
from itertools import takewhile

from scheduler.rows import Sequence

Key = tuple[int, int]


class Queue:
    """Sequences that wait for a row, by attempt and index. tokens: all of theirs together."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[Key, Sequence] = OrderedDict()
        self._deadlines: list[tuple[float, Key]] = []
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def attempts(self) -> list[int]:
        """Of each sequence."""
        return [attempt for attempt, _ in self._waiting]

    def push(self, sequence: Sequence, deadline: float) -> None:
        """Last in line; `expired` reports it once `deadline`, which may be infinite, has passed."""
        self._waiting[sequence.key] = sequence
        self._wait(sequence, deadline)

    def _wait(self, sequence: Sequence, deadline: float) -> None:
        self.tokens += sequence.length
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, sequence.key))

    def push_front(self, sequence: Sequence, deadline: float = math.inf) -> None:
        """In line before all who came later: it has been served before. deadline: as in `push`."""
        earlier = [s.key for s in takewhile(lambda s: s.order < sequence.order, self._waiting.values())]
        self._waiting[sequence.key] = sequence
        for key in (sequence.key, *reversed(earlier)):
            self._waiting.move_to_end(key, last=False)
        self._wait(sequence, deadline)

    def get(self, attempt: int, index: int = 0) -> Sequence | None:
        return self._waiting.get((attempt, index))

    def replace(self, sequence: Sequence, heir: Sequence) -> None:
        """The heir takes the place of one that waits, and its deadline."""
        deadlines = [deadline for deadline, key in self._deadlines if key == sequence.key]
        self.remove(*sequence.key)
        self.push_front(heir)
        for deadline in deadlines:
            heapq.heappush(self._deadlines, (deadline, heir.key))

    def in_order(self) -> list[Sequence]:
        return list(self._waiting.values())

    def remove(self, attempt: int, index: int = 0) -> Sequence | None:
        sequence = self._waiting.pop((attempt, index), None)
        if sequence is not None:
            self.tokens -= sequence.length
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
