"""Closes an output in time: near its last token, no token is kept after which it could not be completed any more.

From some tokens before the end on, a completion of the output so far is known, and it fits. A drawn token is kept where
the output behind it has a completion that fits too. Else the completion's next token takes its place. So an output that
can be completed within its tokens is complete at the end.

The completion depends on the output alone, so that the output is the same after a preemption and on another engine.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from model.inputs.completion import Completions

AHEAD, MORE = 4, 32  # it begins when this many times the shortest output, and some tokens more, are left


class Closing:
    """What closes one output."""

    def __init__(self, completions: "Completions", most: int, shortest: int) -> None:
        """Makes it at the start of an output.

        Args:
            completions: Finds completions.
            most: Tokens that the output may have.
            shortest: Tokens of a short output.
        """
        self._completions, self._most = completions, most
        self._begins = max(0, most - AHEAD * shortest - MORE)  # position of the first draw that it looks at
        self._position = 0  # of the next draw
        self._path: list[int] | None = None  # completes the output so far
        self._next: tuple[int, list[int] | None] | None = None  # a drawn token, and the path behind it

    @property
    def near(self) -> bool:
        """Whether the next draw has to be looked at."""
        return self._position >= self._begins

    @property
    def soon(self) -> bool:
        """Whether that may be so, while the token of one draw is not known yet."""
        return self._position + 1 >= self._begins

    def settled(self, matcher: "LLMatcher", token: int) -> int:
        """Returns the token that is kept in place of a drawn one.

        Args:
            matcher: The constraint before the token. It is not changed.
            token: The drawn token.
        """
        left = self._most - self._position
        if self._path is None:
            self._path = self._completions.find(matcher, left)
        path = self._path
        if path is None or len(path) > left:
            self._begins = self._most  # there is no way to close it in time, or none that is found soon
            return token
        behind = self._path_behind(matcher, path, token, left - 1)
        if behind is None or len(behind) >= left:
            token, behind = (path[0], path[1:]) if path else (self._completions.end, [])
        self._next = token, behind
        return token

    def drew(self, matcher: "LLMatcher", token: int) -> None:
        """Records the next output token.

        Args:
            matcher: The constraint before the token. It is not changed.
            token: The token.
        """
        if self.near:
            left = self._most - self._position
            if self._path is None:
                self._path = self._completions.find(matcher, left)
            known = self._next is not None and self._next[0] == token
            behind = self._next[1] if known and self._next else None
            self._path = behind if known else self._path_behind(matcher, self._path, token, left - 1)
            if self._path is None:
                self._begins = self._most
        self._next = None
        self._position += 1

    def _path_behind(self, matcher: "LLMatcher", path: list[int] | None, token: int, room: int) -> list[int] | None:
        """Returns a completion of the output with one more token.

        Args:
            matcher: The constraint before it.
            path: A completion without it.
            token: The token.
            room: Tokens that it may have.
        """
        if path and token == path[0]:
            return path[1:]
        behind = matcher.deep_copy()
        if not behind.consume_token(token):
            return None
        if behind.is_stopped():
            return []
        if path is not None:
            completed = behind.deep_copy()
            if completed.try_consume_tokens(path) == len(path) and completed.is_accepting():
                return path
        return self._completions.find(behind, room)
