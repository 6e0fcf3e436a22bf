"""Structured output: the constraint that a request puts on its whole output.

A sequence ends where its constraint is complete, or where nothing may follow. No token is drawn with which the output
could not be completed any more. `model.structured` keeps it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.invalid import InvalidRequest, require, require_several
from scheduler.structural_tags import StructuralTags, read_tags

FIELD = "structured_output"
JSON_SCHEMA, JSON_OBJECT, REGEX, CHOICE, GRAMMAR = "json_schema", "json_object", "regex", "choice", "grammar"
STRUCTURAL_TAG = "structural_tag"
KINDS = (JSON_SCHEMA, JSON_OBJECT, REGEX, CHOICE, GRAMMAR, STRUCTURAL_TAG)


@dataclass(frozen=True, slots=True)
class Structured:
    """A constraint. The static methods make one.

    Attributes:
        kind: One of `KINDS`, which are the API's names.
        text: A JSON schema, a regular expression, a JSON list of texts, a grammar, or structural tags as JSON; "" for
            any JSON object.
    """

    kind: str
    text: str = ""
    _tags: StructuralTags | None = field(init=False, repr=False, compare=False, default=None)  # read once

    def __post_init__(self) -> None:
        require(self.kind in KINDS, FIELD, self.kind, f"must be one of {', '.join(KINDS)}")
        try:
            self.text.encode()  # lone surrogates cannot be sent to an engine
        except UnicodeEncodeError:
            raise InvalidRequest(self.path, self.text, "is no Unicode text") from None
        if self.kind != JSON_OBJECT:
            require(self.text != "", self.path, self.text, "must not be empty")
        if self.kind == STRUCTURAL_TAG:
            object.__setattr__(self, "_tags", read_tags(self.text, self.path))

    @property
    def tags(self) -> StructuralTags:
        """Structural tags, of a constraint of that kind. Raises TypeError for another kind."""
        if self._tags is None:
            raise TypeError(f"a constraint of the kind {self.kind} has no structural tags")
        return self._tags

    @property
    def path(self) -> str:
        """Name in errors: the path from the API's GenerationSpec."""
        return f"{FIELD}.{self.kind}"

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | str | type) -> "Structured":
        """JSON that is valid by a schema of JSON Schema 2020-12.

        Args:
            schema: The schema, as JSON too, or a class that pydantic can make one of: a model of its own, a dataclass,
                a TypedDict.

        Raises:
            InvalidRequest: It is no JSON object.
            TypeError: pydantic cannot make a schema of the class.
        """
        if isinstance(schema, type):
            schema = _schema_of(schema)
        return Structured(JSON_SCHEMA, schema if isinstance(schema, str) else _json(schema, f"{FIELD}.{JSON_SCHEMA}"))

    @staticmethod
    def json_object() -> "Structured":
        """Any JSON object."""
        return Structured(JSON_OBJECT)

    @staticmethod
    def regex(pattern: str) -> "Structured":
        """Text that a regular expression matches as a whole, in the syntax of Rust's `regex` crate."""
        return Structured(REGEX, pattern)

    @staticmethod
    def choice(texts: Sequence[str]) -> "Structured":
        """One of these texts."""
        name = f"{FIELD}.{CHOICE}"
        require_several(name, texts, "('yes', 'no', ...)")
        require(len(texts) > 0, name, texts, "must have at least one text")
        for i, text in enumerate(texts):
            require(isinstance(text, str) and text, f"{name}[{i}]", text, "must be a text, and not empty")
        return Structured(CHOICE, _json(list(texts), name))

    @staticmethod
    def grammar(text: str) -> "Structured":
        """Text of a context-free grammar, whose start symbol is `start` in Lark's syntax and `root` in GBNF's."""
        return Structured(GRAMMAR, text)

    @staticmethod
    def structural_tag(tags: Mapping[str, Any] | str) -> "Structured":
        """Free text that has tags with constrained content.

        Args:
            tags: `structures` and `triggers`, or a `format` of type triggered_tags, as vLLM's structural_tag has them;
                as JSON too.

        Raises:
            InvalidRequest: They are malformed, or have something that is not supported.
        """
        name = f"{FIELD}.{STRUCTURAL_TAG}"
        return Structured(STRUCTURAL_TAG, tags if isinstance(tags, str) else _json(tags, name))


def _json(value: Any, name: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(name, type(value).__name__, f"is no JSON: {error}") from None


def _schema_of(kind: type) -> dict[str, Any]:
    from pydantic import PydanticUserError, TypeAdapter
    from pydantic.errors import PydanticInvalidForJsonSchema

    try:
        return TypeAdapter(kind).json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        raise TypeError(f"{kind.__name__} has no JSON schema: {error}") from None
