"""A conversation as its template is given it: templates of text models read the content of a message as a string, those
of models that see go through a list of its parts, as transformers gives it to them.
"""

from collections.abc import Sequence
from typing import Any

from model.inputs.chat_renderer import ChatFailed, ChatRenderer
from scheduler.request import ChatMessage, ImageHere

PROBE = "quire-probe"


def reads_parts_alone(renderer: ChatRenderer) -> bool:
    """Whether the template leaves out what a message says in a string, but not what it says in parts. Many templates of
    models that see go through the characters of a string, and find nothing in them.
    """
    message = ChatMessage("user", PROBE)
    return not _shows(renderer, template_messages([message], False)) and _shows(
        renderer, template_messages([message], True)
    )


def _shows(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> bool:
    try:
        return PROBE in renderer.render(messages, {}, 2**16)
    except ChatFailed:
        return False


def template_messages(messages: Sequence[ChatMessage], parts_alone: bool) -> list[dict[str, Any]]:
    """Texts alone are put together to a string, unless the template reads parts alone."""
    return [{"role": message.role, "content": _content(message, parts_alone)} for message in messages]


def _content(message: ChatMessage, parts_alone: bool) -> str | list[dict[str, str]]:
    texts = [part for part in message.parts if isinstance(part, str)]
    if parts_alone or len(texts) < len(message.parts):
        return [_part(part) for part in message.parts]
    return "".join(texts)


def _part(part: str | ImageHere) -> dict[str, str]:
    return {"type": "image"} if isinstance(part, ImageHere) else {"type": "text", "text": part}
