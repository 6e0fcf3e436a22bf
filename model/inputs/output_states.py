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


class CompleteEnds(NamedTuple):
    """Answer about beginnings of a text.

    Attributes:
        complete: Lengths of those that are complete outputs, in ascending order.
        over: One of them begins no output, so no longer text does.
    """

    complete: list[int]
    over: bool


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
        return bool(self.complete_ends(kind, constraint, text, (len(text),)).complete)

    def complete_ends(self, kind: str, constraint: str, text: str, ends: Sequence[int]) -> CompleteEnds:
        """Returns which beginnings of a marked text are complete outputs of a constraint.

        Reads the text once, so the work grows with its length and not with the number of beginnings.

        Args:
            kind: Kind of the constraint.
            constraint: The constraint.
            text: The text.
            ends: Lengths of the beginnings, in ascending order.

        Raises:
            GrammarRefused: The constraint cannot be enforced.
        """
        first = text[: ends[0]]
        begun = [one for one in self._kept if one[:2] == (kind, constraint) and first.startswith(one.text)]
        before = max(begun, key=lambda one: len(one.text), default=None)
        if before is None:
            matcher, marks = self._start(kind, constraint)
            state, read = matcher.deep_copy(), 0
        else:
            (state, marks), read = self._kept.pop(before), len(before.text)
        complete = list[int]()
        for end in ends:
            tokens = self._encoded(text[read:end], marks)
            if (taken := state.try_consume_tokens([*tokens])) < len(tokens):
                if read and not taken:
                    self._keep(OutputText(kind, constraint, text[:read]), state, marks)
                return CompleteEnds(complete, over=True)
            read = end
            if state.is_accepting():
                complete.append(end)
        self._keep(OutputText(kind, constraint, text[:read]), state, marks)
        return CompleteEnds(complete, over=False)

    def _keep(self, text: OutputText, state: Matcher, marks: list[str]) -> None:
        self._kept[text] = state, marks
        while len(self._kept) > self._most or sum(len(one.text) for one in self._kept) > MOST_TEXT:
            self._kept.popitem(last=False)
