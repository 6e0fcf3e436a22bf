"""Conversations of lines in Quire's own form: their messages, tools, and the files of their images."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from quire.v1 import generation_service_pb2 as pb

from rpc.batch.images import NamedFile, set_image
from rpc.client.specs import CHOICES, TOOLING, TURN
from scheduler.invalid import InvalidRequest, require

CONVERSATION = ("template_arguments", *TOOLING)
"""Keys of a line that go with messages alone."""
TEXTS = ("tool_call_id", "name", "reasoning")


def set_chat(chat: pb.Chat, values: Mapping[str, Any], folder: Path) -> list[NamedFile | None]:
    """Sets the conversation of a line, and returns the image files to read.

    Args:
        chat: Is set.
        values: The line.
        folder: Folder of the files that the line names.

    Raises:
        InvalidRequest: A key has a value that is wrong.
        RequestFailed: An image is wrong.
    """
    messages = values["messages"]
    if not isinstance(messages, list):
        raise InvalidRequest("messages", messages, "must be a list of messages")
    chat.SetInParent()
    files = list[NamedFile | None]()
    for i, message in enumerate(messages):
        try:
            files += _set_message(chat.messages.add(), message, f"messages[{i}]", folder)
        except InvalidRequest:  # a ValueError too
            raise
        except ValueError:
            raise InvalidRequest(f"messages[{i}]", message, "is no Unicode text") from None
    _set_arguments(chat, values.get("template_arguments", {}))
    _set_tools(chat, values)
    return files


def parse_object(values: object, into: Message, key: str) -> None:
    """Parses an object as the proto's message. Raises InvalidRequest, which names the line's key."""
    if not isinstance(values, dict):
        raise InvalidRequest(key, values, "must be an object")
    try:
        json_format.ParseDict(values, into)
    except (json_format.ParseError, ValueError, TypeError, ArithmeticError) as error:
        raise InvalidRequest(key, values, str(error)) from None


def _set_message(message: pb.ChatMessage, values: object, field: str, folder: Path) -> list[NamedFile | None]:
    """Sets a message, and returns the files to read. Raises ValueError for lone surrogates."""
    known = isinstance(values, dict) and {"role"} <= values.keys() <= {*TURN}
    if not isinstance(values, dict) or not known or ("content" not in values and not values.get("tool_calls")):
        says = f"must be an object of role and content, which may have {', '.join(TURN[2:])} too"
        raise InvalidRequest(field, values, says)
    for name in ("role", *TEXTS):
        value = values.get(name, "")
        require(isinstance(value, str), f"{field}.{name}", value, "must be a string")
        setattr(message, name, value)
    calls = values.get("tool_calls", [])
    require(isinstance(calls, list), f"{field}.tool_calls", calls, "must be a list of calls")
    for i, call in enumerate(calls):
        _parse_with_json(call, message.tool_calls.add(), f"{field}.tool_calls[{i}]", "arguments")
    return _set_content(message, values.get("content", []), f"{field}.content", folder)


def _set_content(message: pb.ChatMessage, content: object, field: str, folder: Path) -> list[NamedFile | None]:
    files = list[NamedFile | None]()
    if isinstance(content, str):
        message.parts.add(text=content)
        return files
    if not isinstance(content, list):
        raise InvalidRequest(field, content, "must be a string or a list of parts")
    for i, part in enumerate(content):
        match part:
            case {"type": "text", "text": str(text), **rest} if not rest:
                message.parts.add(text=text)
            case {"type": "image", "image": image, **rest} if not rest:
                files.append(set_image(message.parts.add().image, image, f"{field}[{i}].image", folder))
            case _:
                says = "must have a type, text or image, and a field of that name"
                raise InvalidRequest(f"{field}[{i}]", part, says)
    return files


def _set_arguments(chat: pb.Chat, arguments: object) -> None:
    """Sets the arguments of the template, which are plain JSON values."""
    if not isinstance(arguments, dict):
        raise InvalidRequest("template_arguments", arguments, "must be an object")
    for name, value in arguments.items():
        try:
            chat.template_arguments[name] = json.dumps(value)
        except ValueError:
            raise InvalidRequest("template_arguments", name, "is no Unicode text") from None


def _set_tools(chat: pb.Chat, values: Mapping[str, Any]) -> None:
    tools, choice = values.get("tools", []), values.get("tool_choice", "auto")
    require(isinstance(tools, list), "tools", tools, "must be a list of tools")
    for i, tool in enumerate(tools):
        _parse_with_json(tool, chat.tools.add(), f"tools[{i}]", "parameters")
    known = isinstance(choice, str) and choice in CHOICES
    require(known, "tool_choice", choice, f"must be one of {', '.join(CHOICES)}")
    if "tool_choice" in values:
        chat.tool_choice = CHOICES[choice]
    for name in ("tool_name", "parallel_tool_calls"):
        if name in values:
            parse_object({name: values[name]}, chat, name)


def _parse_with_json(values: object, into: Message, field: str, key: str) -> None:
    """Parses an object whose value of `key` is JSON, as a text or as it is."""
    if isinstance(values, dict) and isinstance(values.get(key), dict):
        values = values | {key: json.dumps(values[key], ensure_ascii=False)}
    parse_object(values, into, field)
