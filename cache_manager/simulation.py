"""How much of a trace the prefix cache would have saved: its requests, one after the other, through the classes that
serve.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from cache_manager.cached import Cause, PolicyMaker
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from cache_manager.page_names import PageNamer


@dataclass(frozen=True, slots=True)
class Savings:
    """hits: blocks whose prefix, they included, was there when their request came. evicted: for another's place."""

    requests: int
    blocks: int
    hits: int
    evicted: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.blocks if self.blocks else 0.0


def simulate(requests: Iterable[Sequence[int]], capacity: int, make_policy: PolicyMaker) -> Savings:
    """requests: ids of each one's blocks, where equal ids in equal places after equal blocks are equal blocks.
    capacity: blocks that are kept from one request to the next; the blocks of the request that is served come on top,
    so that the policy may turn these away too.
    """
    requests = list(requests)
    room = max((len(ids) for ids in requests), default=0)
    manager = CacheManager(
        KVLayout(((0,),), 1, 1, 1, page_size=1), capacity + room, 1, lambda _pages: make_policy(capacity)
    )
    namer = PageNamer(bytes(16), b"", page_size=1)
    tokens: dict[int, int] = {}
    served = blocks = hits = 0
    for ids in requests:
        chain = namer.chain()
        chain.extend(np.array([tokens.setdefault(i, len(tokens)) for i in ids], np.int32))
        manager.pool.begin(float(served), served)
        match = manager.match(chain, len(chain.names))
        manager.open(0, served, chain, match)
        manager.grow(0, match.tokens, len(chain.names))
        manager.names.publish(0, len(chain.names), None)
        manager.release(0, None)
        manager.pool.shrink_cache(capacity)
        manager.pool.take_changes()
        served, blocks, hits = served + 1, blocks + len(ids), hits + match.tokens
    return Savings(served, blocks, hits, manager.prefix.evicted[Cause.CAPACITY])
