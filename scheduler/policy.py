"""Scheduling policies: which sequence is admitted next, which row gives way, and what waits ahead of a request.

A policy decides on order alone. Rows, pages and budget are the scheduler's, and so are the laws that hold under any
policy: each attempt ends once, no token depends on the schedule, and work goes on while there is any.
"""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.queue import Queue, QueueLoad
from scheduler.rows import Index, Rows, Sequence


class SchedulingPolicy(Protocol):
    """Order among sequences. Pure: it keeps no state beside its arguments.

    Sequences of one request have the same `attempt`. `order` says who came first: by priority, then by arrival, kept
    over preemptions. Progress needs one thing of a policy: that the first of `running` stays the first until it ends.
    """

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:
        """Returns the sequences of the queue in order of admission.

        May be a generator: rows that are taken while it is read are in `rows`. A sequence that it leaves out waits.
        """

    def running(self, rows: Rows, now: float) -> Index:
        """Returns the rows in use, the most deserving first.

        Prefills share the budget in this order. If pages are lacking, rows are preempted from its end. Steps of the
        same rows cost less where the same array is returned while neither rows nor order change, as `Rows.active` does.
        """

    def goes_before(self, sequence: Sequence, rows: Rows, those: Index) -> NDArray[np.bool_]:
        """Returns for each of `those` rows, of hypotheses that wait, whether a waiting sequence may have it."""

    def holds_the_line(self, sequence: Sequence, now: float) -> bool:
        """Whether sequences behind this one wait while there is no room for it."""

    def ahead(self, queue: Queue, tenant: str, waiting: QueueLoad) -> QueueLoad:
        """Estimates what is admitted before a new request of this tenant.

        Args:
            queue: The waiting queue, without the new request.
            tenant: Tenant of the new request.
            waiting: The part of the queue that cannot be admitted at this moment.
        """


class FirstCome:
    """First come, first served, whatever the tenant; requests of a lower `priority` value before all others."""

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:  # noqa: ARG002
        return queue.in_order()

    def running(self, rows: Rows, now: float) -> Index:  # noqa: ARG002
        return rows.active()

    def goes_before(self, sequence: Sequence, rows: Rows, those: Index) -> NDArray[np.bool_]:
        """Goes before an earlier hypothesis of its own request too: that one waits for this one."""
        earlier: NDArray[np.bool_] = rows.order[those] >= sequence.order - sequence.index
        return earlier

    def holds_the_line(self, sequence: Sequence, now: float) -> bool:  # noqa: ARG002
        return True

    def ahead(self, queue: Queue, tenant: str, waiting: QueueLoad) -> QueueLoad:  # noqa: ARG002
        return waiting
