"""The constraint on an output: which tokens may come next, so that it can be completed. Imports no torch."""

import copy
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

import numpy as np
from numpy.typing import NDArray

from model.errors import RequestFault
from model.inputs.matcher import Matcher
from model.structured.closing import Closing
from model.structured.forcing import Bits, Forcing
from model.structured.grammar_store import GrammarStore
from model.structured.next_tokens import DEEPEST, NextTokens, Openings, forbid_ends, next_tokens
from scheduler.controls import LogitsParams

FINITE = -1e30  # logit at which a forbidden end token can be drawn where nothing else can

SLOW = 0.05  # seconds of processor time for a mask, or a token that is taken: those of other requests wait meanwhile
LENIENCE = 0.05  # seconds, by which those of one output may exceed that together: a busy host adds to them
WORTH = 0.0003  # seconds of a mask, in which the likeliest tokens can be checked instead
MOST_JUMP = 64  # tokens
JUMP_SECONDS = 0.01  # of processor time, for forced tokens: those not found by then are drawn, one a step
TOO_SLOW = f"its grammar takes more than {SLOW * 1000:g} ms a token"

Ints = NDArray[np.int64]


def _ignore(seconds: float) -> None:
    pass


class GrammarMask:
    """The constraint of one sequence. Applies after all other processors, so that none of them can break it.

    An output that is complete, and that nothing can follow, ends: its end tokens are drawn whatever other controls say.
    A stop token is taken as an end token: it is allowed where the output is complete and may end.
    """

    def __init__(
        self,
        matcher: Matcher | RequestFault,
        forcing: Forcing | None = None,
        closing: Closing | None = None,
        ends: Sequence[int] = (),
        took: Callable[[float], None] = _ignore,
        lock: int = 0,
        stops: Sequence[int] = (),
        openings: Openings | None = None,
    ) -> None:
        """Makes the constraint at the start of an output.

        Args:
            matcher: Its matcher, or why its grammar has none, which `mask` raises.
            forcing: Computes masks, and finds forced tokens; None with a fault alone.
            closing: Closes the output in time; None where it may be cut off.
            ends: End tokens.
            took: Is told the seconds of processor time of each mask.
            lock: The same number as of others whose matchers share a lock.
            stops: Stop tokens. No text of the grammar has them.
            openings: What may follow in the first states of the grammar's outputs, which share it.
        """
        self.lock = lock
        self._matcher, self._forcing, self._closing, self._ends, self._took = matcher, forcing, closing, ends, took
        self._stops = frozenset(stops) - {*ends}
        self._openings = Openings() if openings is None else openings
        self._begun: tuple[int, ...] = ()  # the first tokens of the output, one more than `Openings` has at most
        self._next: NextTokens | None = None  # where known
        self._free: bool | None = None  # whether none is forced, where that was looked for
        self._within_text = 0.0  # seconds of the last mask where none was forced
        self._over = 0.0  # seconds that masks and tokens took beyond `SLOW`

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
            compiled, closing = store.compiled(params.grammar, params.grammar_salt), None
            if params.grammar_tokens:
                start = partial(compiled.path, params.reasoning_end)
                closing = Closing(
                    store.completions, params.grammar_tokens, params.grammar_short, params.reasoning_end, start
                )
            matcher, lock = compiled.matcher()
            return cls(
                matcher,
                store.forcing,
                closing,
                store.completions.ends,
                compiled.took,
                lock,
                params.grammar_stops,
                compiled.openings,
            )
        except RequestFault as fault:
            return cls(fault)

    @property
    def soon(self) -> bool:
        """Whether that may be so, while the token of one draw is not known yet."""
        return self._closing is not None and self._closing.soon

    def close_within(self, most: int) -> None:
        """Has the output be complete within fewer tokens, where it can. most: of the whole output."""
        if self._closing is not None:
            self._closing.close_within(most)

    def drew(self, token: int) -> None:
        """Records the next output token."""
        token = self._as_end(token)
        if self._closing is not None and not isinstance(self._matcher, RequestFault):
            self._closing.drew(self._matcher, token)
        self._next = self._free = None
        if len(self._begun) <= DEEPEST:
            self._begun += (token,)
        if not isinstance(self._matcher, RequestFault):
            began = time.thread_time()
            if not self._matcher.consume_token(token):
                self._matcher = _fault_of(self._matcher, f"token {token} of the output cannot follow those before it")
            else:
                self._charge(self._matcher, began)

    def _charge(self, matcher: Matcher, began: float) -> None:
        """Ends an output whose tokens take too long. began: processor time of this thread before the last one."""
        # One of them alone ends none: a machine that is taken away meanwhile counts as processor time.
        self._over += min(LENIENCE, max(0.0, time.thread_time() - began - SLOW))
        if self._over > LENIENCE:
            self._matcher = _fault_of(matcher, TOO_SLOW)

    def settled(self, token: int, search: bool = True) -> int:
        """Returns the token that is kept in place of a drawn one, so that the output can be completed in time.

        Args:
            token: The drawn one.
            search: As in `Closing.settled`.
        """
        if self._closing is None or isinstance(self._matcher, RequestFault):
            return token
        taken = self._as_end(token)
        kept = self._closing.settled(self._matcher, taken, search)
        return token if kept == taken else kept

    def closable(self, tokens: Sequence[int], until: float) -> list[int]:
        """Returns tokens that a search may go on with: the output behind each can be completed in time.

        Args:
            tokens: The likeliest allowed ones, likeliest first.
            until: Processor time of this thread, after which no other completion than the known one is looked for.

        Returns:
            Those of them that are kept, and a completion's next token where one is not.
        """
        kept = [self.settled(token, time.thread_time() < until) for token in tokens]
        return list(dict.fromkeys(kept))

    def copy(self) -> "GrammarMask | None":
        """Returns a mask behind the same tokens, which goes on by itself; None where this one has failed."""
        if isinstance(self._matcher, RequestFault):
            return None
        made = copy.copy(self)
        made._matcher, made._over = self._matcher.deep_copy(), 0.0
        made._closing = None if self._closing is None else self._closing.copy()
        return made

    def can_wait(self) -> bool:
        """Returns whether the next token may be drawn without the mask, and checked by `allows`.

        It may where no token is forced, and the mask is not known.
        """
        if self._next is None and self._free is None and not isinstance(self._matcher, RequestFault):
            began = time.thread_time()
            self._free = self._forcing is not None and self._forcing.is_free(self._matcher)
            self._charge(self._matcher, began)
        return self._next is None and bool(self._free) and not isinstance(self._matcher, RequestFault)

    def allows(self, token: int) -> bool:
        """Returns whether the mask has a token. False also where the matcher fails at it, as `mask` then says."""
        if isinstance(matcher := self._matcher, RequestFault):
            return False
        began, token = time.thread_time(), self._as_end(token)
        allowed = matcher.validate_tokens([token]) == 1 and not matcher.is_error()
        self._charge(matcher, began)
        return allowed and (token not in self._ends or matcher.is_accepting() or matcher.is_stopped())

    @property
    def is_slow(self) -> bool:
        """Whether the last mask that might have waited took long. What is drawn does not depend on it."""
        return self._within_text > WORTH

    @property
    def has_failed(self) -> bool:
        """Whether no token is allowed any more, as `mask` then says why."""
        return isinstance(self._matcher, RequestFault) or self._matcher.is_error()

    @property
    def is_forced(self) -> bool:
        """Whether the next token is a forced one, once the mask of its draw is known."""
        return self._next is not None and bool(self._next.forced)

    def jump(self) -> list[int]:
        """Returns tokens that must come next; most often there are none."""
        if self.can_wait():
            return []
        try:
            self.mask()
            return self._following() if self.is_forced else []
        except RequestFault:  # the next draw raises it
            return []

    def _following(self) -> list[int]:
        forcing, matcher, found = self._forcing, self._matcher, self._next
        if isinstance(matcher, RequestFault) or forcing is None or found is None:
            return []
        room = MOST_JUMP if self._closing is None else min(MOST_JUMP, self._closing.undisturbed)
        if not room:
            return []
        if found.jump is not None:
            return found.jump[:room]
        kept = self._openings.get(self._begun) is found
        taken, whole = self._forced_behind(found.forced, matcher, forcing, MOST_JUMP if kept else room)
        if kept and whole:  # else a pause of the machine would make the jumps of all later outputs shorter
            found.jump = taken
        return taken[:room]

    def _forced_behind(
        self, tokens: list[int], matcher: Matcher, forcing: Forcing, most: int
    ) -> tuple[list[int], bool]:
        """Returns up to `most` forced tokens, of which the first ones are known, and whether no time was short."""
        taken, until, ahead = list[int](), time.thread_time() + JUMP_SECONDS, matcher.deep_copy()
        while tokens and len(taken) < most:
            taken += tokens
            if taken[-1] in self._ends or not ahead.consume_tokens(tokens):
                break
            bits = forcing.mask(ahead)
            forbid_ends(ahead, bits, self._ends)
            try:  # what is not found in time is drawn
                tokens = forcing.tokens(ahead, bits, most, until)
            except TimeoutError:
                return taken[:most], False
        return taken[:most], True

    def mask(self) -> Bits:
        """Returns the mask of the next draw.

        Raises:
            RequestFault: The matcher has failed.
        """
        if isinstance(self._matcher, RequestFault):
            raise self._matcher
        if self._next is None:
            known = None if self._matcher.is_error() else self._openings.get(self._begun)
            self._next = known or self._found(self._matcher)
        if isinstance(self._matcher, RequestFault):
            raise self._matcher
        return self._with_stops(self._next)

    def _found(self, matcher: Matcher) -> NextTokens:
        """Finds what may follow. Raises RequestFault where the matcher has failed."""
        began = time.thread_time()
        found = self._look(matcher)
        self._openings.keep(self._begun, found)
        seconds = time.thread_time() - began
        self._within_text = seconds if self._free else self._within_text
        self._took(seconds)
        self._charge(matcher, began)
        return found

    def _look(self, matcher: Matcher) -> NextTokens:
        """Raises RequestFault where the matcher has failed, or a forced token is not found in time."""
        if (forcing := self._forcing) is None:
            raise TypeError("a matcher without the Forcing of its vocabulary")
        try:
            found = next_tokens(matcher, forcing, self._ends, SLOW + LENIENCE)
        except TimeoutError:  # once more, which a pause of the machine does not do twice
            try:
                found = next_tokens(matcher, forcing, self._ends, SLOW + LENIENCE)
            except TimeoutError:
                self._matcher = _fault_of(matcher, TOO_SLOW)
                raise self._matcher from None
        if found is None:
            self._matcher = _fault_of(matcher, "its grammar is too complex, or leads where nothing can follow")
            raise self._matcher
        return found

    def _with_stops(self, found: NextTokens) -> Bits:
        """Returns a mask in which stop tokens are allowed where the end token is; one that is forced is alone."""
        mask = found.mask
        if self._stops and not found.forced and mask[self._ends[0] >> 5] >> (self._ends[0] & 31) & 1:
            mask = mask.copy()
            for stop in self._stops:
                mask[stop >> 5] |= np.uint32(1 << (stop & 31)).view(np.int32)
        return mask

    def _as_end(self, token: int) -> int:
        """Returns the end token that a stop token is taken as; any other token itself."""
        return self._ends[0] if token in self._stops else token

    @property
    def can_only_end(self) -> bool:
        """Whether the output is complete, and nothing can follow."""
        return not isinstance(self._matcher, RequestFault) and self._matcher.is_stopped()


def _fault_of(matcher: Matcher, what: str) -> RequestFault:
    return RequestFault(f"structured_output cannot be kept: {what} ({matcher.stop_reason()})")
