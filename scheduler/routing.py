"""Routing: a request goes to the replica that has the least to compute until it is done.

The cost of a replica is counted in tokens. Waiting prompts count, and the part of the request's prompt that its prefix
cache lacks. So do a share for each running sequence, and pages that it would have to evict. So a matched prefix counts
as much as the computing that it saves: a busy replica that has it loses against an idle one that computes it sooner.

Three replicas are compared: two drawn at random, and the one that has most of the prompt. Frontends do not know of each
other's newest requests; if each chose the least loaded replica, all would choose the same (the power of two choices,
Mitzenmacher, 2001).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

RUNNING_TOKENS = 16
"""Cost of a running sequence: about the tokens that it takes from a prompt's steps."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as a frontend knows it.

    Attributes:
        waiting_tokens: Tokens of queued prompts.
        running: Sequences that run.
        free_pages: Pages that a new sequence can have, cached ones among them.
        page_size: Tokens of a page.
        matched: Tokens of the prompt that its prefix cache has.
    """

    waiting_tokens: int
    running: int
    free_pages: int
    page_size: int
    matched: int = 0

    def cost(self, length: int) -> int:
        """Returns the tokens to compute until a prompt of this length is computed."""
        missing = max(0, -(-(length - self.matched) // self.page_size) - self.free_pages)
        return self.waiting_tokens + length - self.matched + RUNNING_TOKENS * self.running + missing * self.page_size


def choose(matched: Sequence[int], view: Callable[[int], ReplicaView], length: int, draw: Callable[[int], int]) -> int:
    """Chooses a replica.

    Args:
        matched: How much of the prompt each replica's prefix cache has; of one replica at least.
        view: Returns a replica by its index. Only of those that are compared, so a choice among many costs little.
        length: Tokens of the prompt.
        draw: Returns a random number in [0, n).

    Returns:
        Index into `matched`.
    """
    n = len(matched)
    if n <= 3:
        candidates = set(range(n))
    else:
        first = draw(n)
        second = (first + 1 + draw(n - 1)) % n
        candidates = {first, second, max(range(n), key=matched.__getitem__)}
    start = draw(n)  # replicas of equal cost take turns
    return min(candidates, key=lambda i: (view(i).cost(length), (i - start) % n))


def matched_pages(hashes: Sequence[bytes], held: set[bytes]) -> int:
    """Returns how many of a prompt's pages, from the first on, a replica holds, by their hashes."""
    for i, block_hash in enumerate(hashes):
        if block_hash not in held:
            return i
    return len(hashes)
