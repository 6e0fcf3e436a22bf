"""Log probabilities of one token of an output and its alternatives."""

import math
from typing import NamedTuple

from scheduler.events import Logprobs


class TokenLogprob(NamedTuple):
    """Log probability of one token at one position.

    Attributes:
        token_id: Id of the token.
        logprob: Natural logarithm, from the raw logits.
        rank: Place among all tokens by probability; 1 is the likeliest.
    """

    # A tuple takes a quarter of the time of a frozen dataclass to make, and a result may have 150,000.

    token_id: int
    logprob: float
    rank: int


def logprobs_at(step: Logprobs, i: int, token: int, wanted: int) -> list[TokenLogprob]:
    """Returns the log probabilities of one token and its alternatives, without those that a constraint forbids.

    Args:
        step: Log probabilities of a step's tokens.
        i: Index of the token in the step.
        token: The token itself, which comes first in the result.
        wanted: Alternatives at most, likeliest first; a negative number counts as 0.
    """
    chosen = TokenLogprob(token, float(step.chosen[i]), int(step.rank[i]))
    wanted = max(0, wanted)
    top = zip(step.top_ids[i, :wanted].tolist(), step.top[i, :wanted].tolist(), strict=True)
    return [chosen, *(TokenLogprob(t, p, rank) for rank, (t, p) in enumerate(top, 1) if t != token and p > -math.inf)]
