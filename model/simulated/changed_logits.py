"""Draws of sequences whose requests change logits: allowed and banned tokens, biases, penalties, constraints.

These few see the logits of the whole vocabulary. All others draw from their candidates alone.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from model.simulated.distribution import FLOOR, LOGITS, VOCABULARY, cumulative, drawn_ranks, uniform
from model.structured.grammar_mask import FINITE, SLOW, GrammarMask
from scheduler.controls import NO_LOGITS_PARAMS, Controls, LogitsParams
from scheduler.step import NO_TOKEN

OTHERS = np.arange(VOCABULARY, dtype=np.uint64) << np.uint64(32)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def changes_logits(params: LogitsParams) -> bool:
    """Returns whether a draw needs more than the candidates. `min_tokens` does not: an output ends later by it."""
    return replace(params, not_yet=(), min_tokens=0) != NO_LOGITS_PARAMS


def whole_logits(candidates: Ints, end: bool, end_token: int) -> Floats:
    """Returns the logits of a position, [vocabulary].

    Those of tokens that are no candidates differ a little, so that one of them is the likeliest where a constraint
    leaves no other.

    Args:
        candidates: [n] Candidates of the position, likeliest first.
        end: The output ends here: the end token is likelier than all of them.
        end_token: That token.
    """
    logits = FLOOR - uniform(OTHERS ^ np.uint64(candidates[0]))
    logits[candidates] = LOGITS
    if end:
        logits[end_token] = -FLOOR
    return logits


@dataclass(slots=True, eq=False)
class ChangedRow:
    """A sequence whose request changes logits.

    Attributes:
        controls: Controls of its draws.
        prompt: [n] int32. Tokens of its prompt.
        output: Tokens that it has drawn.
        mask: Constraint on its output, None where there is none.
        searching: It is a hypothesis of a beam search, as in `Join`.
    """

    controls: Controls
    prompt: NDArray[np.int32]
    output: list[int] = field(default_factory=list)
    mask: GrammarMask | None = None
    searching: bool = False

    def drew(self, token: int) -> None:
        """Records a token of the output."""
        self.output.append(token)
        if self.mask is not None:
            self.mask.drew(token)

    def changed(self, logits: Floats, position: int) -> Floats:
        """Returns the logits after the changes, in the order of `LogitsParams`."""
        params = self.controls.logits_params
        if params.allowed:
            kept = np.full(VOCABULARY, -np.inf)
            kept[list(params.allowed)] = logits[list(params.allowed)]
            logits = kept
        else:
            logits = logits.copy()
        for banned in params.banned:
            before = list(banned[:-1])
            if not before or self.output[-len(before) :] == before:
                logits[banned[-1]] = -np.inf
        if position < params.min_tokens:
            logits[list(params.not_yet)] = -np.inf
        for token, bias in params.bias:
            logits[token] += bias
        self._penalize(logits, params)
        return logits if self.mask is None else _masked(logits, self.mask)

    def _penalize(self, logits: Floats, params: LogitsParams) -> None:
        counts = np.bincount(np.array(self.output, np.int64), minlength=VOCABULARY)
        if params.repetition != 1.0:
            seen = counts > 0
            seen[self.prompt] = True
            factor = np.where(logits > 0, 1 / params.repetition, params.repetition)
            logits[seen] *= factor[seen]
        logits -= params.frequency * counts + params.presence * (counts > 0)

    def draw(self, logits: Floats, position: int, noise: float) -> int:
        """Returns the drawn token, NO_TOKEN where the controls leave none. noise: in [0, 1).

        Raises:
            RequestFault: The constraint on the output cannot be kept.
        """
        changed = self.changed(logits, position)
        order = np.argsort(-changed, kind="stable")
        if changed[order[0]] == -np.inf:
            return NO_TOKEN
        sums = cumulative(changed[order], self.controls)
        token = int(order[drawn_ranks(sums[None], np.array([noise]))[0]])
        settles = self.mask is not None and self.mask.near and not self.searching
        return self.mask.settled(token) if settles and self.mask is not None else token

    def offered(self, logits: Floats, position: int, most: int) -> tuple[Ints, NDArray[np.bool_]]:
        """Returns the likeliest tokens after the changes, [most], likeliest first, and which of them are allowed.

        Raises:
            RequestFault: The constraint on the output cannot be kept.
        """
        allowed = self.changed(logits, position) > -np.inf
        order = np.argsort(-np.where(allowed, logits, -np.inf), kind="stable")
        if self.mask is not None and self.mask.near:
            likeliest = [token for token in order[:most].tolist() if allowed[token]]
            kept = self.mask.closable(likeliest, time.thread_time() + SLOW)
            allowed = np.isin(np.arange(VOCABULARY), kept)
            order = np.argsort(-np.where(allowed, logits, -np.inf), kind="stable")
        return order[:most], allowed[order[:most]]


def _masked(logits: Floats, mask: GrammarMask) -> Floats:
    """Returns the logits with forbidden tokens at -inf. Raises RequestFault."""
    allowed = np.unpackbits(mask.mask().view(np.uint8), bitorder="little")[:VOCABULARY] == 1
    if mask.can_only_end:
        logits = np.maximum(logits, FINITE)
    return np.where(allowed, logits, -np.inf)
