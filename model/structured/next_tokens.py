"""What may follow in a state of a constraint: the mask of its draw, and the tokens that are forced.

The first states of a grammar's outputs are the same for all of them: `Openings` keeps what may follow in a few of them.
The first token of an output waits for its mask, and for the tokens that are forced behind it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.inputs.matcher import Matcher
from model.structured.forcing import Bits, Forcing

DEEPEST = 1  # tokens of an output whose state is kept
MOST_KEPT = 3  # states of one grammar, about: a mask takes 19 KB at a vocabulary of 151,936 tokens


@dataclass(slots=True, eq=False)
class NextTokens:
    """The tokens that may follow in one state.

    Attributes:
        mask: The mask of the draw. Others read it too, so it is never written to.
        forced: The token that must follow, which the mask has alone; empty where there is a choice.
        jump: The tokens that must follow, one behind the other; None where these were not looked for.
    """

    mask: Bits
    forced: list[int]
    jump: list[int] | None = None


def next_tokens(matcher: Matcher, forcing: Forcing, ends: Sequence[int], seconds: float) -> NextTokens | None:
    """Finds what may follow.

    Args:
        matcher: The state. It is not changed.
        forcing: Of the vocabulary.
        ends: End tokens.
        seconds: Processor time in which a forced token must be found, once the mask is known.

    Returns:
        None where the matcher has failed.

    Raises:
        TimeoutError: A token is forced, and it was not found by then.
    """
    mask = forcing.mask(matcher)
    if matcher.is_error():
        return None
    forbid_ends(matcher, mask, ends)
    forced = forcing.tokens(matcher, mask, 1, time.thread_time() + seconds)
    return NextTokens(forcing.alone(forced[0]) if forced else mask, forced)


def forbid_ends(matcher: Matcher, mask: Bits, ends: Sequence[int]) -> None:
    """Takes end tokens out of the mask of an output that is not complete.

    Within a text that ends with a special token, as reasoning may, the library's mask has them, and refuses them when
    they are drawn.
    """
    allowed = [end for end in ends if mask[end >> 5] >> (end & 31) & 1]
    if allowed and not (matcher.is_accepting() or matcher.is_stopped()):
        for end in allowed:
            mask[end >> 5] ^= np.int32(np.uint32(1 << (end & 31)).view(np.int32))


class Openings:
    """The tokens that may follow in the first states of a grammar's outputs. Threads that compute masks share it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], NextTokens] = {}

    def get(self, output: tuple[int, ...]) -> NextTokens | None:
        """Returns what may follow behind an output; None where that is not kept."""
        return self._kept.get(output)

    def keep(self, output: tuple[int, ...], found: NextTokens) -> None:
        """Keeps what may follow behind an output, where there is room."""
        if len(output) <= DEEPEST and len(self._kept) < MOST_KEPT:
            self._kept.setdefault(output, found)
