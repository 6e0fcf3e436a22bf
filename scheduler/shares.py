"""Whose turn it is where several tenants wait.

Dominant resource fairness (Ghodsi et al., NSDI 2011) over batch rows and KV tokens: next comes who has the least of
what it has most of, and of one tenant who came first. As long as one tenant waits alone it may have everything; nobody
is preempted for another's share, so a tenant that comes late gets its own as others' sequences end. Those that had to
give way come before all newcomers, as they do with one tenant: others may hold rows that wait for them.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from scheduler.queue import Queue
from scheduler.rows import Rows, Sequence


class Shares:
    """Of the tenants that have these rows. pool_tokens: tokens that the KV pool holds."""

    def __init__(self, rows: Rows, pool_tokens: int) -> None:
        self._rows, self._pool_tokens = rows, pool_tokens

    def in_turn(self, queue: Queue) -> Iterable[Sequence]:
        """Those that wait as they should start. Rows that are given away meanwhile count at once."""
        return self._by_share(queue) if queue.tenants > 1 else queue.in_order()

    def _by_share(self, queue: Queue) -> Iterator[Sequence]:
        lines: dict[str, deque[Sequence]] = {}
        waiting = queue.in_order()
        yield from (sequence for sequence in waiting if sequence.preempted)
        for sequence in waiting:
            if not sequence.preempted:
                lines.setdefault(sequence.tenant, deque()).append(sequence)
        numbers = {tenant: self._rows.tenant_number(tenant) for tenant in lines}
        while lines:
            shares = self.dominant()
            tenant = min(lines, key=lambda one: (shares[numbers[one]], lines[one][0].order))
            yield lines[tenant].popleft()
            if not lines[tenant]:
                del lines[tenant]

    def dominant(self) -> NDArray[np.float64]:
        """Part of the rows, those that are kept free for it too, or of the KV tokens that each tenant has, whichever is
        more; by tenant number.
        """
        rows = self._rows
        active, tenants = rows.active(), rows.tenants
        whose = rows.tenant[active]
        held = np.bincount(whose, weights=1 + rows.siblings[active], minlength=tenants) / rows.size
        tokens = np.bincount(whose, weights=rows.length[active], minlength=tenants) / self._pool_tokens
        return np.maximum(held, tokens)
