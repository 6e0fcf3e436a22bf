"""JSON types that a schema allows, for values that are written without their quotes.

In tags a text stands as it is, so that its schema says whether `12345` is a text or a number.
"""

from collections.abc import Mapping
from typing import Any

MOST_LEVELS = 8  # of references
MOST_ALTERNATIVES = 64  # that are looked at: a hostile schema has any number of them, also itself
SHARED = ("#/$defs/", "#/definitions/")
NULLABLE = {"string", "null"}


def resolved(schema: Any, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema, or the one that its `$ref` leads to; {} where that is none.

    Args:
        schema: A part of a client's schema, which may be anything.
        whole: The schema that references are relative to.
    """
    for _ in range(MOST_LEVELS):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith(SHARED):
            return schema
        _, shared, name = reference.split("/", 2)
        definitions = whole.get(shared)
        schema = definitions.get(name) if isinstance(definitions, Mapping) else None
    return {}


def types_of(schema: Any, whole: Mapping[str, Any]) -> frozenset[str]:
    """Returns the JSON types that a schema names; none where it names none, and may allow all, or too many.

    Args:
        schema: As in `resolved`.
        whole: Likewise.
    """
    left, found, seen = [schema], set[str](), 0
    while left:
        one = resolved(left.pop(), whole)
        several = one.get("anyOf", one.get("oneOf"))
        if isinstance(several, list) and several:
            left += several
        elif types := _types_of(one):
            found |= types
        else:
            return frozenset()
        seen += 1
        if seen + len(left) > MOST_ALTERNATIVES:
            return frozenset()
    return frozenset(found)


def _types_of(schema: Mapping[str, Any]) -> set[str]:
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {one for one in named if isinstance(one, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return set(map(type_of, values)) if isinstance(values, list) else set()


def type_of(value: object) -> str:
    """Returns the JSON type of a value that `json.loads` has made."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def allows(types: frozenset[str], value: object) -> bool:
    """Returns whether types have that of a value. An integer is a number."""
    own = type_of(value)
    return own in types or (own == "integer" and "number" in types)
