"""Text that comes in parts, for readers that wait for more of it.

A reader is a generator: it yields where it needs text that has not come. So a parser reads as if all text were there,
and any cutting of the text into parts gives the same result.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
Waiting = Generator[None, None, T]

LITERAL_PARTS = re.compile(r"\s+|\S+")


class Source:
    """Text so far, and how much of it was read.

    Attributes:
        text: Text from some point on; what was read is dropped, unless it is pinned.
        at: Index in `text` of what is read next.
        ended: No more text comes.
        pinned: Readers that may go back.
        limit: Index at which the text ends for readers, while it is pinned; None for none.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended, self.pinned = "", 0, False, 0
        self.limit: int | None = None

    @property
    def end(self) -> int:
        """Index behind the text that can be read."""
        return len(self.text) if self.limit is None else min(len(self.text), self.limit)

    @property
    def over(self) -> bool:
        """Whether no more text than that comes for readers."""
        return self.ended or (self.limit is not None and len(self.text) >= self.limit)

    def push(self, part: str) -> None:
        """Appends text."""
        if self.pinned:
            self.text += part
        else:
            self.text, self.at = self.text[self.at :] + part, 0

    def peek(self) -> Waiting[str]:
        """Returns the next character, without reading it; "" at the end."""
        while self.at >= self.end and not self.over:
            yield
        return self.text[self.at : min(self.at + 1, self.end)]

    def skip_space(self) -> Waiting[str]:
        """Skips whitespace. Returns the next character, without reading it; "" at the end."""
        while (char := (yield from self.peek())).isspace():
            self.at += 1
        return char

    def literal(self, literal: str) -> Waiting[bool]:
        """Reads a literal, whose whitespace stands for any or none. Returns whether it came; else nothing is read."""
        before = self.at
        self.pinned += 1
        try:
            for part in LITERAL_PARTS.findall(literal):
                if part.isspace():
                    yield from self.skip_space()
                elif (yield from self._comes(part)):
                    self.at += len(part)
                else:
                    self.at = before
                    return False
        finally:
            self.pinned -= 1
        return True

    def _comes(self, part: str) -> Waiting[bool]:
        while not self.text.startswith(part, self.at, self.end):
            if self.over or not part.startswith(self.text[self.at : self.end]):
                return False
            yield
        return True

    def matching(self, allowed: re.Pattern[str], most: int) -> Waiting[str]:
        """Reads characters that each match. Returns them, "" where there are none or more than `most`."""
        end = self.at
        self.pinned += 1
        try:
            while True:
                while end < self.end and allowed.fullmatch(self.text[end]):
                    end += 1
                if end - self.at > most:
                    return ""
                if end < self.end or self.over:
                    break
                yield
        finally:
            self.pinned -= 1
        found, self.at = self.text[self.at : end], end
        return found

    def until(self, stops: tuple[str, ...], give: Callable[[str], None]) -> Waiting[str | None]:
        """Gives out text as it comes, up to the first stop, which is read too.

        Args:
            stops: Texts, none of them empty. Of those that begin at one place the first counts.
            give: Takes text.

        Returns:
            The stop; None at the end of the text.
        """
        pattern, firsts = _pattern(stops)
        while True:
            found = pattern.search(self.text, self.at, self.end)
            if found is not None:
                self._give(found.start(), give)
                self.at = found.end()
                return found.group()
            if self.over:
                self._give(self.end, give)
                return None
            self._give(self._possible_start(stops, firsts), give)
            yield

    def _give(self, end: int, give: Callable[[str], None]) -> None:
        if end > self.at:
            give(self.text[self.at : end])
            self.at = end

    def _possible_start(self, stops: tuple[str, ...], firsts: frozenset[str]) -> int:
        """Returns the index at which a stop may have begun; the length of the text for none."""
        text = self.text if self.limit is None else self.text[: self.end]
        longest = max(map(len, stops)) - 1
        for start in range(max(self.at, len(text) - longest), len(text)):
            if text[start] in firsts and any(stop.startswith(text[start:]) for stop in stops):
                return start
        return len(text)


@cache
def _pattern(stops: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str]]:
    return re.compile("|".join(map(re.escape, stops))), frozenset(stop[0] for stop in stops)


class JsonEnd:
    """Finds the end of a JSON value in text that comes in parts."""

    STRUCTURE = re.compile(r'["{}\[\]]')
    IN_TEXT = re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth, self._in_text, self._escaped = 0, False, False

    def feed(self, text: str, start: int, end: int) -> int | None:
        """Reads more of an object, an array or a text: `text[start:end]`.

        Returns:
            The index behind its end; None before it.
        """
        at = start
        if self._escaped and at < end:
            self._escaped, at = False, at + 1
        while found := (self.IN_TEXT if self._in_text else self.STRUCTURE).search(text, at, end):
            at = found.end()
            match found.group():
                case '"':
                    self._in_text = not self._in_text
                    if not self._in_text and not self._depth:
                        return at
                case "\\":
                    if at == end:
                        self._escaped = True
                        return None
                    at += 1
                case "{" | "[":
                    self._depth += 1
                case _:
                    self._depth -= 1
                    if self._depth <= 0:
                        return at
        return None
