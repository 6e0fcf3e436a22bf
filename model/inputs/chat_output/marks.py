"""Special tokens within a model's output, as single characters.

A parser of plain text cannot tell a special token from the same letters that the model or its user has written out. So
each special token of a format becomes one character that no decoded text has: a lone surrogate. Formats, output and
grammars are all put into this form.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from model.inputs.chat_output.formats import ParameterTags

FIRST, MOST = 0xD800, 2048  # surrogates
MARKS = f"{chr(FIRST)}-{chr(FIRST + MOST - 1)}"  # for classes of characters in expressions
NOT_LITERAL = ("name", "id_pattern", "call_id")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Marks:
    """Characters of special tokens.

    Attributes:
        characters: By the token's text.
        ids: Token id of each character.
        by_id: Characters by the token's id.
    """

    characters: Mapping[str, str]
    ids: Mapping[str, int]
    by_id: Mapping[int, str]

    @staticmethod
    def of(special: Mapping[int, str], formats: list[Any]) -> "Marks":
        """Returns the marks of formats.

        Args:
            special: The model's special tokens, text by id.
            formats: Instances of `ToolFormat` and `ReasoningFormat`.
        """
        literals = {text for one in formats for text in _literals(one)}
        used = [i for i, text in sorted(special.items()) if text and any(text in literal for literal in literals)]
        chars = {i: chr(FIRST + n) for n, i in enumerate(used[:MOST])}
        by_text = {special[i]: char for i, char in chars.items()}
        return Marks(by_text, {char: i for i, char in chars.items()}, chars)

    def more(self, special: Mapping[int, str], literals: list[str]) -> dict[str, int]:
        """Returns token ids by marks of the special tokens that some other literals have.

        Args:
            special: The model's special tokens, text by id.
            literals: The literals.
        """
        whole = "\n".join(literals)
        used = [i for i, text in sorted(special.items()) if text and text in whole]
        known = len(self.by_id)
        fresh = iter(range(FIRST + known, FIRST + MOST))
        chars = {i: self.by_id[i] if i in self.by_id else chr(next(fresh)) for i in used[: MOST - known]}
        return {char: i for i, char in chars.items()}

    def marked(self, text: str) -> str:
        """Returns a text with its special tokens as characters."""
        for token in sorted(self.characters, key=len, reverse=True):
            text = text.replace(token, self.characters[token])
        return text

    def shown(self, text: str) -> str:
        """Returns an output with the special tokens' texts in place of their characters."""
        if text.isascii():
            return text
        for token, char in self.characters.items():
            text = text.replace(char, token)
        return text

    def bound(self, form: T) -> T:
        """Returns a format whose literals are marked."""
        changes: dict[str, Any] = {}
        for field in fields(form):  # type: ignore[arg-type] # a dataclass
            value = getattr(form, field.name)
            if field.name in NOT_LITERAL or field.name == "keys":
                continue
            if isinstance(value, str):
                changes[field.name] = self.marked(value)
            elif isinstance(value, ParameterTags):
                changes[field.name] = self.bound(value)
            elif isinstance(value, tuple):
                changes[field.name] = tuple(map(self.marked, value))
        return replace(form, **changes)  # type: ignore[type-var]


def _literals(form: Any) -> list[str]:
    found = []
    for field in fields(form):
        value = getattr(form, field.name)
        if field.name in NOT_LITERAL:
            continue
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, ParameterTags):
            found += _literals(value)
        elif isinstance(value, tuple):
            found += value
    return found
