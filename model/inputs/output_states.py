"""Whether texts are complete outputs of their constraints, in the process that tries grammars.

A stop string within values is found again and again, each time behind a longer text of the same output. So the states
behind the last texts are kept, and a text that begins with one of them is read from there on.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from model.inputs.matcher import Matcher

MOST_KEPT, MOST_TEXT = 64, 2**21  # states, and characters of all; a state behind 83,000 bytes of JSON takes 6 MiB


class OutputText(NamedTuple):
    """A beginning of an output, and its constraint."""

    kind: str
    constraint: str
    text: str


class OutputStates:
    """Answers questions about outputs.

    Args:
        start: Returns the matcher of a constraint at the start of an output, which is not changed, and the marks of its
            special tokens.
        encoded: Returns the tokens of a text with these marks.
        most: States that are kept.
    """

    def __init__(
        self,
        start: Callable[[str, str], tuple[Matcher, list[str]]],
        encoded: Callable[[str, list[str]], Sequence[int]],
        most: int = MOST_KEPT,
    ) -> None:
        self._start, self._encoded, self._most = start, encoded, most
        self._kept: OrderedDict[OutputText, tuple[Matcher, list[str]]] = OrderedDict()

    def __len__(self) -> int:
        """The number of states."""
        return len(self._kept)

    def is_complete(self, kind: str, constraint: str, text: str) -> bool:
        """Returns whether a marked text is a complete output of a constraint. Raises GrammarRefused."""
        begun = [one for one in self._kept if one[:2] == (kind, constraint) and text.startswith(one.text)]
        before = max(begun, key=lambda one: len(one.text), default=None)
        if before is None:
            matcher, marks = self._start(kind, constraint)
            state, rest = matcher.deep_copy(), text
        else:
            (state, marks), rest = self._kept.pop(before), text[len(before.text) :]
        tokens = self._encoded(rest, marks)
        if (taken := state.try_consume_tokens([*tokens])) < len(tokens):
            if before is not None and not taken:
                self._kept[before] = state, marks
            return False
        self._kept[OutputText(kind, constraint, text)] = state, marks
        while len(self._kept) > self._most or sum(len(one.text) for one in self._kept) > MOST_TEXT:
            self._kept.popitem(last=False)
        return state.is_accepting()
