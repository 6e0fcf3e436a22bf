"""Tools that a conversation offers to its model, and the calls that the model makes of them."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum

from scheduler.invalid import InvalidRequest, require

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
MOST_TOOLS = 512  # tools of a conversation
MOST_CALLS = 512  # calls of a message


class ToolChoice(StrEnum):
    """Says whether the model calls tools."""

    AUTO, NONE, REQUIRED = "auto", "none", "required"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may ask its client to call.

    Attributes:
        name: Its name.
        description: What it does, for the model.
        parameters: JSON schema of the object of its arguments; "" for a function without any.
        strict: The arguments of each call are valid by the schema. Else the model may get them wrong.
    """

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an assistant's message.

    Attributes:
        id: Name by which the tool's result refers to it.
        name: Name of the tool.
        arguments: A JSON object.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a conversation, and how the model is to use them.

    Attributes:
        tools: The tools.
        choice: Whether the next message calls some.
        name: Name of the only tool that it calls, where the choice is required; "" for any.
        parallel: It may call several at once.
    """

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice.AUTO
    name: str = ""
    parallel: bool = True

    def __post_init__(self) -> None:
        require(len(self.tools) <= MOST_TOOLS, "chat.tools", f"{len(self.tools)} tools", f"at most {MOST_TOOLS}")
        names = set[str]()
        for i, tool in enumerate(self.tools):
            path = f"chat.tools[{i}].name"
            require(NAME.fullmatch(tool.name), path, tool.name, "must be 1 to 64 of A-Z a-z 0-9 _ . -")
            require(tool.name not in names, path, tool.name, "is the name of another tool too")
            names.add(tool.name)
        path = "chat.tool_choice"
        if self.name:
            require(
                self.choice is ToolChoice.REQUIRED, path, self.choice.value, "must be required beside chat.tool_name"
            )
            require(self.name in names, "chat.tool_name", self.name, "is no tool of this conversation")
        elif self.choice is ToolChoice.REQUIRED:
            require(self.tools, path, self.choice.value, "the conversation has no tools")

    @property
    def offered(self) -> tuple[Tool, ...]:
        """The tools that the next message may call."""
        if self.choice is ToolChoice.NONE:
            return ()
        return tuple(tool for tool in self.tools if self.name in ("", tool.name))

    @property
    def constrains(self) -> bool:
        """Whether the form of the next message must be enforced, as a parser alone cannot."""
        return self.choice is ToolChoice.REQUIRED or any(tool.strict for tool in self.offered)


NO_TOOLS = ToolUse()


def object_of(text: str, name: str) -> dict[str, object]:
    """Parses a JSON object; "" is an empty one. name: field that it comes from. Raises InvalidRequest."""
    try:
        value: object = json.loads(text or "{}", parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, text, f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest(name, text, "must be a JSON object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, text, "has a lone surrogate, which is no character") from None
    return value


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is none")
