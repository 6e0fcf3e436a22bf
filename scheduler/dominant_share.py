"""Fair shares where several tenants wait: dominant resource fairness (Ghodsi et al., NSDI 2011).

The resources are batch rows and KV tokens. The tenant whose larger share of the two is smallest comes next, and of one
tenant the request that came first. A tenant that waits alone may have everything. No sequence is preempted for another
tenant's share, so a tenant that comes late gets its own as others' sequences end.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from scheduler.policy import FirstCome
from scheduler.queue import Queue, QueueLoad
from scheduler.rows import Rows, Sequence


class DominantShare(FirstCome):
    """First come, first served within a tenant, tenants by dominant share.

    Args:
        pool_tokens: Tokens that the pool holds.
        backfill: As in `FirstCome`: for so long a request that lacks room may also be passed by those of a tenant with
            a larger share.
    """

    def __init__(self, pool_tokens: int, backfill: float = 0.0) -> None:
        super().__init__(backfill)
        self._pool_tokens = pool_tokens

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:
        return self._by_share(queue, rows) if queue.tenants > 1 else super().waiting(queue, rows, now)

    def _by_share(self, queue: Queue, rows: Rows) -> Iterator[Sequence]:
        lines: dict[str, deque[Sequence]] = {}
        waiting = queue.in_order()
        # A preempted sequence comes before all newcomers, as with one tenant: rows may be suspended until it has run.
        yield from (sequence for sequence in waiting if sequence.preempted)
        for sequence in waiting:
            if not sequence.preempted:
                lines.setdefault(sequence.tenant, deque()).append(sequence)
        numbers = {tenant: rows.tenant_number(tenant) for tenant in lines}
        while lines:
            shares = self.shares(rows)
            tenant = min(lines, key=lambda one: (shares[numbers[one]], lines[one][0].order))
            yield lines[tenant].popleft()
            if not lines[tenant]:
                del lines[tenant]

    def shares(self, rows: Rows) -> NDArray[np.float64]:
        """Returns [tenants] the larger of each tenant's shares of rows and of KV tokens, by tenant number.

        Rows that are kept free for sequences of one prompt count.
        """
        active, tenants = rows.active(), rows.tenants
        whose = rows.tenant[active]
        held = np.bincount(whose, weights=1 + rows.siblings[active], minlength=tenants) / rows.size
        tokens = np.bincount(whose, weights=rows.length[active], minlength=tenants) / self._pool_tokens
        return np.maximum(held, tokens)

    def ahead(self, queue: Queue, newcomer: Sequence, waiting: QueueLoad) -> QueueLoad:
        return ahead_by_turns(queue, newcomer, queue.load_before(newcomer.order, newcomer.tenant), waiting)


def ahead_by_turns(queue: Queue, newcomer: Sequence, own: QueueLoad, waiting: QueueLoad) -> QueueLoad:
    """Estimates that each tenant has as much admitted before a request as its own tenant has in front of it.

    Tenants are admitted by turns. own: what the tenant has in front of it.
    """
    turns = queue.tenants + (not queue.load_of(newcomer.tenant).requests)
    return QueueLoad(min(waiting.requests, own.requests * turns), min(waiting.tokens, own.tokens * turns))
