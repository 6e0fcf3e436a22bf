"""Fair service: virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

Each tenant has a counter of the service that it has had, divided by its weight. A token of a prompt counts 1, a drawn
token 2, as in the paper: a price list, not a model of this machine's costs. Of the tenants that wait, the one with the
smallest counter comes next, and of one tenant the request that is first by an order of its own: arrival, or least
slack (`LeastSlack`). A prompt counts at admission, also the part
that the prefix cache has: which of two tenants filled the cache shall not decide who is served.

A tenant with nothing in the queue saves nothing up: when one of its sequences begins to wait, a new one or one that was
preempted, its counter is lifted to the smallest one of those that wait, or to that of the tenant admitted last where
none waits.

Bound: while two tenants both have requests waiting, the difference of their service, each divided by its weight,
changes by at most 2 x max(L, 2 x M) / w. L: tokens of the longest prompt. M: tokens of the sequences that run at once,
at their full lengths (prompt and max_tokens). w: the smaller weight. The proof is the paper's. It needs that sequences
are admitted in this order alone, so a preempted sequence waits by its tenant's counter too. The order within a tenant
does not matter to it, nor do requests that are refused while they wait: these have had no service. Beyond the bound are
hypotheses of a search, which come first since rows may be suspended until they have run, and requests that admission
passes over: their next prefix page is being computed, or their logits processors are not ready.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from scheduler.dominant_share import ahead_by_turns
from scheduler.policy import FirstCome, RequestOrder
from scheduler.queue import Queue, QueueLoad
from scheduler.request import Request
from scheduler.rows import Rows, Sequence

INPUT, OUTPUT = 1.0, 2.0  # service of a token, by Sheng et al.
ARRIVAL = FirstCome()  # has no state


class FairService(FirstCome):
    """Tenants by the service that they have had, requests of one tenant by another order.

    Args:
        weights: Weight by tenant, above 0; 1 for all others. One of weight 2 gets twice the service of one of weight 1.
        within: Order of the requests of one tenant, and which of them are refused.
    """

    def __init__(self, weights: Mapping[str, float], within: RequestOrder = ARRIVAL) -> None:
        super().__init__()  # no request is passed: the bound needs admission in this order alone
        self._weights, self._within = weights, within

    def order(self, request: Request, arrivals: int, now: float, seconds: float) -> int:
        return self._within.order(request, arrivals, now, seconds)

    def patience(self, request: Request, seconds: float) -> float:
        return self._within.patience(request, seconds)

    def begins_to_wait(self, sequence: Sequence, queue: Queue, rows: Rows) -> None:
        """Lifts the counter of a tenant that has had nothing in the queue."""
        if queue.load_of(sequence.tenant).requests:
            return
        others = queue.waiting_tenants or ([] if rows.service.last is None else [rows.service.last])
        counters = self.counters(rows, [sequence.tenant, *others])
        least = min((counters[tenant] for tenant in others), default=0.0)
        if least > counters[sequence.tenant]:
            rows.service.lift(rows.tenant_number(sequence.tenant), least - counters[sequence.tenant])

    def waiting(self, queue: Queue, rows: Rows, now: float) -> Iterable[Sequence]:
        return self._by_service(queue, rows) if queue.tenants > 1 else super().waiting(queue, rows, now)

    def _by_service(self, queue: Queue, rows: Rows) -> Iterator[Sequence]:
        lines: dict[str, deque[Sequence]] = {}
        waiting = queue.in_order()
        yield from (one for one in waiting if one.preempted and one.request.beam is not None)
        for sequence in waiting:
            if not sequence.preempted or sequence.request.beam is None:
                lines.setdefault(sequence.tenant, deque()).append(sequence)
        while lines:
            counters = self.counters(rows, lines)
            tenant = min(lines, key=lambda one: (counters[one], lines[one][0].order))
            yield lines[tenant].popleft()
            if not lines[tenant]:
                del lines[tenant]

    def counters(self, rows: Rows, tenants: Iterable[str]) -> dict[str, float]:
        """Returns the counters of tenants. Tokens in flight count as drawn, drafts do not."""
        numbers, service = {tenant: rows.tenant_number(tenant) for tenant in tenants}, rows.service
        active = rows.active()
        drawn = rows.length[active] - rows.drafts[active] - rows.served[active]
        running = np.bincount(rows.tenant[active], weights=drawn, minlength=rows.tenants).tolist()
        return {
            tenant: (INPUT * service.input[one] + OUTPUT * (service.output[one] + running[one])) / self.weight(tenant)
            + service.lifted[one]
            for tenant, one in numbers.items()
        }

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def ahead(self, queue: Queue, newcomer: Sequence, waiting: QueueLoad) -> QueueLoad:
        """Estimates that tenants are admitted by turns, whatever the weights, and of its own those in front of it."""
        own = queue.load_before(newcomer.order, newcomer.tenant)
        return ahead_by_turns(queue, newcomer, own, waiting)
