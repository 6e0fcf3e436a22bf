"""Scheduling policies: which sequence is admitted next, which row gives way, and what waits ahead of a request.

A policy decides on order alone. Rows, pages and budget are the scheduler's, and so are the laws that hold under any
policy: each attempt ends once, no token depends on the schedule, and work goes on while there is any.
"""

import math
from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.queue import Queue, QueueLoad
from scheduler.request import Request
from scheduler.rows import Index, Rows, Sequence

EARLIER = 2**60  # off `order`: a request that another engine had taken comes before all new ones
PRIORITY_BITS = 44  # of first come's `order`, below the priority: arrival, up to 2^44 sequences


class RequestOrder(Protocol):
    """Order among the requests of one line, fixed when they come: all of them, or those of one tenant.

    A policy that chooses between tenants is given one for the requests of each.
    """

    def order(self, request: Request, arrivals: int, now: float, seconds: float) -> int:
        """Returns the place in line of a new request's first sequence; its other sequences have the places behind it.

        Args:
            request: The request.
            arrivals: Number of its first sequence, counted from 1 over all that have come.
            now: Seconds on the scheduler's clock.
            seconds: Time that it is predicted to run.

        Returns:
            A place of less than 2^59. `EARLIER` is taken off for a request that another engine had taken.
        """

    def patience(self, request: Request, seconds: float) -> float:
        """Returns the seconds that a new request may wait before it is of no use; infinity where that is not known.

        Args:
            request: The request.
            seconds: Time that it is predicted to run.
        """


class SchedulingPolicy(RequestOrder, Protocol):
    """Order among sequences. Pure: it keeps no state beside its arguments. What tenants have had is in `Rows.service`.

    Sequences of one request have the same `attempt`. `Sequence.order` says who comes first, kept over preemptions.
    Progress needs one thing of a policy: that no row that runs comes before the first of `running` until that ends.
    Newcomers may.
    """

    def begins_to_wait(self, sequence: Sequence, queue: Queue, rows: Rows) -> None:
        """Takes note of a new request, before it is queued. May lift its tenant's service (`Service.lift`).

        Args:
            sequence: First sequence of the request.
            queue: The waiting queue, without it.
            rows: The running sequences.
        """

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:
        """Returns the sequences of the queue in order of admission.

        May be a generator: rows that are taken while it is read are in `rows`. A sequence that it leaves out waits.
        """

    def running(self, rows: Rows, now: float) -> Index:
        """Returns the rows in use, the most deserving first.

        Prefills share the budget in this order. If pages are lacking, rows are preempted from its end, those last that
        were preempted `max_preemptions` times. Steps of the same rows cost less where the same array is returned while
        neither rows nor order change, as `Rows.active` does.
        """

    def goes_before(self, sequence: Sequence, rows: Rows, those: Index) -> NDArray[np.bool_]:
        """Returns for each of `those` rows, of hypotheses that wait, whether a waiting sequence may have it."""

    def holds_the_line(self, sequence: Sequence, now: float) -> bool:
        """Whether sequences behind this one wait while there is no room for it.

        Sequences that lack the step's budget, or that are to run isolated, hold the line under any policy.

        Args:
            sequence: Waiting sequence, `Sequence.blocked` up to date.
            now: Seconds on the scheduler's clock.
        """

    def wants_room(self, queue: Queue, rows: Rows, now: float) -> bool:
        """Whether a waiting sequence may preempt a running one, in O(1): each step with a queue asks."""

    def gives_way(self, sequence: Sequence, rows: Rows, now: float) -> Index:
        """Returns [n] int32, the running rows that a waiting sequence may preempt, the one to go first in front.

        A row comes behind the sequence in the order of `running`, and stays behind it when it is queued again. So the
        two never preempt each other by turns.
        """

    def ahead(self, queue: Queue, newcomer: Sequence, waiting: QueueLoad) -> QueueLoad:
        """Estimates what is admitted before a new request.

        Args:
            queue: The waiting queue, without the new request.
            newcomer: First sequence of the new request.
            waiting: The part of the queue that cannot be admitted at this moment.
        """


class FirstCome:
    """First come, first served, whatever the tenant; requests of a lower `priority` value before all others.

    A request that lacks rows or pages may be passed by smaller ones behind it, which would otherwise wait for room that
    they do not need (head-of-line blocking; backfilling: Lifka, The ANL/IBM SP Scheduling System, JSSPP 1995).

    Bound: from `backfill` seconds after a request was first found to lack room at its turn, none behind it is admitted
    before it, but for those that admission passes anyway (see `FairService`). From then on it waits for running rows
    to end, as without backfilling. A preempted sequence is never passed: what passes it would take the pages that it
    was preempted for.

    Args:
        backfill: Seconds that a request may be passed; 0 for never.
    """

    def __init__(self, backfill: float = 0.0) -> None:
        self._backfill = backfill

    def order(self, request: Request, arrivals: int, now: float, seconds: float) -> int:  # noqa: ARG002
        return (request.priority << PRIORITY_BITS) + arrivals

    def patience(self, request: Request, seconds: float) -> float:  # noqa: ARG002
        return math.inf

    def begins_to_wait(self, sequence: Sequence, queue: Queue, rows: Rows) -> None:
        pass

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:  # noqa: ARG002
        return queue.in_order()

    def running(self, rows: Rows, now: float) -> Index:  # noqa: ARG002
        return rows.active()

    def goes_before(self, sequence: Sequence, rows: Rows, those: Index) -> NDArray[np.bool_]:
        """Goes before an earlier hypothesis of its own request too: that one waits for this one."""
        earlier: NDArray[np.bool_] = rows.order[those] >= sequence.order - sequence.index
        return earlier

    def holds_the_line(self, sequence: Sequence, now: float) -> bool:
        blocked = sequence.blocked
        return blocked is None or sequence.preempted or now - blocked >= self._backfill

    def wants_room(self, queue: Queue, rows: Rows, now: float) -> bool:  # noqa: ARG002
        return False

    def gives_way(self, sequence: Sequence, rows: Rows, now: float) -> Index:  # noqa: ARG002
        return rows.active()[:0]

    def ahead(self, queue: Queue, newcomer: Sequence, waiting: QueueLoad) -> QueueLoad:
        """Estimates that what stands before the request in the queue is admitted before it."""
        requests, tokens = queue.load_before(newcomer.order)
        return QueueLoad(min(waiting.requests, requests), min(waiting.tokens, tokens))
