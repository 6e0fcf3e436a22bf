"""Compiled grammars of requests that an engine has: none is compiled again while its request waits for a row."""

import weakref
from collections import Counter, deque
from concurrent.futures import Future

from model.structured.compiled_grammar import CompiledGrammar

Key = tuple[str, str]
"""A grammar, and the salt of those who share its compiled form."""


class HeldGrammars:
    """Keeps compiled grammars as long as their requests live, within a bound. One thread changes it.

    Args:
        most: Count of grammars.
        most_text: Characters of them all.
    """

    def __init__(self, most: int, most_text: int) -> None:
        self._most, self._most_text, self._text = most, most_text, 0
        self._kept: dict[Key, tuple[Future[CompiledGrammar], int]] = {}  # with its characters
        self._owners = Counter[Key]()
        self._ended = deque[Key]()  # of requests that live no more; any thread may be the one that drops them

    def __len__(self) -> int:
        """Count of grammars."""
        return len(self._kept)

    def hold(self, owner: object, key: Key, grammar: Future[CompiledGrammar], size: int) -> None:
        """Keeps a grammar until an object is dropped. Does nothing where that exceeds the bound.

        Args:
            owner: The object.
            key: Key of the grammar.
            grammar: The grammar, compiled.
            size: Characters that it counts as.
        """
        self.forget_ended()
        if key not in self._kept:
            if len(self._kept) >= self._most or self._text + size > self._most_text:
                return
            self._kept[key] = grammar, size
            self._text += size
        self._owners[key] += 1
        weakref.finalize(owner, self._ended.append, key).atexit = False

    def grew(self, key: Key, size: int) -> None:
        """Counts more characters for a grammar that is held. It is kept beyond the bound too: others are not then."""
        grammar, before = self._kept[key]
        self._kept[key] = grammar, before + size
        self._text += size

    def get(self, key: Key) -> Future[CompiledGrammar] | None:
        """Returns a grammar; None for one that is not held."""
        grammar, _ = self._kept.get(key, (None, 0))
        return grammar

    def forget_ended(self) -> None:
        """Drops the grammars that no object keeps any more."""
        while self._ended:
            key = self._ended.popleft()
            self._owners[key] -= 1
            if not self._owners[key]:
                del self._owners[key]
                self._text -= self._kept.pop(key)[1]
