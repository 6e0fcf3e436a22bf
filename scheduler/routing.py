"""Which replica a request goes to: the one that has the least to compute until it is done.

What a replica would have to compute is counted in tokens: what waits there, what of the request's prompt its prefix
cache does not have, a share for each sequence that runs and slows the others down, and what it would have to throw away
to make room. So a matched prefix counts as much as the computing that it saves, and no more: a replica that has it and
is busy loses against an idle one that would be quicker to compute it anew.

Compared are two replicas drawn at random and the one that has most of the prompt: frontends do not know of each other's
newest requests, and if all of them went to the least loaded replica they would go to the same one (the power of two
choices, Mitzenmacher, 2001).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

RUNNING_TOKENS = 16
"""What a running sequence counts: about the tokens that it takes from a prompt while that is computed."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """What a frontend knows of a replica. waiting_tokens: of queued prompts. running: sequences. free_pages: that a new
    sequence can have, cached ones among them. matched: tokens of the prompt that its prefix cache has.
    """

    waiting_tokens: int
    running: int
    free_pages: int
    page_size: int
    matched: int = 0

    def cost(self, length: int) -> int:
        """Tokens to compute until a prompt of this length is."""
        missing = max(0, -(-(length - self.matched) // self.page_size) - self.free_pages)
        return self.waiting_tokens + length - self.matched + RUNNING_TOKENS * self.running + missing * self.page_size


def choose(views: Sequence[ReplicaView], length: int, draw: Callable[[int], int]) -> int:
    """The place in `views`, of which there is one at least, that a prompt of this length goes to. draw: a random number
    from 0 to less than n.
    """
    n = len(views)
    if n <= 3:
        candidates = set(range(n))
    else:
        first = draw(n)
        second = (first + 1 + draw(n - 1)) % n
        candidates = {first, second, max(range(n), key=lambda i: views[i].matched)}
    start = draw(n)  # so that equals take turns
    return min(candidates, key=lambda i: (views[i].cost(length), (i - start) % n))


def matched_pages(names: Sequence[bytes], held: set[bytes]) -> int:
    """How many of a prompt's pages, by name and from the first on, are among those that a replica holds."""
    for i, name in enumerate(names):
        if name not in held:
            return i
    return len(names)
