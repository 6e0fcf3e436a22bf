"""Schema of the requests of POST /v1/responses, and the chat that each one is.

Nothing is stored: a request has its whole conversation in `input`, as clients with `store: false` send it.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from rpc.gateway.chat_schema import MOST_MESSAGES, ChatRequest
from rpc.gateway.errors import ApiError
from rpc.gateway.fields import MOST_KEYS, ModelName, Strict, Uint32, among, only
from rpc.gateway.images import image_bytes
from rpc.gateway.structured import tags_given
from rpc.gateway.tools import MOST_TOOLS, choice_kind

MOST_PARTS = 2**12
LOGPROBS = "message.output_text.logprobs"

Async = Annotated[Any, only(False), Field(default=None, validation_alias=AliasChoices("async", "async_"))]
"""Of a call that goes on beside the model's turn. openai's models name it `async_` where they are dumped."""

DirectCaller = Annotated[Any, only({"type": "direct"})]
"""The caller of a function: the model itself, not a program of its."""

NAMES = {
    "chat.messages": "input", "chat": "input", "stopping.max_tokens": "max_output_tokens",
    "reasoning.max_tokens": "reasoning.max_tokens", "structured_output": "text.format",
} | {
    f"structured_output.{kind}": "text.format" for kind in ("json_schema", "json_object", "structural_tag")
}  # fmt: skip
"""Names of fields that are other than in chats."""


class TextPart(Strict):
    """A text of a message."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None  # of answers that a client sends back, as the next ones
    logprobs: Any = None
    parsed: Any = None  # of openai's `parse`: the text again
    prompt_cache_breakpoint: Any = None  # a hint: each page of a prompt is cached

    @model_validator(mode="after")
    def _says(self) -> "TextPart":
        name = "refusal" if self.type == "refusal" else "text"
        if getattr(self, name) is None:
            raise PydanticCustomError("part", "must have {name}", {"name": name})
        return self


class InputImage(Strict):
    """An image of a message.

    Attributes:
        image_url: Bytes of the image, decoded from its data URL.
    """

    type: Literal["input_image"]
    image_url: Annotated[bytes, BeforeValidator(image_bytes)]
    detail: Any = None
    file_id: Annotated[Any, only()] = None
    prompt_cache_breakpoint: Any = None


def _parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def _part_kind(value: Any) -> str:
    return "image" if isinstance(value, dict) and value.get("type") == "input_image" else "text"


Part = Annotated[Annotated[TextPart, Tag("text")] | Annotated[InputImage, Tag("image")], Discriminator(_part_kind)]
Parts = Annotated[list[Part], Field(fail_fast=True, max_length=MOST_PARTS), BeforeValidator(_parts)]


OF_SYSTEM = ("system", "developer")


class MessageItem(Strict):
    """A message."""

    type: Literal["message"] = "message"
    role: Annotated[str, among("user", "assistant", "system", "developer")]
    content: Parts
    id: Any = None  # of answers that a client sends back, as the next ones
    status: Any = None
    phase: Any = None

    def turn(self) -> dict[str, Any]:
        """Returns it as a chat has it."""
        parts = [_chat_part(part) for part in self.content]
        plain = all(part["type"] == "text" for part in parts)
        return {"role": self.role, "content": "".join(part["text"] for part in parts) if plain else parts}


def _chat_part(part: TextPart | InputImage) -> dict[str, Any]:
    if isinstance(part, InputImage):
        return {"type": "image_url", "image_url": {"url": part.image_url}}
    return {"type": "text", "text": part.text or part.refusal or ""}


class CallItem(Strict):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    parsed_arguments: Any = None  # of openai's `parse`, in answers that a client sends back
    id: Any = None
    status: Any = None
    async_: Async
    caller: DirectCaller = None
    namespace: Annotated[Any, only()] = None


class ResultItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_PARTS), BeforeValidator(_parts)]
    id: Any = None
    status: Any = None
    name: Any = None  # of the call, which `call_id` names
    caller: DirectCaller = None
    namespace: Annotated[Any, only()] = None


