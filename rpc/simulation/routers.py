"""Routers: which engine a simulated request goes to."""

import random
from collections.abc import Callable, Sequence

from rpc.frontend.engine_client import EngineInfo
from rpc.frontend.replicas import Replica
from scheduler.routing import choose, matched_pages

Router = Callable[[Sequence[Replica], Sequence[bytes], int], Replica]
"""Chooses among engines that take requests, at least one, by a prompt's block hashes and its length in tokens."""


def by_cost(draw: random.Random, info: EngineInfo) -> Router:
    """Returns the router of `quire serve`: `scheduler.routing`."""

    def route(replicas: Sequence[Replica], hashes: Sequence[bytes], length: int) -> Replica:
        matched = [matched_pages(hashes, one.hashes) for one in replicas] if hashes else [0] * len(replicas)
        return replicas[choose(matched, lambda i: replicas[i].view(info, matched[i]), length, draw.randrange)]

    return route


def round_robin(draw: random.Random, info: EngineInfo) -> Router:  # noqa: ARG001
    """Returns a router that takes one engine after the other."""
    sent = 0

    def route(replicas: Sequence[Replica], hashes: Sequence[bytes], length: int) -> Replica:  # noqa: ARG001
        nonlocal sent
        sent += 1
        return replicas[sent % len(replicas)]

    return route


def at_random(draw: random.Random, info: EngineInfo) -> Router:  # noqa: ARG001
    """Returns a router that draws an engine."""

    def route(replicas: Sequence[Replica], hashes: Sequence[bytes], length: int) -> Replica:  # noqa: ARG001
        return draw.choice(replicas)

    return route


def least_requests(draw: random.Random, info: EngineInfo) -> Router:  # noqa: ARG001
    """Returns a router that takes the engine with the fewest open requests, as load balancers do."""

    def route(replicas: Sequence[Replica], hashes: Sequence[bytes], length: int) -> Replica:  # noqa: ARG001
        fewest = min(len(one.waiting) for one in replicas)
        return draw.choice([one for one in replicas if len(one.waiting) == fewest])

    return route


ROUTERS: dict[str, Callable[[random.Random, EngineInfo], Router]] = {
    "cost": by_cost,
    "least-requests": least_requests,
    "random": at_random,
    "round-robin": round_robin,
}
"""Makers of routers by name, from what draws their choices and what all engines are."""
