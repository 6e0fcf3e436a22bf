"""Drafts: tokens that a sequence may go on with, computed in one step and then checked.

A row's draft tokens are computed in one slice with its last token, and the row draws at each of these positions. A draw
counts while every draw before it equals the draft token that was computed in its place; the first that differs is the
last that counts (speculative decoding: Leviathan et al., ICML 2023). Quire's draws depend on a sequence's seed and the
position alone. So the tokens are exactly those of a run without drafts, at any temperature.

There is no prefill phase and no decode phase here either: a row with k draft tokens closes a gap of k + 1. A row draws
no further until its drafts are checked, so it sits out the steps that are planned while they are in flight.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

NO_TOKENS: Ints = np.empty(0, np.int32)
NO_DRAFTS: Ints = np.empty((0, 2), np.int32)
LAST = -1  # in `Drafted.tokens`: nothing was computed in place of this draw


class Drafter(Protocol):
    """Guesses how sequences go on. Called between two steps, so it must be quick; wrong guesses cost time alone."""

    def propose(self, tokens: Ints, most: int) -> Ints:
        """Guesses the next tokens of a sequence.

        Args:
            tokens: [n] int32. Prompt and output so far.
            most: Tokens that may be proposed, at least 1.

        Returns:
            [k] int32 with k <= most; empty where there is no guess worth computing.
        """


class PromptLookup:
    """Proposes the tokens that followed the sequence's last tokens where these stood in it before.

    Source: prompt lookup decoding (Saxena, 2023), vLLM's `ngram` method. Pays where output repeats the prompt:
    summaries, edits of code, retrieval.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        """Looks for the last `longest` tokens first, then for fewer, down to `shortest`."""
        self._longest, self._shortest = longest, shortest

    def propose(self, tokens: Ints, most: int) -> Ints:
        for size in range(min(self._longest, len(tokens) - 1), self._shortest - 1, -1):
            ends = np.flatnonzero(tokens[size - 1 : -1] == tokens[-1]) + size - 1
            for back in range(1, size):
                ends = ends[tokens[ends - back] == tokens[-1 - back]]
            if len(ends):
                after = int(ends[-1]) + 1  # the latest place: a text repeats what it said last
                return tokens[after : after + most]
        return NO_TOKENS


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """Draws of one step, of which several may be of one row: then they stand together, in order of position.

    Attributes:
        rows: [n] int32. Row that draws.
        tokens: [n] int32. Draft token that was computed in place of this draw; `LAST` behind a row's last draft.
    """

    rows: Ints
    tokens: Ints

    def counting(self, drawn: Ints) -> NDArray[np.bool_]:
        """Finds the draws that count. drawn: [n] int32. Returns [n]."""
        follows = self.rows[1:] == self.rows[:-1]
        breaks = np.zeros(len(drawn), np.int64)
        breaks[1:] = np.cumsum(follows & (drawn[:-1] != self.tokens[:-1]))
        first = np.ones(len(drawn), np.bool_)
        first[1:] = ~follows
        return breaks == breaks[first][np.cumsum(first) - 1]