class ThoughtPart(Strict):
    """A part of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(Strict):
    """Reasoning that the model has written before."""

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtPart], Field(max_length=MOST_PARTS)] | None = None
    summary: Annotated[list[ThoughtPart], Field(max_length=MOST_PARTS)] | None = None
    id: Any = None
    status: Any = None
    encrypted_content: Annotated[Any, only("")] = None


KINDS = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


def _kind(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind, "item", f"must be an item of a type that is served: {', '.join(KINDS)}"),
]


def _items(value: Any) -> Any:
    """Returns items, of which a text is one. Checks their number and that of their parts before their forms."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list):
        if len(value) > MOST_MESSAGES:
            raise PydanticCustomError("items", f"there must be at most {MOST_MESSAGES}")
        inner = (
            item.get(name) for item in value if isinstance(item, dict) for name in ("content", "output", "summary")
        )
        if sum(len(parts) for parts in inner if isinstance(parts, list)) > MOST_PARTS:
            raise PydanticCustomError("items", f"they have more than {MOST_PARTS} parts")
    return value


FUNCTION_FIELDS = {"type", "name", "description", "parameters", "strict"}


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Annotated[str, among("function")]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: Any = None  # of what a program does with results
    allowed_callers: Annotated[Any, only([], ["direct"])] = None
    async_: Async
    defer_loading: Annotated[Any, only(False)] = None

    def chat_tool(self) -> dict[str, Any]:
        """Returns it as a chat has it."""
        return {"type": "function", "function": self.model_dump(include=FUNCTION_FIELDS - {"type"}, exclude_none=True)}


class ToolName(Strict):
    """The only function that is called."""

    type: Annotated[str, among("function")]
    name: str


class AllowedToolNames(Strict):
    """The only tools that are offered. mode: whether one of them is called, or may be."""

    type: Annotated[str, among("allowed_tools")]
    mode: Annotated[str, among("auto", "required")]
    tools: Annotated[list[ToolName], Field(fail_fast=True, min_length=1, max_length=MOST_TOOLS)]


class TextFormat(Strict):
    """Form of the answer. Structural tags are as in chats."""

    type: Annotated[str, among("text", "json_object", "json_schema", "structural_tag")]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None
    structures: Any = None
    triggers: Any = None
    format: Any = None

    @model_validator(mode="after")
    def _whole(self) -> "TextFormat":
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise PydanticCustomError("format", "has schema where its type is json_schema, and only there")
        if self.type != "structural_tag" and self._tags():
            raise PydanticCustomError(
                "format", "has structures, triggers and format only where its type is structural_tag"
            )
        return self

    def _tags(self) -> dict[str, Any]:
        return tags_given(self.structures, self.triggers, self.format)

    def chat_format(self) -> dict[str, Any]:
        """Returns it as a chat has it."""
        if self.type != "json_schema":
            return {"type": self.type, **self._tags()}
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.schema_, "strict": self.strict}}


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Any = None  # a hint


class ReasoningOptions(Strict):
    """Options of the reasoning. max_tokens: Quire's own, as in chats."""

    effort: Annotated[str, among("none", "minimal", "low", "medium", "high", "xhigh", "max")] | None = None
    max_tokens: Uint32 | None = None
    summary: Any = None  # a hint: reasoning is shown as it is
    generate_summary: Any = None


class ResponseStreamOptions(Strict):
    """Options of a stream. include_usage: a chat's, and always so here."""

    include_usage: Any = None
    include_obfuscation: Annotated[Any, only(False)] = None


def _included(names: list[str] | None) -> list[str] | None:
    """Refuses logprobs. Other names are of stored reasoning and of tools that a server runs, which there are not."""
    if names and LOGPROBS in names:
        raise PydanticCustomError("unsupported_value", "{name} is not supported", {"name": LOGPROBS})
    return names


