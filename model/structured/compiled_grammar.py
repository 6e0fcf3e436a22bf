"""A compiled grammar: matchers at the start of an output, and a completion from there, which all outputs share."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from model.inputs.matcher import Matcher
from model.structured.closing import Find
from model.structured.forcing import Forcing
from model.structured.next_tokens import Openings, next_tokens

MOST_COMPILED = 8  # times that a grammar is compiled
WORTH = 0.25  # seconds of its masks for each time that it was compiled: some ten times what the next one takes
START_SECONDS = 0.05  # of processor time, for the token that is forced at the start
TRIES = 2  # searches for a completion: a busy host may take the time of one


class CompiledGrammar:
    """One grammar.

    Copies of a matcher share its lexer, and a lock on that: of rows with one grammar only one computes its mask at a
    time. So a grammar whose masks take long is compiled several times, and rows have these in turn.

    Attributes:
        openings: What may follow in the first states of its outputs.
    """

    def __init__(self, matcher: Matcher, find: Find) -> None:
        """Makes it of the first matcher.

        Args:
            matcher: At the start of an output.
            find: Finds completions.
        """
        self._matchers, self._find = [matcher], find
        self.openings = Openings()
        self._lent = 0  # matchers
        self._seconds = 0.0  # of processor time, of masks
        self._asked = False  # for another matcher
        self._paths: dict[tuple[int, ...], list[int] | None] = {}  # by the tokens that end reasoning
        self._tries = dict[tuple[int, ...], int]()
        self._lock, self._searching = threading.Lock(), threading.Lock()

    @property
    def times(self) -> int:
        """How often it was compiled."""
        return len(self._matchers)

    def matcher(self) -> tuple[Matcher, int]:
        """Returns a matcher at the start of an output, and a number that those have which share its lock."""
        with self._lock:
            self._lent += 1
            shared = self._matchers[self._lent % len(self._matchers)]
        return shared.deep_copy(), id(shared)

    def took(self, seconds: float) -> None:
        """Counts the processor time of a mask."""
        self._seconds += seconds

    def compile_again(self, threads: int, submit: Callable[[], object]) -> None:
        """Asks once for another matcher, where several threads compute masks, and its masks take long.

        Args:
            threads: They compute masks.
            submit: Has another matcher compiled, and given to `add`.
        """
        with self._lock:
            times = len(self._matchers)
            if self._asked or times >= min(threads, MOST_COMPILED) or self._seconds < WORTH * times:
                return
            self._asked = True
        submit()

    def look_at_start(self, forcing: Forcing, ends: Sequence[int]) -> None:
        """Finds what may follow at the start, so that no output's first token waits for that.

        Args:
            forcing: Of the vocabulary.
            ends: End tokens.
        """
        with suppress(TimeoutError):  # the first mask of an output tries again, and says so
            found = next_tokens(self._matchers[0].deep_copy(), forcing, ends, START_SECONDS)
            if found is not None:
                self.openings.keep((), found)

    def add(self, matcher: Matcher) -> None:
        """Takes another matcher of the same grammar."""
        with self._lock:
            self._matchers.append(matcher)
            self._asked = False

    def path(self, reasoning_end: Sequence[int] = ()) -> list[int] | None:
        """Returns a completion from the start; None where none is found. Searches for it when it is not known yet.

        Args:
            reasoning_end: Tokens that end the reasoning, which comes first; () where there is none.
        """
        key = (*reasoning_end,)
        with self._searching:
            if self._paths.get(key) is None and self._tries.get(key, 0) < TRIES:
                self._tries[key] = self._tries.get(key, 0) + 1
                self._paths[key] = self._find(self._matchers[0].deep_copy(), 0, reasoning_end)
            return self._paths[key]
