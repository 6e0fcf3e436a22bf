"""What a model may write in a conversation, as a frontend says it to the process that makes grammars."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from model.inputs.chat_output.formats import Arguments, ParameterTags, ReasoningFormat, ToolFormat

OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """An `OutputForm` as a constraint beside `Structured`. text: the form as JSON."""

    text: str
    kind: str = OUTPUT


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that may be called. Attributes as in `scheduler.tools.Tool`; field: where the client named it."""

    name: str
    parameters: str
    strict: bool
    field: str


@dataclass(frozen=True, slots=True)
class OutputForm:
    """Forms that an output may have.

    Attributes:
        tools: Form of calls, marked; None for none.
        reasoning: Form of reasoning, marked; None for none.
        ids: Token ids of marks.
        offered: Tools that may be called.
        required: The output calls one.
        parallel: It may call several.
        thinks: The output begins within the reasoning.
        answer: Kind and text of the constraint on content; None for any text.
        special: Texts of the special tokens that its structural tags have, by their marks, which `ids` has too.
    """

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    ids: Mapping[str, int] = field(default_factory=dict)
    offered: tuple[OfferedTool, ...] = ()
    required: bool = False
    parallel: bool = True
    thinks: bool = False
    answer: tuple[str, str] | None = None
    special: Mapping[str, str] = field(default_factory=dict)

    def constraint(self) -> OutputConstraint:
        """Returns it as JSON."""
        values = asdict(self)
        if self.tools is not None:
            values["tools"]["arguments"] = self.tools.arguments.name
        return OutputConstraint(json.dumps(values, sort_keys=True))

    def marked(self, text: str) -> str:
        """Returns a text of its structural tags with marks in place of special tokens."""
        for mark, token in sorted(self.special.items(), key=lambda one: len(one[1]), reverse=True):
            text = text.replace(token, mark)
        return text

    @staticmethod
    def of_text(text: str) -> "OutputForm":
        """Reads the text of a constraint."""
        values = json.loads(text)
        if (tools := values["tools"]) is not None:
            tags = tools["tags"]
            tools |= {"arguments": Arguments[tools["arguments"]], "tags": ParameterTags(**tags) if tags else None}
            tools |= {name: tuple(value) for name, value in tools.items() if isinstance(value, list)}
            values["tools"] = ToolFormat(**tools)
        if (reasoning := values["reasoning"]) is not None:
            reasoning |= {name: tuple(value) for name, value in reasoning.items() if isinstance(value, list)}
            values["reasoning"] = ReasoningFormat(**reasoning)
        values["offered"] = tuple(OfferedTool(**one) for one in values["offered"])
        values["answer"] = values["answer"] and tuple(values["answer"])
        return OutputForm(**values)
