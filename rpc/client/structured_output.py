"""Constraints on an output, as a client writes them."""

import json
from collections.abc import Mapping
from typing import Any

from quire.v1 import generation_service_pb2 as pb

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")


def structured_of(value: pb.StructuredOutput | Mapping[str, Any]) -> pb.StructuredOutput:
    """Returns the API's message of a constraint.

    Args:
        value: The message itself, or a mapping with one key: "json_schema" (an object, or JSON), "json_object" (True),
            "regex", "choice" (a list of texts), "grammar" or "structural_tag" (an object, or JSON).

    Raises:
        TypeError: It is none of that.
        ValueError: A schema is no JSON, or a text is no Unicode.
    """
    if isinstance(value, pb.StructuredOutput):
        return value
    known = f"a mapping with one of {', '.join(KINDS)}"
    if not isinstance(value, Mapping) or len(value) != 1:
        raise TypeError(f"structured_output is {known}, not {value!r:.60}")
    ((kind, given),) = value.items()
    message = pb.StructuredOutput()
    match kind, given:
        case "json_schema" | "structural_tag", Mapping():
            setattr(message, kind, json.dumps(given, ensure_ascii=False, allow_nan=False))
        case "json_schema" | "regex" | "grammar" | "structural_tag", str():
            setattr(message, kind, given)
        case "json_object", bool():
            message.json_object = given
        case "choice", list() | tuple() if all(isinstance(text, str) for text in given):
            message.choice.SetInParent()  # without it an empty list would be no constraint
            message.choice.texts.extend(given)
        case _ if kind in KINDS:
            raise TypeError(f"structured_output[{kind!r}] cannot be {given!r:.60}")
        case _:
            raise TypeError(f"structured_output has no {kind!r:.60}: it is {known}")
    return message
