"""Builds a request from a prompt and keyword arguments that have the names of the API's fields."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from quire.v1 import generation_service_pb2 as pb

from rpc.client.structured_output import structured_of

Turn = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Turn]

GROUPS = ("sampling", "stopping", "output")
OWN = (
    "model", "add_special_tokens", "priority", "cache_salt", "max_time", "max_queue_time", "prompt_truncation",
    "structured_output", "reasoning",
)  # fmt: skip
TOOLING = ("tools", "tool_choice", "tool_name", "parallel_tool_calls")
"""Options of a conversation."""
CHOICES = {"auto": pb.TOOL_CHOICE_AUTO, "none": pb.TOOL_CHOICE_NONE, "required": pb.TOOL_CHOICE_REQUIRED}
TURN = ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning")
"""Keys of a turn."""


def spec_of(prompt: Prompt, images: Sequence[bytes] = (), **options: Any) -> pb.GenerationSpec:
    """Returns the request for a prompt.

    Args:
        prompt: Text, token ids or a conversation. A conversation is a list of mappings with "role" and "content". A
            content is a text, or a list of texts and images (bytes of a PNG or JPEG). An assistant's turn may have
            "tool_calls" and "reasoning", a tool's "tool_call_id".
        images: Images of a prompt of text or ids, in the order of their placeholders.
        options: Fields of SamplingParameters, StoppingCriteria, OutputOptions and GenerationSpec by name. Times are
            seconds. None leaves a field unset. `text` and `token_ids` are those of OutputOptions. `structured_output`
            is a mapping such as {"json_schema": {...}} (`rpc.client.structured_output`). Of a conversation also
            `tools`, a list of {"name": ..., "description": ..., "parameters": JSON schema, "strict": ...},
            `tool_choice` ("auto", "none", "required"), `tool_name` and `parallel_tool_calls`; see `Chat` of the API.

    Raises:
        TypeError: No field has this name, or the field cannot hold the value.
        ValueError: A value is out of its field's range.
    """
    tooling = {name: options.pop(name) for name in TOOLING if name in options}
    spec = pb.GenerationSpec()
    spec.images.extend(pb.Image(data=image) for image in images)
    for name, value in options.items():
        if value is not None:
            try:
                _set(_owner(spec, name), name, value)
            except ValueError as error:  # protobuf's message names no field
                raise ValueError(f"{name}: {error}") from None
    if isinstance(prompt, str):
        spec.text = prompt
    elif any(not isinstance(part, int) for part in prompt):
        spec.chat.messages.extend(_turn(part) for part in prompt)
        _add_tools(spec.chat, **tooling)
    else:
        spec.token_ids.ids.extend(part for part in prompt if isinstance(part, int))
    if tooling and not spec.HasField("chat"):
        raise TypeError(f"{next(iter(tooling))} goes with a conversation alone")
    return spec


def _add_tools(
    chat: pb.Chat,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | None = None,
    tool_name: str | None = None,
    parallel_tool_calls: bool | None = None,
) -> None:
    chat.tools.extend(map(_tool, tools or ()))
    if tool_choice is not None:
        if tool_choice not in CHOICES:
            raise ValueError(f"tool_choice is {tool_choice!r:.60}, must be one of {', '.join(CHOICES)}")
        chat.tool_choice = CHOICES[tool_choice]
    chat.tool_name = tool_name or ""
    if parallel_tool_calls is not None:
        chat.parallel_tool_calls = parallel_tool_calls


def _tool(tool: Mapping[str, Any]) -> pb.Tool:
    values = dict(tool)
    if not isinstance(parameters := values.get("parameters", ""), str):
        values["parameters"] = json.dumps(parameters, ensure_ascii=False)
    return pb.Tool(**values)


def _owner(spec: pb.GenerationSpec, name: str) -> Message:
    if name in OWN:
        return spec
    for group in GROUPS:
        owner: Message = getattr(spec, group)
        if name in owner.DESCRIPTOR.fields_by_name:
            return owner
    raise TypeError(f"the API has no field {name!r}")


def _set(owner: Message, name: str, value: Any) -> None:
    field = getattr(owner, name)
    if isinstance(field, Duration):
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: must be finite; without a limit leave it out")
        field.FromNanoseconds(round(value * 1e9))
    elif isinstance(field, pb.StructuredOutput):
        field.CopyFrom(structured_of(value))
    elif isinstance(field, Message):
        field.CopyFrom(type(field)(**value) if isinstance(value, Mapping) else value)
    elif isinstance(value, Mapping):
        field.update(value)
    elif hasattr(field, "extend"):
        field.extend([value] if isinstance(value, str) else value)  # a single stop string needs no list
    else:
        setattr(owner, name, value)


def _turn(part: Any) -> pb.ChatMessage:
    if not isinstance(part, Mapping) or "role" not in part or not set(TURN).issuperset(part):
        raise TypeError(f"a turn of a conversation is a mapping of {', '.join(TURN)}, not {part!r:.60}")
    content = part.get("content")
    if content is None and part.get("tool_calls"):
        content = ()
    pieces = [content] if isinstance(content, str | bytes) else content
    if not isinstance(pieces, Sequence) or not all(isinstance(piece, str | bytes) for piece in pieces):
        raise TypeError(f"content is text or a list of texts and images (bytes), not {content!r:.60}")
    return pb.ChatMessage(
        parts=[_piece(piece) for piece in pieces],
        tool_calls=[
            call if isinstance(call, pb.ToolCall) else pb.ToolCall(**call) for call in part.get("tool_calls", ())
        ],
        **{name: part[name] for name in TURN if name in part and name not in ("content", "tool_calls")},
    )


def _piece(piece: str | bytes) -> pb.ContentPart:
    if isinstance(piece, str):
        return pb.ContentPart(text=piece)
    return pb.ContentPart(image=pb.Image(data=piece))
