"""Questions about constrained outputs: whether a text is a complete output of its constraint.

Two ends of a sequence depend on it. A stop string ends an output only where the text before it is complete. And an
output that has taken all of its tokens was closed in time if it is complete. An answer depends on constraint and text
alone, so it is the same on any engine, after a move and in any schedule.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from model.inputs.chat_output.parser import OutputParser, Parsing
from model.inputs.grammar_checker import Constraint
from model.inputs.tokenizer import Tokenizer

UNSETTLED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Question:
    """Whether a text is a complete output.

    Attributes:
        constraint: Its constraint.
        text: The text, with marks in place of special tokens that the constraint names.
        of_stop: A stop string follows the text. Else the text is all of an output that has taken all of its tokens.
    """

    constraint: Constraint
    text: str
    of_stop: bool


Answer = Callable[[Question], bool]
"""Answers a question."""


@dataclass(frozen=True, slots=True, eq=False)
class Completeness:
    """Questions about the outputs of one request.

    Attributes:
        whole: Constraint on the whole output, with its reasoning and calls.
        content: Constraint on its content; None where that may be any text.
        marks: Marks of special tokens by their ids, as `whole` has them.
        tag_ends: Marked ends of its structural tags, between which any text may stand; () without such tags.
        parsing: How calls and reasoning are read, where the request has its output unread; None where it is read.
        tokenizer: Tokenizer of the model.
        is_complete: Answers a question. It may take a second, and runs in any thread. Raises RequestFailed where the
            question cannot be answered.
        complete_ends: Answers many questions about beginnings of one text: returns which of their lengths, in ascending
            order, are those of complete outputs. As `is_complete` otherwise.
    """

    whole: Constraint
    content: Constraint | None
    marks: Mapping[int, str]
    tag_ends: tuple[str, ...]
    parsing: Parsing | None
    tokenizer: Tokenizer
    is_complete: Answer
    complete_ends: Callable[[Constraint, str, Sequence[int]], Sequence[int]]

    def of_stop(self, before: str) -> Question | None:
        """Returns the question about the content before a stop string; None where that may be any text."""
        return None if self.content is None else Question(self.content, before, of_stop=True)

    def of_end(self, tokens: Sequence[int], ends_in_text: bool | None) -> Question | None:
        """Returns the question about an output that has taken all of its tokens; None where the answer is no.

        Any text may end anywhere, so that max_tokens has cut it off. It is not closed, though its constraint allows it.

        Args:
            tokens: All tokens of the output.
            ends_in_text: The last part of the output is no call; None where it was not read.
        """
        text = self._marked(tokens, self.marks)
        if self.content is not None:
            free = bool(self.tag_ends) and not text.endswith(self.tag_ends)
        else:
            free = self._ends_in_text(tokens) if ends_in_text is None else ends_in_text
        if free or text.endswith(UNSETTLED):
            return None
        return Question(self.whole, text, of_stop=False)

    def _ends_in_text(self, tokens: Sequence[int]) -> bool:
        """Returns whether the last part of an output that was not read is no call."""
        if self.parsing is None:
            return True
        parser = OutputParser(self.parsing)
        parser.push(self._marked(tokens, self.parsing.marks.by_id))
        parser.end()
        return parser.in_text

    def _marked(self, tokens: Sequence[int], marks: Mapping[int, str]) -> str:
        runs = groupby(tokens, key=marks.get)
        return "".join(
            mark * len([*run]) if mark else self.tokenizer.decode_behind([*run], skip_special_tokens=False)
            for mark, run in runs
        )
