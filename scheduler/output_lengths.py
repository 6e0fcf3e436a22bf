"""Learned output lengths: how many tokens a request is expected to have drawn when it ends.

Requests are told apart by tenant and shape: their prompt's length, `max_tokens`, and whether a grammar bounds them.
Each kind has a histogram of its recent outputs, older ones fading. A kind with few outputs borrows from all of its
shape, whatever the tenant, and that from all outputs (shrinkage to the mean). So a new tenant starts from what others
have.

A histogram, not a mean: what matters of a running request is how much is still to come, given what it has drawn.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduler.request import Request

MEMORY = 0.98  # weight of an output against the one after it: about 50 of a kind count
BORROWED = 5.0  # outputs that a kind is taken to have had beside its own, as the wider kind has them
FIRST_OUTPUT = 64.0  # tokens, until an output has ended: with the weight of one
MOST_KINDS = 1024  # of which something is known; the one without an output for longest is forgotten
BEYOND = 1.5  # times its tokens, the expected length of an output longer than all known

# Lower bounds of the buckets, two an octave.
EDGES: NDArray[np.int64] = np.unique(np.rint(2 ** (np.arange(41) / 2)).astype(np.int64))


def bucket_of(tokens: NDArray[np.int64]) -> NDArray[np.intp]:
    """Returns the bucket of each length; of 0 that of 1."""
    return np.searchsorted(EDGES, np.maximum(tokens, 1), side="right") - 1


class RequestShape(NamedTuple):
    """Shape of a request, sizes by powers of two."""

    prompt: int
    most: int
    constrained: bool


def shape_of(request: Request) -> RequestShape:
    constrained = bool(request.controls.logits_params.grammar)
    return RequestShape(len(request.prompt).bit_length(), request.max_tokens.bit_length(), constrained)


class RecentOutputs:
    """Recent outputs of a kind of request.

    Attributes:
        counts: [buckets] float64. Outputs, older ones fading.
        tokens: [buckets] float64. Their tokens.
    """

    __slots__ = ("counts", "tokens")

    def __init__(self) -> None:
        self.counts, self.tokens = np.zeros(len(EDGES)), np.zeros(len(EDGES))

    def observe(self, tokens: float) -> None:
        bucket = np.searchsorted(EDGES, max(tokens, 1.0), side="right") - 1
        self.counts *= MEMORY
        self.tokens *= MEMORY
        self.counts[bucket] += 1.0
        self.tokens[bucket] += tokens

    def borrow(self, wider: "RecentOutputs") -> "RecentOutputs":
        """Returns these outputs, and in front of them `BORROWED` as a wider kind has them."""
        scale, joint = BORROWED / wider.counts.sum(), RecentOutputs()
        joint.counts, joint.tokens = self.counts + scale * wider.counts, self.tokens + scale * wider.tokens
        return joint

    def within(self, most: int) -> "RecentOutputs":
        """Returns these outputs as though each had ended at `most` tokens."""
        bounded = RecentOutputs()
        bounded.counts, bounded.tokens = self.counts, np.minimum(self.tokens, self.counts * most)
        return bounded

    @property
    def mean(self) -> float:
        return float(self.tokens.sum() / self.counts.sum())


class OutputLengths:
    """Output lengths by kind of request."""

    def __init__(self) -> None:
        self._all = RecentOutputs()
        self._all.observe(FIRST_OUTPUT)
        # By tenant, None for all of them, and shape; the latest observed is last.
        self._kinds: dict[tuple[str | None, RequestShape], RecentOutputs] = {}
        self._observed = False

    @property
    def are_known(self) -> bool:
        """Whether an output has ended."""
        return self._observed

    @property
    def kinds(self) -> int:
        """Kinds of request of which something is known, at most `MOST_KINDS`."""
        return len(self._kinds)

    @property
    def mean(self) -> float:
        """Mean of all outputs."""
        return self._all.mean

    def observe(self, tokens: int, request: Request | None = None) -> None:
        """Learns from an output that has ended. request: its request; None counts it for the mean of all alone."""
        self._observed = True
        self._all.observe(tokens)
        if request is None:
            return
        shape = shape_of(request)
        for kind in ((None, shape), (request.scope.tenant, shape)):
            outputs = self._kinds.pop(kind, None) or RecentOutputs()
            outputs.observe(tokens)
            self._kinds[kind] = outputs
        while len(self._kinds) > MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]

    def expected(self, request: Request) -> float:
        """Returns the output tokens that a request is expected to have when it ends."""
        return self._outputs_like(request).mean

    def expected_beyond(self, request: Request) -> NDArray[np.float64]:
        """Returns [buckets] the expected length of an output that is known to reach the bucket."""
        outputs = self._outputs_like(request)
        counts, tokens = (np.cumsum(a[::-1])[::-1] for a in (outputs.counts, outputs.tokens))
        known = counts > 1e-6
        return np.where(known, tokens / np.where(known, counts, 1.0), BEYOND * EDGES)

    def _outputs_like(self, request: Request) -> RecentOutputs:
        """Returns outputs as a request is expected to have them."""
        shape, found = shape_of(request), self._all
        for kind in ((None, shape), (request.scope.tenant, shape)):
            if (own := self._kinds.get(kind)) is not None:
                found = own.borrow(found)
        return found.within(request.max_tokens)
