"""Reads the prompts, conversations and images that callers pass to `LLM`.

This module checks the form alone, and names the wrong field. `rpc.frontend.prepare` checks the values later.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from os import PathLike
from typing import Any

from rpc.image_files import ImageFile, read_image
from scheduler.invalid import InvalidRequest
from scheduler.prompts import Chat, ChatMessage, ImageHere
from scheduler.tools import Tool, ToolCall, ToolChoice, ToolUse

PromptDict = Mapping[str, Any]
Prompt = str | Sequence[int] | PromptDict
Images = Sequence[ImageFile]

KEYS = ("prompt", "prompt_token_ids", "multi_modal_data", "cache_salt")
FORMS = "must be text, token ids, {'prompt': ...} or {'prompt_token_ids': ...}"
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning")


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt in the form of `scheduler.request.Spec`.

    Attributes:
        prompt: Text, token ids or a conversation.
        images: Bytes of PNG or JPEG files, in the order of their placeholders.
        cache_salt: Name of a part of the prefix cache; "" is the common part.
    """

    prompt: str | tuple[int, ...] | Chat
    images: tuple[bytes, ...] = ()
    cache_salt: str = ""


def is_one_prompt(prompts: object) -> bool:
    """Returns whether this is a single prompt: text, a dict, or a list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(p, Integral) for p in prompts)


def is_one_conversation(conversations: Sequence[Any]) -> bool:
    """Returns whether this is a single conversation: a list of messages rather than of lists."""
    return len(conversations) > 0 and isinstance(conversations[0], Mapping)


def read_prompt(prompt: object, images: object = ()) -> ReadPrompt:
    """Reads one prompt.

    Args:
        prompt: Text, token ids, or a dict in vLLM's form.
        images: Files of its images; a dict may have them instead.

    Raises:
        InvalidRequest: The value has no form of a prompt.
        OSError: An image file cannot be read.
        ValueError: An image file has a wrong form.
    """
    salt = ""
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in KEYS and prompt[key] is not None]
        if unknown:
            raise InvalidRequest(f"prompt[{unknown[0]!r}]", prompt[unknown[0]], f"a prompt has {', '.join(KEYS)} alone")
        salt = prompt.get("cache_salt") or ""
        images = images or _images_of(prompt.get("multi_modal_data") or {})
        texts = [prompt[key] for key in KEYS[:2] if prompt.get(key) is not None]
        if len(texts) != 1:
            raise InvalidRequest("prompt", list(prompt), "must have either 'prompt' or 'prompt_token_ids'")
        prompt = texts[0]
    return ReadPrompt(_text_or_ids(prompt), tuple(map(read_image, _image_files(images))), salt)


def _text_or_ids(prompt: object) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Iterable) and not isinstance(prompt, bytes):
        ids = tuple(prompt)
        wrong = next((i for i, token in enumerate(ids) if not isinstance(token, Integral)), None)
        if wrong is not None:
            raise InvalidRequest(f"token_ids[{wrong}]", ids[wrong], "must be a token id")
        return tuple(map(int, ids))
    raise InvalidRequest("prompt", prompt, FORMS)


def _images_of(data: object) -> object:
    """Returns the images of vLLM's `multi_modal_data`, which has one or a list."""
    if not isinstance(data, Mapping) or any(key != "image" for key in data):
        raise InvalidRequest("multi_modal_data", data, "must be {'image': ...}: Quire reads text and images")
    images = data.get("image", ())
    return images if isinstance(images, list | tuple) else (images,)


def _image_files(images: object) -> list[ImageFile]:
    files = []
    for i, image in enumerate(images if isinstance(images, Iterable) else (images,)):
        if not isinstance(image, bytes | str | PathLike):
            kind = type(image).__name__
            raise InvalidRequest(f"images[{i}]", kind, "must be the bytes of a PNG or JPEG file, or its path")
        files.append(image)
    return files


