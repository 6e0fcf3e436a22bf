"""Puts roles, tools, calls and reasoning of a conversation into the form that its template reads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from model.inputs.chat_contents import Contents, template_messages
from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from scheduler.prompts import ChatMessage
from scheduler.tools import Tool, ToolCall, object_of

PROBE, KEY, VALUE = "quire_probe", "quire_key", "quire_value"
PROBED = ToolCall("probe1234", PROBE, f'{{"{KEY}": "{VALUE}"}}')
USER = ChatMessage("user", "a")
MOST_BYTES = 2**16  # of a probe


@dataclass(frozen=True, slots=True)
class TurnForm:
    """How a template reads the turns of a conversation.

    Attributes:
        text: Arguments of calls as JSON; else as a mapping.
        none: Content that is empty beside calls as None; else as an empty text.
        either: A turn with calls has reasoning or content, not both (gpt-oss).
        developer: It writes turns of developers; else they are given to it as the system's.
    """

    text: bool = False
    none: bool = False
    either: bool = False
    developer: bool = True


MAPPINGS = TurnForm()


def turn_form(renderer: ChatRenderer, contents: Contents, calls: bool) -> TurnForm:
    """Returns the form of turns that a template writes out.

    Args:
        renderer: Renders the template.
        contents: Form of contents that it reads.
        calls: Whether the model calls tools.
    """

    def written(form: TurnForm, *messages: ChatMessage) -> str | None:
        turns = [
            turn | template_fields(message, form, "")
            for turn, message in zip(template_messages(messages, contents), messages, strict=True)
        ]
        tools = template_tools([Tool(PROBE)] if calls else ())
        try:
            return renderer.render(turns, {}, MOST_BYTES, tools=tools)
        except ChatFailed:
            return None

    form = _form_of_calls(written) if calls else MAPPINGS
    says = written(form, ChatMessage("developer", VALUE), USER)
    return replace(form, developer=says is not None and VALUE in says)


def _form_of_calls(written: Callable[..., str | None]) -> TurnForm:
    """Returns the form in which a template writes a call out.

    transformers passes mappings, and most templates expect them; DeepSeek's concatenate texts, and look for content
    that is None. A template that writes no calls gets mappings.
    """
    for form in (MAPPINGS, TurnForm(text=True), TurnForm(none=True), TurnForm(text=True, none=True)):
        made = written(form, USER, ChatMessage("assistant", "", (PROBED,)))
        if made is not None and KEY in made and VALUE in made:
            both = ChatMessage("assistant", "b", (PROBED,), reasoning="c")
            return replace(form, either=written(form, USER, both) is None)
    return MAPPINGS


def template_fields(message: ChatMessage, form: TurnForm, path: str) -> dict[str, Any]:
    """Returns the fields of a message beside role and content, under the names that templates read.

    Where the template reads another role or content than the message has, they are among them.

    Args:
        message: The message.
        form: How the template reads turns.
        path: The client's name of the message.

    Raises:
        InvalidRequest: Arguments of a call are no JSON object.
    """
    fields = {"name": message.name, "tool_call_id": message.tool_call_id}
    fields |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)  # as templates name it
    made: dict[str, Any] = {name: value for name, value in fields.items() if value}
    if message.role == "developer" and not form.developer:
        made["role"] = "system"
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, form, f"{path}.tool_calls[{i}].arguments") for i, call in enumerate(message.tool_calls)
        ]
        if form.none and message.content in ("", ()):
            made["content"] = None
        elif form.either and message.reasoning:
            made["content"] = ""
    return made


def _call(call: ToolCall, form: TurnForm, path: str) -> dict[str, Any]:
    arguments: object = object_of(call.arguments, path)
    if form.text:
        arguments = call.arguments or "{}"
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Returns tools for a template; None for none.

    Raises:
        InvalidRequest: Parameters are no JSON object.
    """
    made = []
    for i, tool in enumerate(tools):
        parameters = object_of(tool.parameters, f"chat.tools[{i}].parameters") or {"type": "object", "properties": {}}
        described = {"description": tool.description} if tool.description else {}
        made.append({"type": "function", "function": {"name": tool.name, **described, "parameters": parameters}})
    return made or None
