"""The grammar of structural tags, in llguidance's form.

Free text is one lexeme up to a trigger, which ends it at its first occurrence (`lazy`), and another one without any
trigger up to the end of the output. llguidance's lexer takes the longest lexeme otherwise. So content that may have the
letters of its end marker, as of a regular expression, is one lazy lexeme with that marker.

Runs in the process that tries grammars, as schemas of clients are untrusted.
"""

import json
import re
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

from llguidance import LLMatcher

from model.inputs.completion import MOST_ENDS, named_end
from model.inputs.grammars import (
    JSON_FORM,
    LITERALS,
    GrammarRefused,
    escaped,
    grammar_of,
    quoted,
    read_schema,
    unforced,
)
from scheduler.structural_tags import StructuralTags, Tag, read_tags
from scheduler.structured import FIELD, GRAMMAR, JSON_SCHEMA, REGEX, STRUCTURAL_TAG

ANY = "(?s:.*)"
FREE, FIRST = "free", "first"
OF_NUMBER, NO_NUMBERS = "0123456789.eE", ("object", "array", "string", "boolean", "null")
PATH = f"{FIELD}.{STRUCTURAL_TAG}"


def grammar_of_any(kind: str, text: str) -> str:
    """Returns a constraint of any kind, as `grammar_of` does.

    Raises:
        GrammarRefused: It is malformed, or cannot be enforced. Names the field where it is a tag's content.
    """
    return unforced(TagGrammar(text).make()) if kind == STRUCTURAL_TAG else grammar_of(kind, text)


