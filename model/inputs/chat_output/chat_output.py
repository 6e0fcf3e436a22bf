"""A model's form of tool calls and reasoning, with its own tokens."""

import base64
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.inputs.chat_output.families import AUTO, reasoning_format, tool_format
from model.inputs.chat_output.formats import ReasoningFormat, ToolFormat
from model.inputs.chat_output.grammar_form import OfferedTool, OutputForm
from model.inputs.chat_output.marks import Marks
from model.inputs.chat_output.parser import Parsing
from scheduler.structured import STRUCTURAL_TAG, Structured
from scheduler.tools import ToolChoice, ToolUse

DIGEST, HEX_DIGITS = 16, 24  # bytes; digits of an id


@dataclass(frozen=True, slots=True, eq=False)
class ChatOutput:
    """Form of a model's output in conversations.

    Attributes:
        marks: Characters of special tokens.
        tools: Form of tool calls, marked; None for a model that calls none.
        reasoning: Form of reasoning, marked; None for a model that does not reason.
    """

    marks: Marks
    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @staticmethod
    def of(template: str, special: Mapping[int, str], tools: str = AUTO, reasoning: str = AUTO) -> "ChatOutput":
        """Returns the form that a model has.

        Args:
            template: Source of its chat template.
            special: Its special tokens, text by id.
            tools: Name of the form of tool calls, or AUTO or NONE of `model.inputs.chat_output.families`.
            reasoning: Name of the form of reasoning, likewise.

        Raises:
            CheckpointError: There is no form of this name.
        """
        calls, thoughts = tool_format(tools, template), reasoning_format(reasoning, template)
        marks = Marks.of(special, [form for form in (calls, thoughts) if form is not None])
        return ChatOutput(
            marks,
            None if calls is None else marks.bound(calls),
            None if thoughts is None else marks.bound(thoughts),
        )

    @property
    def call_tokens(self) -> tuple[int, ...]:
        """Special tokens that begin calls and nothing else."""
        triggers = () if self.tools is None else self.tools.triggers
        return tuple(self.marks.ids[text] for text in triggers if text in self.marks.ids)

    def literal(self, text: str) -> str:
        """Returns a marked literal as the model writes it."""
        return self.marks.shown(text)

    def thinks(self, prompt: str, continues: bool = False) -> bool:
        """Returns whether output behind a prompt begins within the reasoning, as templates may have begun it.

        Args:
            prompt: End of the prompt.
            continues: The prompt ends with text of the model's own, which may have begun to reason.
        """
        if self.reasoning is None:
            return False
        begin, end = self.literal(self.reasoning.begin).strip(), self.literal(self.reasoning.end).strip()
        return prompt.rfind(begin) > prompt.rfind(end) and (continues or prompt.rstrip().endswith(begin))

    def may_reason(self, prompt: str) -> bool:
        """Returns whether output behind a prompt can have reasoning: not where the template has ended it already."""
        return self.reasoning is not None and not prompt.rstrip().endswith(self.literal(self.reasoning.end).strip())

    def parsing(
        self,
        tool_use: ToolUse,
        schemas: Mapping[str, Mapping[str, Any]],
        thinks: bool,
        call_id: Callable[[int], str],
        structured: Structured | None = None,
    ) -> Parsing | None:
        """Returns how an output is read; None for one that is text alone.

        Args:
            tool_use: Tools that it may call.
            schemas: JSON schema of the arguments by the tool's name.
            thinks: It begins within the reasoning.
            call_id: Returns the id of a call by its number.
            structured: Constraint on its content.
        """
        tools = self.tools if tool_use.offered else None
        if tools is None and self.reasoning is None:
            return None
        answers = structured is not None
        whole = structured is not None and structured.kind != STRUCTURAL_TAG  # between tags there is any text
        one = not tool_use.parallel
        return Parsing(self.marks, tools, self.reasoning, schemas, thinks, call_id, answers, whole, one)

    def form(
        self, tool_use: ToolUse, structured: Structured | None, prompt: str, continues: bool = False
    ) -> OutputForm | None:
        """Returns what an output must be; None for a constraint on the whole output, or for none.

        Args:
            tool_use: Tools that it may call.
            structured: Constraint on its content.
            prompt: End of the prompt.
            continues: As in `thinks`.
        """
        if not tool_use.tools and structured is None:
            return None
        names = {tool.name for tool in tool_use.offered}
        calls = bool(names) and (tool_use.constrains or structured is not None)
        reasons = self.may_reason(prompt)
        if not calls and (structured is None or not reasons):
            return None
        offered = (
            OfferedTool(tool.name, tool.parameters, tool.strict, f"chat.tools[{i}].parameters")
            for i, tool in enumerate(tool_use.tools)
            if tool.name in names
        )
        return OutputForm(
            self.tools if calls else None,
            self.reasoning if reasons else None,
            self.marks.ids,
            tuple(offered) if calls else (),
            tool_use.choice is ToolChoice.REQUIRED,
            tool_use.parallel,
            self.thinks(prompt, continues),
            None if structured is None else (structured.kind, structured.text),
        )


NO_CHAT_OUTPUT = ChatOutput(Marks({}, {}, {}), None, None)


def call_ids(form: ToolFormat | None, request: bytes, sequence: int) -> Callable[[int], str]:
    """Returns a function from a call's number to its id, which is the same whenever the output is read again.

    Args:
        form: Form of the calls.
        request: Bytes that no other request of a conversation has.
        sequence: Index of the sequence.
    """
    length = form.id_length if form is not None else 0

    def call_id(number: int) -> str:
        digest = hashlib.blake2b(b"%d %d" % (sequence, number), key=request[:64], digest_size=DIGEST).digest()
        if length:
            return base64.b32encode(digest).decode()[:length]
        return "call_" + digest.hex()[:HEX_DIGITS]

    return call_id
