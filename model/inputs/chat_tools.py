"""Puts tools, calls and reasoning of a conversation into the form that its template reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from scheduler.prompts import ChatMessage
from scheduler.tools import Tool, ToolCall, object_of

PROBE = "quire_probe"
PROBED = ToolCall("probe1234", PROBE, f'{{"{PROBE}": "{PROBE}"}}')


@dataclass(frozen=True, slots=True)
class CallsRead:
    """How a template reads an assistant's calls.

    Attributes:
        text: Arguments as JSON; else as a mapping.
        none: Content that is empty as None; else as an empty text.
    """

    text: bool = False
    none: bool = False


MAPPINGS = CallsRead()


def calls_read(renderer: ChatRenderer) -> CallsRead:
    """Returns the form in which the template writes a call out.

    transformers passes mappings, and most templates expect them; DeepSeek's concatenate texts, and look for content
    that is None. A template that writes no calls gets mappings.
    """
    for form in (MAPPINGS, CallsRead(text=True), CallsRead(none=True), CallsRead(text=True, none=True)):
        turn = {"role": "assistant", "content": ""} | template_fields(ChatMessage("assistant", "", (PROBED,)), form, "")
        messages = [{"role": "user", "content": "a"}, turn]
        try:
            written = renderer.render(messages, {}, 2**16, tools=template_tools([Tool(PROBE)]))
        except ChatFailed:
            continue
        if f'"{PROBE}"' in written.partition(PROBE)[2].replace("'", '"') and written.count(PROBE) > 2:
            return form
    return MAPPINGS


def template_fields(message: ChatMessage, form: CallsRead, path: str) -> dict[str, Any]:
    """Returns the fields of a message beside role and content, under the names that templates read.

    Args:
        message: The message.
        form: How the template reads calls.
        path: The client's name of the message.

    Raises:
        InvalidRequest: Arguments of a call are no JSON object.
    """
    fields = {"name": message.name, "tool_call_id": message.tool_call_id}
    fields |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), message.reasoning)  # as templates name it
    made: dict[str, Any] = {name: value for name, value in fields.items() if value}
    if message.tool_calls:
        made["tool_calls"] = [
            _call(call, form, f"{path}.tool_calls[{i}].arguments") for i, call in enumerate(message.tool_calls)
        ]
        if form.none and message.content in ("", ()):
            made["content"] = None
    return made


def _call(call: ToolCall, form: CallsRead, path: str) -> dict[str, Any]:
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