def read_conversation(messages: object, template_arguments: Mapping[str, Any], **how: Any) -> ReadPrompt:
    """Reads one conversation.

    Args:
        messages: {"role": ..., "content": ...} each. A content is a text or a list of {"type": "text", "text": ...}
            and {"type": "image", "image": bytes or path}.
        template_arguments: Variables of the model's chat template.
        how: Other fields of `Chat`.

    Raises:
        InvalidRequest: The value has no form of a conversation.
        OSError: An image file cannot be read.
        ValueError: An image file has a wrong form.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest("chat.messages", messages, "must be a list of {'role': ..., 'content': ...}")
    images = list[object]()
    read = tuple(_message(f"chat.messages[{i}]", message, images) for i, message in enumerate(messages))
    arguments = tuple((name, json.dumps(value)) for name, value in template_arguments.items())
    return ReadPrompt(Chat(read, arguments, **how), tuple(map(read_image, _image_files(images))))


def _message(name: str, message: object, images: list[object]) -> ChatMessage:
    """Reads one message, and appends its images to `images`."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(name, message, "must be {'role': ..., 'content': ...}")
    for key in message:
        if key not in MESSAGE_KEYS and message[key] is not None:
            raise InvalidRequest(f"{name}.{key}", message[key], f"a message has {', '.join(MESSAGE_KEYS)} alone")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = tuple(_part(f"{name}.content[{i}]", part, images) for i, part in enumerate(content))
    calls = tuple(_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(message.get("tool_calls") or ()))
    texts = {key: _text(f"{name}.{key}", message.get(key) or "") for key in ("tool_call_id", "name", "reasoning")}
    if content is None and calls:
        content = ""
    return ChatMessage(message.get("role", ""), content, calls, **texts)  # type: ignore[arg-type]  # `Chat` refuses what is no content


def read_tools(tools: Iterable[object], choice: str, name: str) -> ToolUse:
    """Reads the tools of a conversation.

    Args:
        tools: {"name": ..., "description": ..., "parameters": JSON schema, "strict": ...} each, or OpenAI's
            {"type": "function", "function": {...}}.
        choice: "auto", "none" or "required".
        name: Name of the only tool that is called; "" for any.

    Raises:
        InvalidRequest: A value has no form of tools.
    """
    if choice not in tuple(ToolChoice):
        raise InvalidRequest("tool_choice", choice, f"must be one of {', '.join(ToolChoice)}")
    return ToolUse(tuple(_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)), ToolChoice(choice), name)


def _function(name: str, value: object, keys: tuple[str, ...]) -> dict[str, Any]:
    """Returns the fields of a function, which may stand in OpenAI's "function"."""
    if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping):
        value = {**value["function"], **({"id": value["id"]} if "id" in value else {})}
    if not isinstance(value, Mapping) or "name" not in value or not set(keys).issuperset(value):
        raise InvalidRequest(name, value, f"must have a name, and may have {', '.join(keys)}")
    return dict(value)


def _tool(name: str, tool: object) -> Tool:
    values = _function(name, tool, ("name", "description", "parameters", "strict"))
    parameters = values.get("parameters") or ""
    text = parameters if isinstance(parameters, str) else json.dumps(parameters, ensure_ascii=False)
    return Tool(values["name"], values.get("description") or "", text, bool(values.get("strict")))


def _call(name: str, call: object) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    values = _function(name, call, ("id", "name", "arguments"))
    arguments = values.get("arguments") or ""
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    texts = {"id": values.get("id") or "", "name": values["name"], "arguments": arguments}
    return ToolCall(*(_text(f"{name}.{key}", text) for key, text in texts.items()))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(name, value, "must be a text")
    return value


def _part(name: str, part: object, images: list[object]) -> str | ImageHere:
    kind = part.get("type") if isinstance(part, Mapping) else part
    if isinstance(part, Mapping) and kind == "image" and "image" in part:
        images.append(part["image"])
        return ImageHere()
    if isinstance(part, Mapping) and kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest(
        name, kind, "must be {'type': 'text', 'text': ...} or {'type': 'image', 'image': bytes or path of the file}"
    )
