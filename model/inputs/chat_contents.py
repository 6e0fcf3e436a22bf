"""A conversation as its template is given it: templates of text models read the content of a message as a string, those
of most models that see go through a list of its parts, as transformers gives it to them.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from scheduler.request import ChatMessage, ImageHere

PROBE = "quire-probe"


class Contents(Enum):
    """In which of its forms a template reads the content of a message."""

    STRINGS, PARTS, EITHER = range(3)


def contents_read(renderer: ChatRenderer) -> Contents:
    """Of a template of a model that sees. Many go through the characters of a string, and find nothing in them. Some of
    models that are no part of transformers, as nanoVLM's, put strings together, and fail on a list or write it out.
    """
    message = ChatMessage("user", PROBE)
    string, parts = (template_messages([message], form) for form in (Contents.STRINGS, Contents.PARTS))
    as_string, as_parts = _shown(renderer, string), _shown(renderer, parts)
    reads_parts = PROBE in as_parts and str(parts[0]["content"]) not in as_parts
    if reads_parts and PROBE not in as_string:
        return Contents.PARTS
    return Contents.STRINGS if PROBE in as_string and not reads_parts else Contents.EITHER


def _shown(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> str:
    try:
        return renderer.render(messages, {}, 2**16)
    except ChatFailed:
        return ""


def template_messages(messages: Sequence[ChatMessage], form: Contents, marker: str = "") -> list[dict[str, Any]]:
    """Texts alone are put together to a string, unless the template reads parts alone. marker: what names an image in a
    string.
    """
    return [{"role": message.role, "content": _content(message, form, marker)} for message in messages]


def _content(message: ChatMessage, form: Contents, marker: str) -> str | list[dict[str, str]]:
    sees = any(isinstance(part, ImageHere) for part in message.parts)
    if form is Contents.PARTS or (sees and form is Contents.EITHER):
        return [_part(part) for part in message.parts]
    return "".join(marker if isinstance(part, ImageHere) else part for part in message.parts)


def _part(part: str | ImageHere) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImageHere) else {"type": "text", "text": part}
