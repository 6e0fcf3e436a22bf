"""JSON schemas as clients ask for them. Imports nothing: engines' processes of other environments read it too."""

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 40}
AGE: Schema = {"type": "integer", "minimum": 0, "maximum": 150}
LABELS = ["confidence_level", "classification_result", "explanation_kind", "customer_identifier"]


def tool(name: str) -> Schema:
    """Returns the schema of a call of a search tool."""
    properties: Schema = {
        "query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "sort": {"enum": ["relevance", "date", "price"]}, "tags": {"type": "array", "items": SHORT},
        "range": {"type": "object", "properties": {"from": {"type": "string", "format": "date"},
                                                   "to": {"type": "string", "format": "date"}}},
    }  # fmt: skip
    arguments = {"type": "object", "properties": properties, "required": ["query"], "additionalProperties": False}
    called = {"name": {"const": name}, "arguments": arguments}
    return {"type": "object", "properties": called, "required": ["name", "arguments"], "additionalProperties": False}


def tags(names: list[str]) -> dict[str, Any]:
    """Returns structural tags of calls of search tools, of which the output begins with one."""
    calls = [
        {"begin": f"<function={name}>", "end": "</function>",
         "content": {"type": "json_schema", "json_schema": tool(name)["properties"]["arguments"]}}
        for name in names
    ]  # fmt: skip
    return {
        "format": {"type": "triggered_tags", "triggers": ["<function="], "tags": calls, "at_least_one": True},
    }  # fmt: skip


def record(**more: Schema) -> Schema:
    """Returns the schema of a person, with more properties, or others, than name, age and mail address."""
    properties: Schema = {
        "name": SHORT, "age": {"type": "integer", "minimum": 0}, "email": {"type": "string", "format": "email"}, **more,
    }  # fmt: skip
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def labelled(*values: str) -> Schema:
    """Returns the schema of an object of four labels, each one of some values."""
    properties: Schema = {label: {"enum": list(values)} for label in LABELS}
    return {"type": "object", "properties": properties, "required": LABELS, "additionalProperties": False}


def endless(items: Schema) -> Schema:
    """Returns the schema of an array that no output of a benchmark completes."""
    return {"type": "array", "minItems": 1000, "items": items}


RECORDS = endless(record())
LABELLED = labelled("high", "medium", "low")

VARIED: dict[str, Callable[[int], Schema]] = {
    "tools": lambda number: {"anyOf": [tool(f"search_{number}_{i}") for i in range(10)]},
    "record": lambda number: record(**{"age": AGE, f"note_{number}": SHORT}),
    "labels": lambda number: labelled("high", "medium", "low", f"other_{number}"),
    "choice": lambda number: {"enum": [f"category number {number}-{i}" for i in range(100)]},
}
"""Schemas by name: a call of ten tools, a record, four labels, one of 100 texts. Each number makes another grammar."""
