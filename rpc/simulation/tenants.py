"""Tenants of simulated requests: a draw of them for a trace that has none, and the figures of each."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import DEFAULT_TENANT
from rpc.simulation.served import REFUSED, Ledger, percentiles
from rpc.simulation.traffic import Timed
from scheduler.events import Submit
from scheduler.recording import tenant_alias

MOST_SHOWN = 10  # tenants with figures of their own
PERCENTILES = (50, 99)
TTFT, TPOT = "first token, s", "a token after it, s"  # as in `Serving.figures`


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """How the requests of a tenant were served.

    Attributes:
        tenant: Its name, or how many tenants the figures are of.
        figures: By name.
    """

    tenant: str
    figures: Mapping[str, float]


def with_tenants(traffic: Sequence[Timed], tenants: int, seed: int) -> list[Timed]:
    """Returns a traffic whose requests have tenants, drawn for each alone: number n with a chance in proportion to 1/n.

    Args:
        traffic: Events of clients.
        tenants: Number of tenants.
        seed: Of the draw.
    """
    draw = random.Random(f"tenants {seed}")  # noqa: S311 - it hides nothing; the text keeps it apart from the router's
    numbers, chances = range(1, tenants + 1), [*accumulate(1 / number for number in range(1, tenants + 1))]

    def dealt(one: Timed) -> Timed:
        if not isinstance(one.event, Submit):
            return one
        (number,) = draw.choices(numbers, cum_weights=chances)
        request = one.event.request
        scope = replace(request.scope, tenant=tenant_alias(number))
        return replace(one, event=replace(one.event, request=replace(request, scope=scope)))

    return [dealt(one) for one in traffic]


def by_tenant(traffic: Sequence[Timed], ledger: Ledger) -> list[TenantFigures]:
    """Returns figures of each tenant, those with the most tokens of prompts and outputs first.

    Only `MOST_SHOWN` tenants have their own; the last entry has those of all others together.

    Args:
        traffic: Events of clients, as they were simulated.
        ledger: Of the simulation.

    Returns:
        The figures; none where all requests are of the default tenant.
    """
    requests, tokens = dict[str, list[int]](), ledger.tokens.copy()
    for one in traffic:
        if isinstance(one.event, Submit):
            requests.setdefault(one.event.request.scope.tenant, []).append(one.request)
            tokens[one.request] += len(one.event.request.prompt)
    if requests.keys() <= {DEFAULT_TENANT}:
        return []
    ranked = sorted(requests, key=lambda tenant: (-int(tokens[requests[tenant]].sum()), tenant))
    shown = {tenant: requests[tenant] for tenant in ranked[:MOST_SHOWN]}
    if others := ranked[MOST_SHOWN:]:
        shown[f"others ({len(others)})"] = [request for tenant in others for request in requests[tenant]]
    return [TenantFigures(name, _figures(ledger, np.array(numbers))) for name, numbers in shown.items()]


def _figures(ledger: Ledger, requests: NDArray[np.int64]) -> dict[str, float]:
    return {
        "requests": len(requests),
        "refused": sum(ledger.reasons.get(request) in REFUSED for request in requests.tolist()),
        "output tokens": int(ledger.tokens[requests].sum()),
        **percentiles(TTFT, ledger.ttft[requests], PERCENTILES),
        **percentiles(TPOT, ledger.tpot[requests], PERCENTILES),
    }
