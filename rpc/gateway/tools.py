"""Fields of chat requests about tools and reasoning."""

import json
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator
from quire.v1 import generation_service_pb2 as pb

from rpc.gateway.errors import ApiError
from rpc.gateway.fields import UINT32, Strict, Uint32, among

MOST_TOOLS, MOST_CALLS = 512, 512  # the servers' own limits
CHOICES = {
    "auto": pb.TOOL_CHOICE_AUTO,
    "none": pb.TOOL_CHOICE_NONE,
    "required": pb.TOOL_CHOICE_REQUIRED,
}


class Function(Strict):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(Strict):
    """A tool; functions are the only ones."""

    type: Annotated[str, among("function")]
    function: Function
    cache_control: Any = None  # Anthropic's hint

    def message(self) -> pb.Tool:
        """Returns it as the servers read it."""
        one = self.function
        parameters = "" if one.parameters is None else json.dumps(one.parameters, ensure_ascii=False)
        return pb.Tool(name=one.name, description=one.description or "", parameters=parameters, strict=bool(one.strict))


class FunctionName(Strict):
    """A function by its name."""

    name: str


class NamedTool(Strict):
    """The only function that is called."""

    type: Annotated[str, among("function")]
    function: FunctionName


class AllowedNames(Strict):
    """Some of the tools. mode: whether one of them is called, or may be."""

    mode: Annotated[str, among("auto", "required")]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Strict):
    """The only tools that are offered; `tools` may have others, so that a client sends the same ones in each turn."""

    type: Annotated[str, among("allowed_tools")]
    allowed_tools: AllowedNames


def choice_kind(value: Any) -> str:
    """Returns pydantic's tag of a tool_choice. Tags that are no identifiers are left out of errors' paths."""
    if not isinstance(value, dict | Strict):
        return "a word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed tools" if kind == "allowed_tools" else "a tool"


class CalledFunction(Strict):
    """A function that was called. arguments: JSON."""

    name: str
    arguments: str | None = None
    parsed_arguments: Any = None  # of openai's `parse`, in messages that it sends back


class CallField(Strict):
    """A call in an assistant's message."""

    id: str | None = None
    type: Annotated[str, among("function")] | None = None
    function: CalledFunction
    index: Any = None  # of chunks that a client sends back as they came

    def message(self) -> pb.ToolCall:
        """Returns it as the servers read it."""
        return pb.ToolCall(id=self.id or "", name=self.function.name, arguments=self.function.arguments or "")


class ReasoningField(Strict):
    """Bounds of the reasoning, as OpenRouter names them."""

    max_tokens: Uint32 | None = None
    effort: Annotated[str, among("none", "minimal", "low", "medium", "high", "xhigh", "max")] | None = None
    exclude: bool | None = None
    enabled: bool | None = None


class Tooled(Strict):
    """Fields of chats about tools and reasoning. None is unset, as null is."""

    tools: Annotated[list[ToolField], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Annotated[str, among(*CHOICES)], Tag("a word")]
            | Annotated[NamedTool, Tag("a tool")]
            | Annotated[AllowedTools, Tag("allowed tools")],
            Discriminator(choice_kind),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningField | None = None

    # vLLM's
    include_reasoning: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=UINT32)] | None = None

    @model_validator(mode="after")
    def _with_tools(self) -> "Tooled":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ApiError(400, "tool_choice goes with tools alone", "tool_choice")
        unknown = self._allowed - {tool.function.name for tool in self.tools or ()}
        if unknown:
            raise ApiError(400, f"tool_choice names a tool that there is not: {min(unknown)!r:.99}", "tool_choice")
        return self

    @property
    def _allowed(self) -> set[str]:
        """Names that `allowed_tools` has."""
        choice = self.tool_choice
        return {one.function.name for one in choice.allowed_tools.tools} if isinstance(choice, AllowedTools) else set()

    @property
    def offered(self) -> list[int]:
        """Positions of the tools that the model is told of."""
        tools = self.tools or ()
        return [i for i, tool in enumerate(tools) if not self._allowed or tool.function.name in self._allowed]

    @property
    def shows_reasoning(self) -> bool:
        """Whether the response has the reasoning."""
        excluded = self.reasoning is not None and self.reasoning.exclude
        return self.include_reasoning is not False and not excluded

    @property
    def reasoning_tokens(self) -> int | None:
        """Most tokens of reasoning; None for any number."""
        if self.thinking_token_budget is not None and self.thinking_token_budget >= 0:
            return self.thinking_token_budget
        return None if self.reasoning is None else self.reasoning.max_tokens

    def add_tools(self, chat: pb.Chat) -> None:
        """Adds the tools to a conversation."""
        chat.tools.extend((self.tools or [])[i].message() for i in self.offered)
        if isinstance(self.tool_choice, NamedTool):
            chat.tool_choice, chat.tool_name = pb.TOOL_CHOICE_REQUIRED, self.tool_choice.function.name
        elif isinstance(self.tool_choice, AllowedTools):
            chat.tool_choice = CHOICES[self.tool_choice.allowed_tools.mode]
        elif self.tool_choice is not None:
            chat.tool_choice = CHOICES[self.tool_choice]
        if self.parallel_tool_calls is not None:
            chat.parallel_tool_calls = self.parallel_tool_calls
