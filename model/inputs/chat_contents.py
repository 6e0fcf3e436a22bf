"""Puts a conversation into the form that its template reads.

Templates of text models read the content of a message as a string. Those of most vision-language models iterate over a
list of its parts, as transformers passes it.
"""

from collections.abc import Sequence
from enum import Enum
from typing import Any

from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from scheduler.prompts import ChatMessage, ImageHere

PROBE = "quire-probe"


class Contents(Enum):
    """Forms of a message's content that a template reads."""

    STRINGS, PARTS, EITHER = range(3)


def contents_read(renderer: ChatRenderer) -> Contents:
    """Returns the form that the template of a vision-language model reads.

    Many iterate over the characters of a string, and find no part in them. Some templates outside transformers, as
    nanoVLM's, concatenate strings: they fail on a list or write it out.
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
    """Returns messages for a template.

    Content without images is a string, unless the template reads parts alone.

    Args:
        messages: The conversation.
        form: Form that the template reads.
        marker: Text that stands for an image in a string.
    """
    return [{"role": message.role, "content": _content(message, form, marker)} for message in messages]


def _content(message: ChatMessage, form: Contents, marker: str) -> str | list[dict[str, str]]:
    sees = any(isinstance(part, ImageHere) for part in message.parts)
    if form is Contents.PARTS or (sees and form is Contents.EITHER):
        return [_part(part) for part in message.parts]
    return "".join(marker if isinstance(part, ImageHere) else part for part in message.parts)


def _part(part: str | ImageHere) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImageHere) else {"type": "text", "text": part}
