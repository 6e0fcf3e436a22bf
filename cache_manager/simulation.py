"""Replays a trace of requests through the serving classes, one at a time, and counts the hits of the prefix cache."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cache_manager.block_hash import BlockHasher
from cache_manager.cached import Cause, PolicyMaker
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager


@dataclass(frozen=True, slots=True)
class Savings:
    """Result of a simulation.

    Attributes:
        requests: Requests of the trace.
        blocks: Blocks of all requests.
        hits: Blocks that were cached, with all blocks before them, when their request came.
        evicted: Blocks that were evicted for capacity.
    """

    requests: int
    blocks: int
    hits: int
    evicted: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def simulate(requests: Iterable[Sequence[int]], capacity: int, make_policy: PolicyMaker) -> Savings:
    """Replays requests through a prefix cache.

    Args:
        requests: Block ids of each request. Two blocks are equal where their ids, and all ids before them, are equal.
        capacity: Blocks that are cached from one request to the next. The blocks of the running request come on top,
            so that the policy may evict these too.
        make_policy: Makes the eviction policy from `capacity`.

    Returns:
        Hits and evictions.
    """
    requests = list(requests)
    room = max((len(ids) for ids in requests), default=0)
    manager = CacheManager(
        KVLayout.uniform(((0,),), 1, 1, 1, page_size=1), capacity + room, 1, lambda _pages: make_policy(capacity)
    )
    hasher = BlockHasher(bytes(16), b"", page_size=1)
    tokens: dict[int, int] = {}
    served = blocks = hits = 0
    for ids in requests:
        chain = hasher.chain()
        chain.extend(np.array([tokens.setdefault(i, len(tokens)) for i in ids], np.int32))
        manager.pool.begin(float(served), served)
        match = manager.lookup.match(chain, len(chain.hashes))
        manager.open(0, served, chain, match)
        manager.grow(0, match.tokens, len(chain.hashes))
        manager.published.publish(0, len(chain.hashes), None)
        manager.release(0, None)
        manager.pool.shrink_cache(capacity)
        manager.pool.take_changes()
        served, blocks, hits = served + 1, blocks + len(ids), hits + match.tokens
    return Savings(served, blocks, hits, manager.prefix.evicted[Cause.CAPACITY])