class TagGrammar:
    """Makes the grammar of some tags.

    Attributes:
        tags: The tags.
    """

    def __init__(self, text: str, special: Mapping[str, str] | None = None) -> None:
        """Makes it.

        Args:
            text: The tags, as in `scheduler.structured.Structured`.
            special: Texts of the model's special tokens, by the character that stands for each; see
                `model.inputs.chat_output.marks`.
        """
        self.tags: StructuralTags = read_tags(text, PATH)
        self._marks = {token: mark for mark, token in (special or {}).items()}
        self._rules: list[str] = []
        self._named: list[dict[str, Any]] = []

    def make(self, excluded: str = "") -> list[dict[str, Any]]:
        """Returns the grammars, of which the first is that of the output.

        Args:
            excluded: Expression of texts that free text at the beginning of the output is none of; "" for none.

        Raises:
            GrammarRefused: The content of a tag cannot be enforced. Names the field.
        """
        begins = [self.marked(tag.begin) for tag in self.tags.tags]
        bodies = [self._body(i, tag) for i, tag in enumerate(self.tags.tags)]
        ends = dict.fromkeys(tag.end for tag in self.tags.tags if tag.kind != JSON_SCHEMA and "<[" not in tag.end)
        names = [self._end(i, self.marked(end)) for i, end in enumerate([*ends][:MOST_ENDS])]
        start = " | ".join(self._sequence(*names, one) for one in self._starts(begins, bodies, excluded))
        self._rules.append(f"start: {start}")
        return [{"name": "tags", "lark_grammar": "\n".join(self._rules)}, *self._named]

    def _starts(self, begins: list[str], bodies: list[str], excluded: str) -> list[str]:
        """Returns the alternatives of the output. Arguments as in `_segments`."""
        if self.tags.at_least_one:
            wholes = (self._sequence(self.literal(begin), body) for begin, body in zip(begins, bodies, strict=True))
            self._rules.append(f"leading: {' | '.join(wholes)}")
            more = [] if self.tags.stop_after_first else [self._segments(FREE, begins, bodies) + "* FREE_TEXT"]
            return [self._sequence("leading", *more)]
        if self.tags.stop_after_first:
            return [self._segments(FIRST, begins, bodies, excluded), "FIRST_TEXT"]
        segment = self._segments(FREE, begins, bodies)
        if not excluded:
            return [f"{segment}* FREE_TEXT"]
        return [f"{self._segments(FIRST, begins, bodies, excluded)} {segment}* FREE_TEXT", "FIRST_TEXT"]

    def _end(self, number: int, end: str) -> str:
        """Adds a rule that names the end of a content, and returns its name."""
        self._rules.append(named_end(f"end_{number}", end))
        return f"end_{number}"

    def marked(self, text: str) -> str:
        """Returns a text with the marks of its special tokens."""
        for token in sorted(self._marks, key=len, reverse=True):
            text = text.replace(token, self._marks[token])
        return text

    def literal(self, text: str) -> str:
        """Returns a marked text as symbols of the grammar."""
        parts = re.split("([" + "".join(self._marks.values()) + "])" if self._marks else "(?!)", text)
        return " ".join(part if part in self._marks.values() else quoted(part) for part in parts if part)

    def _sequence(self, *parts: str) -> str:
        return " ".join(part for part in parts if part) or '""'

    def _segments(self, name: str, begins: list[str], bodies: list[str], excluded: str = "") -> str:
        """Adds rules of free text with a tag behind it, and of free text without one.

        Args:
            name: Front of the rules' names.
            begins: Marked text before each tag's content.
            bodies: Symbols of each tag behind it.
            excluded: See `make`.

        Returns:
            The name of the rule of text with a tag.
        """
        heads: dict[tuple[str, bool], list[str]] = {}
        for tag, begin, body in zip(self.tags.tags, begins, bodies, strict=True):
            before, rest = self._at_mark(begin, len(tag.trigger))
            head, rest = (before, rest) if before is not None else (tag.trigger, rest)
            symbols = self._sequence(self.literal(rest), body)
            heads.setdefault((head, before is None), []).append(symbols)
        lazy = [head for head, is_text in heads if is_text]
        # A trigger that the model writes as a special token is none that it spells.
        spelled = [tag.trigger for tag in self.tags.tags if tag.trigger not in lazy]
        outer = f" & ~/{excluded}/" if excluded else ""
        for number, ((head, is_text), rests) in enumerate(heads.items()):
            rule, upper = f"{name}_{number}", f"{name}_{number}".upper()
            none = _without(spelled if is_text else [*lazy, *spelled])
            self._rules.append(f"{upper}: /{ANY}{escaped(head)}/{none}{outer}")
            self._rules.append(f"{rule}_head{'[lazy]' if is_text else ''}: {upper}")
            self._rules.append(f"{rule}: {rule}_head ({' | '.join(rests)})")
        self._rules.append(f"{name.upper()}_TEXT: /{ANY}/{_without([*lazy, *spelled])}{outer}")
        self._rules.append(f"{name}: " + " | ".join(f"{name}_{number}" for number in range(len(heads))))
        return name

    def _at_mark(self, begin: str, trigger: int) -> tuple[str | None, str]:
        """Cuts a tag's begin before the special token that its trigger has.

        Args:
            begin: The begin, marked.
            trigger: Characters of the trigger, unmarked.

        Returns:
            What stands before the first such token, None where there is none; and the rest, behind the trigger then.
        """
        tokens = {mark: token for token, mark in self._marks.items()}
        starts = accumulate((len(tokens.get(char, char)) for char in begin), initial=0)
        for i, (char, start) in enumerate(zip(begin, starts, strict=False)):
            if start >= trigger:
                return None, begin[i:]
            if char in tokens:
                return begin[:i], begin[i:]
        return None, ""

    def _body(self, number: int, tag: Tag) -> str:
        """Returns the symbols of a tag's content and end."""
        name, end = f"tag_{number}", self.marked(tag.end)
        try:
            if tag.kind == JSON_SCHEMA:
                schema = read_schema(tag.text)
                if tag.end[0] in OF_NUMBER and schema.get("type") not in NO_NUMBERS:
                    kinds = ", ".join(NO_NUMBERS)
                    raise GrammarRefused(f"needs a type of {kinds}: a number could go on with the end's {tag.end[0]}")
                self._named.append({"name": name, "json_schema": {**schema, "x-guidance": JSON_FORM}})
                return self._sequence("@" + name, self.literal(end))
            if tag.kind == GRAMMAR:
                if "@" in LITERALS.sub("", tag.text):
                    raise GrammarRefused("names of other grammars (@) are not supported in a grammar")
                self._named.append({"name": name, "lark_grammar": grammar_of(GRAMMAR, tag.text)})
                return self._sequence("@" + name, self.literal(end))
            # An end marker that the model writes as a special token is none that it spells.
            spelled = [] if end == tag.end else [tag.end]
            return self._up_to(name, self._pattern(tag) + _without(spelled), end)
        except GrammarRefused as refused:
            raise GrammarRefused(str(refused), tag.field) from None

    def _pattern(self, tag: Tag) -> str:
        if tag.kind != REGEX:
            return f"/{ANY}/"
        made = json.loads(LLMatcher.grammar_from_regex(tag.text))["grammars"][0]["lark_grammar"]
        return str(made.removeprefix("start: "))

    def _up_to(self, name: str, pattern: str, end: str) -> str:
        """Adds rules of content that a pattern matches, up to the first end marker behind which it may end."""
        at = next((i for i, char in enumerate(end) if char in self._marks.values()), len(end))
        self._rules.append(f"{name.upper()}: {pattern}")
        if not end[at:]:
            self._rules.append(f"{name.upper()}_END: {name.upper()} {quoted(end)}")
            self._rules.append(f"{name}[lazy]: {name.upper()}_END")
            return name
        before = f" {quoted(end[:at])}" if at else ""
        self._rules.append(f"{name.upper()}_END: {name.upper()}{before}")
        return f"{name.upper()}_END {self.literal(end[at:])}"


def _without(triggers: list[str]) -> str:
    """Returns the end of a terminal that has none of some texts."""
    if not triggers:
        return ""
    return f" & ~/{ANY}({'|'.join(escaped(one) for one in dict.fromkeys(triggers))}){ANY}/"
