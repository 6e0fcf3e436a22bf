"""Bounds of a request's work on a frontend's worker threads, checked before the work."""

import json
import re
from collections.abc import Sequence

from scheduler.invalid import InvalidRequest
from scheduler.limits import Limits
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.resolve import check_ids
from scheduler.spec import Spec

BYTES_A_TOKEN = 16  # more than text in any language takes on average; bounds what is worth tokenizing
ARGUMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
NO_ARGUMENTS = ("messages", "tools", "documents", "add_generation_prompt")  # passed to every template by `ChatRenderer`


def check_bad_words(spec: Spec, limits: Limits) -> None:
    """Checks the number of bad words and their sizes. Raises InvalidRequest."""
    words, most = spec.sampling.bad_words, limits.request
    if len(words) > most.bad_words:
        raise InvalidRequest("sampling.bad_words", f"{len(words)} words", f"at most {most.bad_words}")
    longest = BYTES_A_TOKEN * most.bad_word_tokens
    for i, word in enumerate(words):
        size = _size(word, f"sampling.bad_words[{i}]")
        if size > longest:
            raise InvalidRequest(f"sampling.bad_words[{i}]", f"{size} bytes", f"at most {longest} bytes")


def check_text(text: str, limits: Limits, name: str = "text") -> None:
    """Checks the size of a text. name: field that it comes from. Raises InvalidRequest."""
    size, most = _size(text, name), most_bytes(limits.longest)
    if size > most:
        raise InvalidRequest(name, f"{size} bytes", f"at most {most} bytes for {limits.longest} tokens")


def check_chat(chat: Chat, limits: Limits) -> dict[str, object]:
    """Checks a conversation. Returns the values of the template's arguments. Raises InvalidRequest."""
    size = sum(_size(name, "chat.template_arguments") + _size(text, _argument(name)) for name, text in chat.arguments)
    for i, message in enumerate(chat.messages):
        size += _size(message.role, f"chat.messages[{i}].role")
        texts = [part for part in message.parts if not isinstance(part, ImageHere)]
        size += sum(_size(text, f"chat.messages[{i}].parts") for text in texts)
        size += sum(map(_size, *zip(*_others(message, f"chat.messages[{i}]"), strict=True)))
    for i, tool in enumerate(chat.tool_use.tools):
        size += _size(tool.name, f"chat.tools[{i}].name") + _size(tool.description, f"chat.tools[{i}].description")
        size += _size(tool.parameters, f"chat.tools[{i}].parameters")
    if size > (most := most_bytes(limits.longest)):
        raise InvalidRequest("chat", f"{size} bytes", f"at most {most} bytes for {limits.longest} tokens")
    return {name: _value(name, text) for name, text in chat.arguments}


def _others(message: ChatMessage, path: str) -> list[tuple[str, str]]:
    """Returns the other texts of a message, each with its name."""
    texts = [(message.name, "name"), (message.tool_call_id, "tool_call_id"), (message.reasoning, "reasoning")]
    for j, call in enumerate(message.tool_calls):
        inner = f"tool_calls[{j}]"
        texts += [(call.id, f"{inner}.id"), (call.name, f"{inner}.name"), (call.arguments, f"{inner}.arguments")]
    return [(text, f"{path}.{name}") for text, name in texts]


def _argument(name: str) -> str:
    return f"chat.template_arguments[{name}]"


def _value(name: str, text: str) -> object:
    """Parses an argument of the template. Raises InvalidRequest."""
    if not ARGUMENT.fullmatch(name):
        raise InvalidRequest(_argument(name[:64]), text, "its name must be 1 to 64 of A-Z a-z 0-9 _, no digit first")
    if name in NO_ARGUMENTS:
        raise InvalidRequest(_argument(name), text, "is what every template is given, and no argument")
    try:
        value: object = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(_argument(name), text, f"must be a JSON value: {error}") from None
    return value


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is none")


def check_token_ids(ids: Sequence[int], limits: Limits) -> None:
    """Checks the number of token ids that are to become text. Raises InvalidRequest."""
    check_ids("token_ids", ids, limits.context, limits)


def most_bytes(tokens: int) -> int:
    """Returns how much text is worth tokenizing where this many tokens can be served."""
    return max(2**16, BYTES_A_TOKEN * tokens)


def message_bytes(tokens: int) -> int:
    """Returns the default size limit of a request message, without images, for a context of this many tokens."""
    return 8 * tokens + 2**16


def _size(text: str, name: str) -> int:
    """Returns the size of a text in bytes. Raises InvalidRequest."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(name, text, "is no Unicode text") from None
