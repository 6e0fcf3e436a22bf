"""Builds a request from a prompt and keyword arguments that have the names of the API's fields."""

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
    "structured_output",
)  # fmt: skip


def spec_of(prompt: Prompt, images: Sequence[bytes] = (), **options: Any) -> pb.GenerationSpec:
    """Returns the request for a prompt.

    Args:
        prompt: Text, token ids or a conversation. A conversation is a list of mappings with "role" and "content". A
            content is a text, or a list of texts and images (bytes of a PNG or JPEG).
        images: Images of a prompt of text or ids, in the order of their placeholders.
        options: Fields of SamplingParameters, StoppingCriteria, OutputOptions and GenerationSpec by name. Times are
            seconds. None leaves a field unset. `text` and `token_ids` are those of OutputOptions. `structured_output`
            is a mapping such as {"json_schema": {...}} (`rpc.client.structured_output`).

    Raises:
        TypeError: No field has this name, or the field cannot hold the value.
        ValueError: A value is out of its field's range.
    """
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
    else:
        spec.token_ids.ids.extend(part for part in prompt if isinstance(part, int))
    return spec


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
    if not isinstance(part, Mapping) or part.keys() != {"role", "content"}:
        raise TypeError(f"a turn of a conversation is a mapping of role and content, not {part!r:.60}")
    content = part["content"]
    pieces = [content] if isinstance(content, str | bytes) else content
    if not isinstance(pieces, Sequence) or not all(isinstance(piece, str | bytes) for piece in pieces):
        raise TypeError(f"content is text or a list of texts and images (bytes), not {content!r:.60}")
    return pb.ChatMessage(role=part["role"], parts=[_piece(piece) for piece in pieces])


def _piece(piece: str | bytes) -> pb.ContentPart:
    if isinstance(piece, str):
        return pb.ContentPart(text=piece)
    return pb.ContentPart(image=pb.Image(data=piece))
