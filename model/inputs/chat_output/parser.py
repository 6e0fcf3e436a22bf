"""Takes a model's output apart as it comes: content, reasoning, tool calls.

Laws: any cutting of the output into parts gives the same result. No text is lost: what is no call is content. What
stands between content, reasoning and calls, their markers and whitespace next to them, is none of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from model.inputs.chat_output.calls import CallReader
from model.inputs.chat_output.formats import ReasoningFormat, ToolFormat
from model.inputs.chat_output.marks import Marks
from model.inputs.chat_output.parsed import Parsed
from model.inputs.chat_output.source import Source, Waiting

LIST, LIST_END = "[", "]"
GAP = 2  # new lines behind reasoning that a constrained answer does not have: its grammar writes as many
MOST_HEAD = 2**14  # characters from the beginning of a call to the beginning of its arguments


@dataclass(frozen=True, slots=True, eq=False)
class Parsing:
    """How the output of one request is read.

    Attributes:
        marks: Characters of special tokens.
        tools: Form of tool calls, marked; None where the model is not to call any.
        reasoning: Form of reasoning, marked; None for a model without.
        schemas: JSON schema of the arguments by the tool's name.
        thinks: The output begins within the reasoning.
        call_id: Returns the id of a call by its number, where the model writes none.
        answers: Content is constrained, so that calls can only come in its place.
        whole: The constraint is on all of it, so that no white space and no mark around it is not its own.
        one_call: The request wants one call at most: those behind it are dropped, as vLLM does.
    """

    marks: Marks
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    thinks: bool = False
    call_id: Callable[[int], str] = str
    answers: bool = False
    whole: bool = False
    one_call: bool = False


class OutputParser:
    """Parser of one sequence's output."""

    def __init__(self, parsing: Parsing) -> None:
        self._parsing, self._source, self._new = parsing, Source(), Parsed()
        self._calls = 0
        self._space = list[str]()  # at the end of content so far; dropped where a call or reasoning follows
        self._blank = True  # there was no content and no call yet
        self._spoke = False  # there was content
        self._strips = False  # whitespace that comes next is dropped
        self._gap = 0  # of a constrained answer, so many new lines at most
        self._reasoned = parsing.thinks  # there was reasoning
        self._answers = self._answered = False  # the content began, or has ended, as `ReasoningFormat.answer` says
        self.reasons = parsing.thinks
        """Whether the newest text is reasoning."""
        self.in_text = True
        """Whether no call is the newest part of the output."""
        self._reader = (
            CallReader(parsing.tools, parsing.schemas, self._source, self, parsing.marks.shown)
            if parsing.tools
            else None
        )
        self._stops = self._all_stops()
        self._run = self._all()
        next(self._run, None)

    def push(self, text: str) -> Parsed:
        """Returns new output that this text completes. text: with marks in place of special tokens."""
        self._source.push(text)
        next(self._run, None)
        return self._take()

    def end(self) -> Parsed:
        """Returns the output that was held back, when no more text comes."""
        self._source.ended = True
        next(self._run, None)
        return self._take()

    def _take(self) -> Parsed:
        new, self._new = self._new, Parsed()
        return new

    def _all_stops(self) -> tuple[str, ...]:
        tools, reasoning = self._parsing.tools, self._parsing.reasoning
        stops = tools.triggers if tools else ()
        if reasoning:
            around = () if self._parsing.whole else reasoning.answer
            stops += (reasoning.begin.strip(), *reasoning.dropped, *around)
        return tuple(sorted(dict.fromkeys(stops), key=len, reverse=True))

    def _all(self) -> Waiting[None]:
        """Reads the whole output."""
        parsing, source = self._parsing, self._source
        if self.reasons and parsing.reasoning:
            yield from self._reasoning(parsing.reasoning)
        while (stop := (yield from source.until(self._stops, self._content))) is not None:
            if parsing.reasoning and stop in parsing.reasoning.dropped:
                self._strips, self._gap = True, 0
                if self._parsing.whole and self._blank:
                    self._space.clear()
            elif parsing.reasoning and stop in parsing.reasoning.answer:
                self._around_answer(stop, parsing.reasoning.answer)
            elif parsing.reasoning and stop == parsing.reasoning.begin.strip():
                if (self._blank and not self._reasoned) or parsing.reasoning.anywhere:
                    yield from self._reasoning(parsing.reasoning)
                else:
                    self._content(stop)
            elif parsing.tools and self._reader:
                yield from self._called(stop, parsing.tools, self._reader)
        if not self._answered:
            self._new.content += "".join(self._space)

    def _around_answer(self, stop: str, answer: tuple[str, ...]) -> None:
        """Takes a text that stands around all of the content: anywhere else it belongs to the content."""
        begin, end = answer
        if stop == begin and self._blank and not self._answers:
            self._answers = self._strips = True
        elif stop == end and self._answers:
            self._space.append(stop)  # content, if more of that follows
            self._answered = True
        else:
            self._content(stop)

    def _content(self, text: str) -> None:
        if self._strips:
            text = self._without_gap(text) if self._parsing.whole and not self._calls else text.lstrip()
        kept = text.rstrip()
        if kept:
            self._strips = self._blank = self._answered = False
            self._spoke = True
            self.in_text = True
            self._new.content += "".join(self._space) + self._shown(kept)
            self._space.clear()
        self._space.append(text[len(kept) :])

    def _without_gap(self, text: str) -> str:
        """Drops what is left of the new lines before a constrained answer, whose own white space is its own."""
        lines = len(text) - len(text.lstrip("\n"))
        text = text[min(lines, self._gap) :]
        self._gap = 0 if text else self._gap - lines
        return text

    def _shown(self, text: str) -> str:
        return self._parsing.marks.shown(text)

    def _reasoning(self, form: ReasoningFormat) -> Waiting[None]:
        self.reasons = self._strips = self._reasoned = self.in_text = True
        self._space.clear()
        held = list[str]()

        def give(text: str) -> None:
            if self._strips:
                text = text.lstrip()
            kept = text.rstrip()
            if kept:
                self._strips = False
                self._new.reasoning += "".join(held) + self._shown(kept)
                held.clear()
            held.append(text[len(kept) :])

        stop = yield from self._source.until((form.end.strip(),), give)
        if stop is None:
            self._new.reasoning += "".join(held)
        self.reasons, self._strips, self._gap = False, True, GAP

    # Calls

    def _called(self, trigger: str, form: ToolFormat, reader: CallReader) -> Waiting[None]:
        """Reads calls, from behind the trigger on. What is none is content."""
        source = self._source
        self._pin()
        start, before = source.at - len(trigger), self._calls
        head, closing = form.opening + form.begin, form.closing
        if closing.startswith(LIST_END):
            closing = LIST_END + " " + closing.removeprefix(LIST_END)
        if trigger not in (form.trigger, *form.aliases):
            head = ""
        elif head.startswith(form.trigger):
            head = head[len(form.trigger) :]
        else:
            head, source.at = "", start
        is_call = self._blank or not (form.at_start or (self._parsing.answers and self._spoke))
        if is_call and not (yield from source.literal(" " + head)):
            # A list of one call may come without its brackets.
            is_call, closing = head.strip() == LIST, form.closing.removeprefix(LIST_END)
        is_call = is_call and (yield from reader.read(trigger in form.bare))
        if self._calls == before:
            # What was too long for a call is not read again: with a trigger in it, the time would be quadratic.
            too_long = source.limit is not None and source.at >= source.limit
            source.at = source.limit if too_long and source.limit else start + len(trigger)
            self._unpin()
            self._content(source.text[start : source.at])
            return
        while is_call and form.opening and not (yield from source.literal(" " + closing)):
            self._pin()
            start, before = source.at, self._calls
            is_call = (yield from source.literal(" " + form.between + form.begin)) and (yield from reader.read())
            if self._calls == before:
                source.at, is_call = start, False
                self._unpin()
        self._space.clear()
        self._strips = True

    def _pin(self) -> None:
        """Keeps the text from here on, of which at most `MOST_HEAD` can be read, until a call has begun or is none."""
        self._source.pinned += 1
        self._source.limit = self._source.at + MOST_HEAD

    def _unpin(self) -> None:
        self._source.pinned -= 1
        self._source.limit = None

    def begin(self, name: str, call_id: str) -> None:
        self._unpin()  # from now on nothing leads back
        self._space.clear()
        self._blank = self.in_text = False
        self._calls += 1
        if self._is_wanted:
            self._new.begin_call(self._calls - 1, name, call_id or self._parsing.call_id(self._calls - 1))

    @property
    def _is_wanted(self) -> bool:
        return self._calls == 1 or not self._parsing.one_call

    def arguments(self, text: str) -> None:
        if text and self._is_wanted:
            self._new.add_arguments(self._calls - 1, text)
