"""Closes an output in time: near its last token, no token is kept after which it could not be completed any more.

From some tokens before the end on, a completion of the output so far is known, and it fits. A drawn token is kept where
the output behind it has a completion that fits too. Else the completion's next token takes its place. So an output that
can be completed within its tokens is complete at the end. It is not where a completion is so long that none fits when
it is first looked for, or where none is found in the time of a search.

An output may also be asked to be complete within fewer tokens, as its time runs out. Then a completion that does not
fit these is followed too, as far as it fits all tokens.

Within reasoning any text may follow, so that no search would find its end. A completion there begins with the tokens of
that end.

What is kept depends on the output alone, so that it is the same after a preemption and on another engine; only searches
that run out of time twice may find more elsewhere.
"""

import copy
from collections.abc import Callable, Sequence

from model.inputs.completion import Completions
from model.inputs.matcher import Matcher

AHEAD, MORE = 4, 128  # it begins when this many times the longest completion so far, and more tokens, are left
EVERY = 32  # tokens, after which that completion is looked at before
ANY = 2**31  # tokens
MOST_CHARACTER = 4  # bytes of a character

Find = Callable[[Matcher, int, Sequence[int]], list[int] | None]
"""Finds a completion of an output, as `completed` does with some `Completions`."""


def completed(completions: Completions, matcher: Matcher, room: int, reasoning_end: Sequence[int]) -> list[int] | None:
    """Finds a completion of an output.

    Args:
        completions: Finds completions where there is no reasoning.
        matcher: The constraint, at the end of the output. It is not changed.
        room: Tokens that it may have. Where the first that is found has more, a shorter one is searched for.
        reasoning_end: Tokens that end the reasoning, where it may not be over; () where it is, or there is none.

    Returns:
        The completion; None where none is found in time.
    """
    if reasoning_end and not matcher.is_accepting():
        end, first, begun = [*reasoning_end], list[int](), matcher.deep_copy()
        while len(first) < MOST_CHARACTER:
            behind = begun.deep_copy()
            if behind.try_consume_tokens(end) == len(end):
                # Where a text may go on as before, it is not the reasoning that has the end's letters in it.
                if behind.compute_bitmask() == begun.compute_bitmask():
                    break
                rest = completions.find(behind, room - len(first) - len(end))
                return None if rest is None else [*first, *end, *rest]
            # A character that has begun comes to its end first.
            if (token := completions.any_byte(begun)) is None or not begun.consume_token(token):
                break
            first.append(token)
    return completions.find(matcher, room)


def _completes(matcher: Matcher, path: list[int]) -> bool:
    completed = matcher.deep_copy()
    return completed.try_consume_tokens(path) == len(path) and completed.is_accepting()


