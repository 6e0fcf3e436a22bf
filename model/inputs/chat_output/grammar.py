"""The grammar of what a model may write in a conversation: reasoning, tool calls or a constrained answer.

It is made of the same formats as the parser. What it allows, the parser reads as the calls that it says. Runs in the
process that tries grammars, as schemas of clients are untrusted.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.inputs.chat_output.arguments_grammar import ArgumentsGrammar
from model.inputs.chat_output.calls import ARGUMENTS, BESIDE
from model.inputs.chat_output.formats import ReasoningFormat, ToolFormat
from model.inputs.chat_output.grammar_form import OutputForm
from model.inputs.chat_output.parser import GAP
from model.inputs.grammars import UNFORCED, escaped, limits
from scheduler.structured import CHOICE, GRAMMAR, REGEX

ANY = "/(?s:.*)/"
SPACE = r"[\s\x1C-\x1F]*"  # as Python has it
WORDS, NEW_LINE = (REGEX, CHOICE, GRAMMAR), ord("\n")
"""Constraints with texts that are not JSON; the token of a new line in a tokenizer of bytes."""


class OutputGrammar:
    """Makes the grammar of one form."""

    def __init__(self, form: OutputForm, tokenizer: LLTokenizer) -> None:
        """Makes it. tokenizer: tries schemas."""
        self._form, self._tokenizer = form, tokenizer
        self._rules: list[str] = []
        self._named: list[dict[str, Any]] = []
        self._inner: dict[str, str] = {}  # symbols of arguments by the tool's name

    def make(self, answer: Sequence[Mapping[str, Any]] = ()) -> None:
        """Makes the grammar.

        Args:
            answer: Grammars of llguidance's list of them, of which the first is that of the content; () for any text.

        Raises:
            GrammarRefused: A strict tool's schema cannot be enforced. Names the field.
        """
        form, tools, calls = self._form, self._form.tools, list[str]()
        self._rules.append(f"GAP: /\\n{{0,{GAP}}}/")
        if tools is not None and form.offered:
            calls = self._calls(tools, after_text=not form.required and not answer)
        contents = [] if form.required else [self._answer(answer) if answer else self._text()]
        self._rule("output", " | ".join(calls + contents))
        if form.reasoning is None:
            self._rule("start", "output")
            return
        # Before an answer that may begin with a new line there are all of them: the parser must know which are its own.
        behind = "GAP output"
        if contents and not form.reasoning.content and self._begins_with_line(answer):
            self._rules.append(f"LINES: /\\n{{{GAP}}}/")
            ways = [*(f"GAP {one}" for one in calls), *(f"LINES {one}" for one in contents)]
            behind = self._rule("behind", " | ".join(ways))
        self._rule("start", f"{self._reasoning(form.reasoning)} {behind}" + ("" if form.thinks else " | output"))

    def _answer(self, answer: Sequence[Mapping[str, Any]]) -> str:
        self._named += [{**answer[0], "name": "answer"}, *map(dict, answer[1:])]
        return self._sequence(self._content_begin(), "@answer")

    def _begins_with_line(self, answer: Sequence[Mapping[str, Any]]) -> bool:
        """Returns whether a new line may be the first character of an answer. One of structural tags may lose it."""
        if self._form.answer is None or self._form.answer[0] not in WORDS:
            return False
        named = [{**answer[0], "name": "main"}, *map(dict, answer[1:])]
        matcher = LLMatcher(self._tokenizer, json.dumps({"grammars": named}), log_level=0, limits=limits())
        return not matcher.is_error() and matcher.validate_tokens([NEW_LINE]) == 1

    def text(self, ids: Mapping[str, int]) -> str:
        """Returns the grammar in llguidance's form. ids: token ids of marks."""
        main = {"name": "main", "lark_grammar": "\n".join([*self._rules, UNFORCED])}
        return json.dumps({"grammars": [_with_ids(one, ids) for one in (main, *self._named)]})

    def _rule(self, name: str, body: str) -> str:
        self._rules.append(f"{name}: {body}")
        return name.partition("[")[0]

    def _sequence(self, *parts: str) -> str:
        return " ".join(part for part in parts if part) or '""'

    def literal(self, text: str) -> str:
        """Returns a marked text as symbols of the grammar."""
        pattern = "([" + "".join(self._form.ids) + "])" if self._form.ids else "(?!)"
        parts = [part for part in re.split(pattern, text) if part]
        return " ".join(part if part in self._form.ids else json.dumps(part, ensure_ascii=False) for part in parts)

    def until(self, name: str, end: str, excluded: str = "") -> str:
        """Adds a rule of any text up to the first occurrence of a literal, which belongs to it.

        Args:
            name: Name of the rule.
            end: The literal.
            excluded: Expression of texts that it is none of; "" for none.
        """
        before, mark, behind = self._at_mark(end)
        beside = f" & ~/{excluded}/" if excluded else ""
        self._rules.append(f"{name.upper()}_TEXT: /(?s:.*){escaped(before)}/{beside}")
        if not mark:
            return self._rule(f"{name}[lazy]", f"{name.upper()}_TEXT")
        return self._rule(name, self._sequence(f"{name.upper()}_TEXT", self.literal(mark + behind)))

    def _at_mark(self, text: str) -> tuple[str, str, str]:
        at = next((i for i, char in enumerate(text) if char in self._form.ids), len(text))
        return text[:at], text[at : at + 1], text[at + 1 :]

    # Reasoning and content

    def _reasoning(self, form: ReasoningFormat) -> str:
        begin = "" if self._form.thinks else self.literal(form.begin)
        end = self.until("thought", form.end.strip())
        return self._rule("reasoning", self._sequence(begin, end, self.literal(form.behind)))

    def _content_begin(self) -> str:
        reasoning = self._form.reasoning
        return self.literal(reasoning.content) if reasoning else ""

    def _text(self) -> str:
        """Returns free text, which has no trigger of a call."""
        form, tools, excluded = self._form, self._form.tools, []
        if tools is not None and form.offered:
            if tools.at_start and not self._at_mark(tools.trigger)[1]:
                excluded.append(self._beginning(tools))
            excluded += self._triggers(tools, () if tools.at_start else (tools.trigger,))
        excluded += [begun] if (begun := self.begun_reasoning()) else []
        self._rules.append(f"TEXT: {ANY}" + "".join(f" & ~/{one}/" for one in excluded))
        return self._rule("text", self._sequence(self._content_begin(), "TEXT"))

    def _triggers(self, tools: ToolFormat, more: tuple[str, ...] = ()) -> list[str]:
        """Returns expressions of texts with something that the parser takes for a call, and no grammar writes.

        Args:
            tools: Form of calls.
            more: Other texts.
        """
        texts = (*more, *tools.aliases, *tools.bare[:1])
        return [f"(?s:.*){escaped(text)}(?s:.*)" for text in texts if not self._at_mark(text)[1]]

    def begun_reasoning(self) -> str:
        """Returns the expression of texts that begin as reasoning does; "" where none can."""
        form = self._form.reasoning
        if form is None or self._at_mark(form.begin)[1]:
            return ""
        return f"{SPACE}{escaped(form.begin.strip())}(?s:.*)"

    def _beginning(self, tools: ToolFormat) -> str:
        """Returns the expression of texts that begin as a call does, where a call stands at the beginning alone."""
        if tools.keys:
            keys = "|".join((*tools.keys, *ARGUMENTS, *BESIDE))
            return f'{SPACE}{escaped(tools.trigger)}{SPACE}"({keys})"(?s:.*)'
        names = "|".join(escaped(tool.name) for tool in self._form.offered)
        return f"{SPACE}{escaped(tools.trigger)}{SPACE}({names}){SPACE}{escaped(tools.named.strip())}(?s:.*)"

    # Calls

    def _calls(self, tools: ToolFormat, after_text: bool) -> list[str]:
        """Returns the ways in which the output may be calls."""
        body = self._bodies(tools)
        several = self._form.parallel and not tools.one
        more = f"({self._sequence(self.literal(tools.between + tools.begin), body)})*" if several else ""
        head, closing = tools.opening + tools.begin, self.literal(tools.closing)
        starts_output = tools.at_start or self._only_calls_behind_reasoning()
        if not after_text or starts_output:
            first = self._bodies(tools, "first", head)
            gap = "" if after_text else "GAP"
            return [self._rule("calls", self._sequence(gap, first, more, closing))]
        excluded = [*filter(None, [self.begun_reasoning()]), *self._triggers(tools)]
        begun = self.until("head", tools.trigger, "|".join(f"({one})" for one in excluded))
        rest = self.literal(head[len(tools.trigger) :])
        return [self._rule("calls", self._sequence(begun, rest, body, more, closing))]

    def _only_calls_behind_reasoning(self) -> bool:
        """Whether content has a beginning of its own, so that no text stands before a call."""
        return self._form.reasoning is not None and bool(self._form.reasoning.content)

    def _bodies(self, tools: ToolFormat, rule: str = "body", head: str = "") -> str:
        """Adds a rule of any call.

        Args:
            tools: Form of calls.
            rule: Name of the rule.
            head: What stands before the name. It has to be one literal with it: where free text is possible too, the
                lexer takes the longest one, and text ends only where it cannot be text any more.
        """
        arguments = ArgumentsGrammar(
            tools, self.literal, self.until, self._rules.append, self._named.append, self._tokenizer
        )
        bodies = []
        for i, tool in enumerate(self._form.offered):
            if (inner := self._inner.get(tool.name)) is None:
                inner = self._inner[tool.name] = arguments.of(i, tool)
            bodies.append(self._rule(f"{rule}_{i}", self._sequence(*self._around(tools, tool.name, inner, head))))
        return self._rule(rule, " | ".join(bodies))

    def _around(self, tools: ToolFormat, name: str, inner: str, head: str) -> Sequence[str]:
        end = self.literal(tools.end)
        if tools.keys is not None:
            name_key, arguments_key = tools.keys
            before = f'{head}{{"{name_key}": "{name}", "{arguments_key}": '
            return (self.literal(before), inner, self.literal("}" + tools.end))
        if not tools.id_begin:
            return (self.literal(head + name + tools.named), inner, end)
        call_id = f"/{tools.id_pattern}/"
        return (self.literal(head + name + tools.id_begin), call_id, self.literal(tools.named), inner, end)


def _with_ids(grammar: dict[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """Returns a grammar with token ids in place of their marks, which stand in no literal."""
    if not (rules := grammar.get("lark_grammar")):
        return grammar
    for mark, i in ids.items():
        rules = rules.replace(mark, f"<[{i}]>")
    return {**grammar, "lark_grammar": rules}
