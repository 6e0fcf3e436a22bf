"""The logits processor of a constraint on the output: it forbids tokens with which that could not be completed."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.errors import RequestFault
from model.structured.closing import Closing
from model.structured.forbidding import Forbid
from model.structured.grammar_store import GrammarStore
from scheduler.controls import LogitsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher

FINITE = -1e30  # logit at which a forbidden end token can be drawn where nothing else can

SLOW = 0.05  # seconds of processor time for a mask, or a token that is taken: those of other requests wait meanwhile
TOO_SLOW = f"its grammar takes more than {SLOW * 1000:g} ms a token"

Ints = NDArray[np.int64]


class GrammarMask:
    """The constraint of one sequence. Applies after all other processors, so that none of them can break it.

    An output that is complete, and that nothing can follow, ends: its end tokens are drawn whatever other controls say.
    """

    def __init__(
        self,
        matcher: "LLMatcher | RequestFault",
        words: int = 0,
        closing: Closing | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        """Makes the constraint at the start of an output.

        Args:
            matcher: Its matcher, or why its grammar has none, which `apply_rows` raises.
            words: Words of 32 bits in a mask.
            closing: Closes the output in time; None where it may be cut off.
            ends: End tokens.
        """
        self._matcher, self.words, self._closing, self._ends = matcher, words, closing, ends

    @property
    def near(self) -> bool:
        """Whether the next draw has to be `settled`."""
        return self._closing is not None and self._closing.near

    @classmethod
    def of(cls, params: LogitsParams, store: GrammarStore | None) -> Self | None:
        """Makes the constraint of a sequence; None where its request has none."""
        if not params.grammar:
            return None
        if store is None:
            return cls(RequestFault("structured_output is not available with this model"))
        try:
            matcher, closing = store.matcher(params.grammar, params.grammar_salt), None
            if params.grammar_tokens:
                closing = Closing(store.completions, params.grammar_tokens, params.grammar_short, params.reasoning_end)
            return cls(matcher, store.words, closing, store.completions.ends)
        except RequestFault as fault:
            return cls(fault)

    @property
    def soon(self) -> bool:
        """Whether that may be so, while the token of one draw is not known yet."""
        return self._closing is not None and self._closing.soon

    def drew(self, token: int) -> None:
        """Records the next output token."""
        if self._closing is not None and not isinstance(self._matcher, RequestFault):
            self._closing.drew(self._matcher, token)
        if not isinstance(self._matcher, RequestFault):
            began = time.thread_time()
            if not self._matcher.consume_token(token):
                self._matcher = _fault_of(self._matcher, f"token {token} of the output cannot follow those before it")
            elif time.thread_time() - began > SLOW:
                self._matcher = _fault_of(self._matcher, TOO_SLOW)

    def settled(self, token: int) -> int:
        """Returns the token that is kept in place of a drawn one, so that the output can be completed in time."""
        if self._closing is None or isinstance(self._matcher, RequestFault):
            return token
        return self._closing.settled(self._matcher, token)

    def _fill(self, bits: NDArray[np.int32]) -> bool:
        """Writes the mask of the next draw, a bit a token, [ceil(vocabulary / 32)] int32.

        Returns:
            Whether the sequence can only end.

        Raises:
            RequestFault: The matcher has failed.
        """
        if not isinstance(self._matcher, RequestFault):
            began = time.thread_time()
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            what = "its grammar is too complex, or leads where nothing can follow"
            if not self._matcher.is_error():
                if time.thread_time() - began <= SLOW:
                    self._forbid_ends(self._matcher, bits)
                    return self._matcher.is_stopped()
                what = TOO_SLOW
            self._matcher = _fault_of(self._matcher, what)
        raise self._matcher

    def _forbid_ends(self, matcher: "LLMatcher", bits: NDArray[np.int32]) -> None:
        """Takes end tokens out of the mask of an output that is not complete.

        Within a text that ends with a special token, as reasoning may, the library's mask has them, and refuses them
        when they are drawn.
        """
        allowed = [end for end in self._ends if bits[end >> 5] >> (end & 31) & 1]
        if allowed and not (matcher.is_accepting() or matcher.is_stopped()):
            for end in allowed:
                bits[end >> 5] ^= np.int32(np.uint32(1 << (end & 31)).view(np.int32))

    @classmethod
    def apply_rows(cls, logits: Tensor, rows: Ints, processors: Sequence[Self], forbid: Forbid) -> None:
        """Forbids tokens of a step's rows, in place.

        Args:
            logits: [m, vocabulary] float32.
            rows: [n] int64. Index in `logits` of each processor's row, ascending.
            processors: [n] constraints.
            forbid: Applies masks.

        Raises:
            RequestFault: A matcher has failed.
        """
        bits = np.empty((len(rows), max(processor.words for processor in processors)), np.int32)
        over = [processor._fill(bits[i]) for i, processor in enumerate(processors)]
        for row in rows[over].tolist():
            logits[row].clamp_(min=FINITE)
        forbid(logits, rows, bits)


def _fault_of(matcher: "LLMatcher", what: str) -> RequestFault:
    return RequestFault(f"structured_output cannot be kept: {what} ({matcher.stop_reason()})")