class Closing:
    """Closes one output."""

    def __init__(
        self,
        completions: Completions,
        most: int,
        shortest: int,
        reasoning_end: Sequence[int] = (),
        start: Callable[[], list[int] | None] | None = None,
    ) -> None:
        """Makes it at the start of an output.

        Args:
            completions: Finds completions.
            most: Tokens that the output may have.
            shortest: Tokens of a short output.
            reasoning_end: Tokens that end the reasoning, which may come first; () where there is none.
            start: Returns a completion from the start, None where none is found. Without it that is searched for.
        """
        self._start = start
        self._completions, self._longest = completions, shortest
        self._all = self._most = most  # tokens that it may have, and within which it is to be complete
        self._end, self._end_text = [*reasoning_end], completions.text(reasoning_end)
        self._tail = b""  # of the output, while its reasoning is not over
        self._position = 0  # of the next draw
        self._offset = 0  # of the positions at which completions are looked at, so that not all rows do in one step
        self._given_up = False
        self._in_vain = False  # two searches in a row have found nothing
        self._path: list[int] | None = None  # completes the output so far
        self._next: dict[int, list[int] | None] = {}  # paths behind drawn tokens

    @property
    def near(self) -> bool:
        """Whether the next draw has to be looked at."""
        return self._is_near(self._position)

    @property
    def soon(self) -> bool:
        """Whether that may be so, while the token of one draw is not known yet."""
        return self._is_near(self._position + 1)

    @property
    def undisturbed(self) -> int:
        """Number of next tokens before one that is looked at, or behind which completions are."""
        if self._given_up:
            return ANY
        near = self._most - AHEAD * self._longest - MORE
        return max(0, min(near - self._position, -(self._position + self._offset) % EVERY))

    def _is_near(self, position: int) -> bool:
        return not self._given_up and position + AHEAD * self._longest + MORE >= self._most

    def settled(self, matcher: Matcher, token: int, search: bool = True) -> int:
        """Returns the token that is kept in place of a drawn one.

        Args:
            matcher: The constraint before the token. It is not changed.
            token: The drawn token.
            search: Look for another completion behind the token where the known one does not fit.
        """
        if (path := self._path_here(matcher)) is None:
            return token
        left = self._left(path)
        behind = self._path_behind(matcher, path, token, left - 1, search)
        if behind is None or len(behind) >= left:
            token, behind = (path[0], path[1:]) if path else (self._completions.end, [])
        self._next[token] = behind
        return token

    def drew(self, matcher: Matcher, token: int) -> None:
        """Records the next output token.

        Args:
            matcher: The constraint before the token. It is not changed.
            token: The token.
        """
        if self.near:
            if (path := self._path_here(matcher)) is not None:
                room = self._all - self._position - 1
                known = token in self._next
                self._path = self._next[token] if known else self._path_behind(matcher, path, token, room)
                if self._path is None:
                    self._give_up()
        else:
            self._path = None  # of an output that went on since
            if not self._given_up and (self._position + self._offset) % EVERY == 0:
                path = self._find_here(matcher, ANY)
                self._longest = max(self._longest, len(path or ()))
        self._watch_reasoning(token)
        if not self._position:
            self._offset = token % EVERY
        self._next = {}
        self._position += 1

    def close_within(self, most: int) -> None:
        """Has the output be complete within fewer tokens, where it can. most: tokens of the whole output."""
        self._most = min(self._all, most)

    def copy(self) -> "Closing":
        """Returns it in the same state, within all tokens: who goes on from there may have more time."""
        made = copy.copy(self)
        made._most, made._next = self._all, dict(self._next)
        return made

    def _give_up(self) -> None:
        """Closes the output no more; where it had fewer tokens for lack of time alone, within these no more."""
        if self._most < self._all and self._position + AHEAD * self._longest + MORE < self._all:
            self._most, self._path = self._all, None
        else:
            self._given_up = True

    def _left(self, path: Sequence[int]) -> int:
        """Returns within how many tokens the output is to be complete. path: completes it so far."""
        return max(self._most - self._position, len(path))

    def _path_here(self, matcher: Matcher) -> list[int] | None:
        """Returns a completion that fits; None where none is found, and from then on."""
        left = self._all - self._position
        if self._path is None:
            self._path = self._find_here(matcher, left)
        if self._path is None or len(self._path) > left:
            self._give_up()
            return None
        return self._path

    def _path_behind(
        self, matcher: Matcher, path: list[int], token: int, room: int, search: bool = True
    ) -> list[int] | None:
        """Returns a completion of the output with one more token.

        Args:
            matcher: The constraint before it.
            path: A completion without it.
            token: The token.
            room: Tokens that it may have.
            search: As in `settled`.
        """
        if path and token == path[0]:
            return path[1:]
        behind = matcher.deep_copy()
        if not behind.consume_token(token):
            return None
        if behind.is_stopped():
            return []
        if _completes(behind, path):
            return path
        rest = self._completions.rest(path, token)
        if rest is not None and len(rest) <= room and _completes(behind, rest):
            return rest
        return self._find(behind, room) if search else None

    def _find_here(self, matcher: Matcher, room: int) -> list[int] | None:
        """Returns a completion of the output so far; None where none is found. Arguments as of `_find`."""
        if self._start is not None and not self._position:
            return self._start()
        return self._find(matcher, room)

    def _find(self, matcher: Matcher, room: int) -> list[int] | None:
        """Returns a completion; None where none is found. room: tokens that it may have.

        Searches once more where nothing is found, as a pause of the machine takes the time of one search only. Not
        again for an output where that was in vain.
        """
        found = completed(self._completions, matcher, room, self._end)
        if found is None and not self._in_vain:
            found = completed(self._completions, matcher, room, self._end)
            self._in_vain = found is None
        return found

    def _watch_reasoning(self, token: int) -> None:
        """Looks for the end of the reasoning, behind which there is no other."""
        if self._end:
            self._tail += self._completions.text([token])
            if self._end_text in self._tail:
                self._end = []
            self._tail = self._tail[-len(self._end_text) :]
