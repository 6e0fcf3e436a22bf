"""Priorities that age: a waiting request gains one level in each `ageing` seconds, so that none starves.

All requests age alike, from their arrival on and also while they run. So who comes before whom never changes: a request
of priority p that arrives at second s has its place at s + p x ageing, where lower is first. Three things follow.

- A request of priority p comes before all requests of priority q that arrive more than (p - q) x ageing seconds later.
  None of these is admitted before it, but for two cases in which it holds up no other: its next prefix page is being
  computed, or its logits processors are not ready.
- The order of running rows never turns, so the first of them ends.
- A row gives way to a waiting request that is at least one whole level ahead of it at present, and never the other way
  round: no two preempt each other by turns.

Places are rounded down to 1/1024 of a second. Ageing after Kleinrock, Queueing Systems II, 1976 (delay-dependent
priorities).
"""

import math
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from scheduler.policy import EARLIER, PRIORITY_BITS, FirstCome
from scheduler.queue import Queue, QueueLoad
from scheduler.request import Request
from scheduler.rows import Index, Rows, Sequence

TICKS = 1024  # of a second, in `order`
ARRIVAL_BITS = 20  # of `order`, below the ticks: keeps requests of one tick apart and in order of arrival

Orders = TypeVar("Orders", int, NDArray[np.int64])


class AgeingPriority(FirstCome):
    """Requests by priority and age; the more urgent ones preempt running rows.

    Args:
        ageing: Seconds in which a request gains one level; 0 keeps priorities strict, and requests of a high `priority`
            value wait as long as others come.
    """

    def __init__(self, ageing: float) -> None:
        super().__init__()  # no request is passed: the first in line preempts for the room that it lacks
        self._ageing = ageing
        # A difference of places shifted by `_shift` is a whole level from `_level` on.
        self._shift = ARRIVAL_BITS if ageing else PRIORITY_BITS
        self._level = math.ceil(ageing * TICKS) if ageing else 1

    def order(self, request: Request, arrivals: int, now: float, seconds: float) -> int:
        if not self._ageing:
            return super().order(request, arrivals, now, seconds)
        place = math.floor((now + request.priority * self._ageing) * TICKS)
        return (place << ARRIVAL_BITS) + arrivals % (1 << ARRIVAL_BITS)

    def wants_room(self, queue: Queue, rows: Rows, now: float) -> bool:  # noqa: ARG002
        last = rows.active()[-1:]  # has the latest place: if it does not give way to the first in line, no row does
        return bool(len(last)) and bool(len(self._lesser(queue.first, rows, last)))

    def gives_way(self, sequence: Sequence, rows: Rows, now: float) -> Index:  # noqa: ARG002
        return self._lesser(sequence, rows, rows.active())[::-1]

    def _lesser(self, sequence: Sequence, rows: Rows, those: Index) -> Index:
        """Returns those rows that are behind a sequence by a whole level."""
        order = rows.order[those]
        levels = self._place(order - rows.index[those]) - self._place(sequence.order - sequence.index)
        # A request that another engine had taken comes first whatever its level, and gives way to none behind it.
        return those[(levels >= self._level) & (order > sequence.order)]

    def _place(self, order: Orders) -> Orders:
        """Returns places by level or tick, also of requests that another engine had taken."""
        return (order + (order < -EARLIER // 2) * EARLIER) >> self._shift

    def ahead(self, queue: Queue, newcomer: Sequence, waiting: QueueLoad) -> QueueLoad:
        """Estimates that what stands before the request in the queue is admitted before it."""
        requests, tokens = queue.load_before(newcomer.order)
        return QueueLoad(min(waiting.requests, requests), min(waiting.tokens, tokens))