class ResponsesRequest(Strict):
    """A request for a response."""

    model: ModelName | None = None
    input: Annotated[list[Item], Field(fail_fast=True, min_length=1, max_length=MOST_MESSAGES), BeforeValidator(_items)]
    instructions: str | None = None
    max_output_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True, max_length=MOST_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Annotated[str, among("auto", "none", "required")], Tag("a word")]
            | Annotated[ToolName, Tag("a tool")]
            | Annotated[AllowedToolNames, Tag("allowed tools")],
            Discriminator(choice_kind),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    # Hints
    user: str | None = None
    safety_identifier: Any = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=MOST_KEYS)] = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    include: Annotated[list[str] | None, Field(max_length=MOST_KEYS), AfterValidator(_included)] = None
    store: bool | None = None  # nothing is: a response says so
    stream_options: ResponseStreamOptions | None = None
    max_tool_calls: Any = None  # of tools that a server runs itself
    top_logprobs: Annotated[Any, only(0)] = None

    # Refused unless they ask for nothing
    background: Annotated[Any, only(False)] = None
    conversation: Annotated[Any, only()] = None
    previous_response_id: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    truncation: Annotated[Any, only("disabled")] = None
    moderation: Annotated[Any, only()] = None
    context_management: Annotated[Any, only([])] = None
    access_programs: Annotated[Any, only({}, [])] = None
    background_options: Annotated[Any, only({})] = None
    image: Annotated[Any, only({})] = None

    # vLLM's, as in chats
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: Any = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    repetition_penalty: float | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, max_length=MOST_KEYS)

    @model_validator(mode="after")
    def _with_tools(self) -> "ResponsesRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ApiError(400, "tool_choice goes with tools alone", "tool_choice")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """Returns the turns of the chat: an assistant's reasoning, text and calls are one turn."""
        turns: list[dict[str, Any]] = []
        turn: dict[str, Any] | None = None  # of an assistant, which may go on
        for item in self.input:
            if (
                isinstance(item, MessageItem)
                and item.role == "assistant"
                and turn is not None
                and "content" not in turn
            ):
                turn |= item.turn()
            elif isinstance(item, MessageItem):
                turns.append(item.turn())
                turn = turns[-1] if item.role == "assistant" else None
            elif isinstance(item, ResultItem):
                parts = [_chat_part(part) for part in item.output]
                text = "".join(part.get("text", "") for part in parts)
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
                turn = None
            else:
                if turn is None:
                    turns.append(turn := {"role": "assistant"})
                self._add(turn, item)
        return self._with_instructions(turns)

    def _with_instructions(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the turns behind the instructions, which are one turn with the system's first ones.

        Templates refuse a second turn of the system (Qwen 3.5, Mistral Small).
        """
        if not self.instructions:
            return turns
        texts, first = [self.instructions], 0
        while first < len(turns) and turns[first]["role"] in OF_SYSTEM and isinstance(turns[first]["content"], str):
            texts.append(turns[first]["content"])
            first += 1
        return [{"role": "system", "content": "\n\n".join(texts)}, *turns[first:]]

    @staticmethod
    def _add(turn: dict[str, Any], item: CallItem | ReasoningItem) -> None:
        if isinstance(item, CallItem):
            function = {"name": item.name, "arguments": item.arguments}
            turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
        else:
            text = "".join(part.text for part in item.content or item.summary or ())
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text


SAME = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "top_k", "min_p", "stop", "priority",
    "cache_salt", "request_id", "repetition_penalty", "chat_template_kwargs",
)  # fmt: skip


class ResponsesChat(ChatRequest):
    """A request for a response as a chat."""

    _asked: ResponsesRequest = PrivateAttr()

    @property
    def asked(self) -> ResponsesRequest:
        """The request itself."""
        return self._asked

    @property
    def own_names(self) -> Mapping[str, str]:
        return NAMES


def _chat_choice(choice: str | ToolName | AllowedToolNames | None) -> Any:
    """Returns a tool_choice as a chat has it."""
    if isinstance(choice, ToolName):
        return {"type": "function", "function": {"name": choice.name}}
    if isinstance(choice, AllowedToolNames):
        allowed = {"mode": choice.mode, "tools": [_chat_choice(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def read_responses(value: object) -> ResponsesChat:
    """Reads a body. Raises ValidationError, ApiError."""
    asked = ResponsesRequest.model_validate(value)
    body: dict[str, Any] = {name: getattr(asked, name) for name in SAME if getattr(asked, name) is not None}
    body |= {"messages": asked.messages(), "max_completion_tokens": asked.max_output_tokens}
    if asked.tools:
        body["tools"] = [tool.chat_tool() for tool in asked.tools]
        body["tool_choice"] = _chat_choice(asked.tool_choice)
    if asked.text is not None and asked.text.format is not None:
        body["response_format"] = asked.text.format.chat_format()
    if asked.reasoning is not None:
        body["reasoning"] = {"effort": asked.reasoning.effort, "max_tokens": asked.reasoning.max_tokens}
    chat = ResponsesChat.model_validate(body)
    chat._asked = asked
    return chat
