"""JSON schemas in shapes of which XGrammar enforces every keyword.

XGrammar reads a schema by its shape and ignores keywords that do not belong to it: `maxLength` beside `pattern`, `type`
beside `enum`, a bound without a type, two schemas of `allOf`, a required name without a property. So a schema is taken
apart here. Each has one shape, with those keywords that were found to be enforced in it (`tests/model/with_xgrammar`),
and all others that constrain a value are refused by name. What has a shape of its own is written in it: several types
become `anyOf`, lengths and formats become patterns, a required name gets its property.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from model.inputs.grammars import EMAIL, LEAP_DAY, NOTES, GrammarRefused, place_in_schema
from model.inputs.with_xgrammar.expressions import of_length, within_json

DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{LEAP_DAY})"
)
HOUR = "([01][0-9]|2[0-3])"
CLOCK = rf"{HOUR}:[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,9}})?([Zz]|[+-]{HOUR}:[0-5][0-9])"
BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
FORMATS = {
    "date": f"^{DATE}$",
    "time": f"^{CLOCK}$",
    "date-time": f"^{DATE}[Tt]{CLOCK}$",
    "email": EMAIL,
    "ipv4": rf"^{BYTE}(\.{BYTE}){{3}}$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}
"""Patterns of formats. XGrammar's own have days that months have not."""

ANYWHERE = frozenset({
    *NOTES, "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "deprecated", "readOnly",
    "writeOnly", "contentEncoding", "contentMediaType", "contentSchema",
})  # fmt: skip
"""Keywords that constrain nothing where they stand."""
SHAPES = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({
        "properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties",
    }),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
}  # fmt: skip
"""Keywords that are enforced with each type."""
BOUNDS = SHAPES["number"]
CONSTRAINTS = frozenset({
    *(keyword for keywords in SHAPES.values() for keyword in keywords),
    "type", "enum", "const", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "uniqueItems", "contains",
    "minContains", "maxContains", "additionalItems", "unevaluatedItems", "propertyNames", "dependentRequired",
    "dependentSchemas", "dependencies", "unevaluatedProperties", "$ref", "$dynamicRef", "$recursiveRef", "$anchor",
    "$dynamicAnchor", "$recursiveAnchor", "$vocabulary",
})  # fmt: skip
"""All keywords of JSON Schema and its older drafts that constrain a value; any other name is an annotation."""
LARGEST_MULTIPLE = 1024  # that the library does not ignore
KINDS: dict[type, str] = {str: "string", list: "array", dict: "object"}
CHOICES = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
"""Keywords that make a shape alone."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """A schema in shapes that XGrammar enforces.

    Attributes:
        schema: The schema. Its patterns are names, each standing for a rule.
        rules: Right sides of the rules, by name.
    """

    schema: Any
    rules: dict[str, str]


def schema_of(text: str) -> Shaped:
    """Returns a schema that `model.inputs.grammars.read_schema` accepts, in shapes that XGrammar enforces.

    Raises:
        GrammarRefused: It has a keyword that XGrammar does not enforce.
    """
    rules = dict[str, str]()
    try:
        return Shaped(_Shaping(rules).shaped(json.loads(text), ""), rules)
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None


def _refuse(where: str, name: str, why: str) -> GrammarRefused:
    return GrammarRefused(f"{place_in_schema(where, name)}: {why}")


def _is(kind: str, value: Any) -> bool:
    """Returns whether a JSON value is of a type."""
    if isinstance(value, bool):
        return kind == "boolean"
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and value == int(value))
    return kind == KINDS.get(type(value), "null")


def numbers_of(value: Any) -> Iterator[float]:
    """Yields the numbers with a point in a JSON value."""
    if isinstance(value, float):
        yield value
    elif isinstance(value, list | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers_of(one)


class _Shaping:
    """Gives a schema such shapes, and collects rules for its patterns."""

    def __init__(self, rules: dict[str, str]) -> None:
        self._rules = rules

    def _pattern(self, rule: str) -> str:
        """Returns the name of a rule, which stands for it as the pattern of a schema."""
        name = f"pattern{len(self._rules)}"
        self._rules[name] = rule
        return name

    def shaped(self, schema: Any, where: str) -> Any:
        """Returns a schema of any shape. where: JSON pointer to it."""
        if not isinstance(schema, dict):
            return schema
        keywords = {name: value for name, value in schema.items() if name in CONSTRAINTS}
        shaped = self._definitions(schema, where)
        choices = [name for name in CHOICES if name in keywords]
        if choices:
            return shaped | self._chosen(choices[0], keywords, where)
        types = keywords.pop("type", None)
        if types is None:
            types = self._type_of(keywords, where)
        if types is None:
            return shaped
        if isinstance(types, str):
            return shaped | self._typed(types, keywords, where)
        known = {keyword for kind in types for keyword in SHAPES.get(kind, ())}
        for name in keywords.keys() - known:
            raise _refuse(where, name, f"is not enforced beside the types {', '.join(types)} by xgrammar")
        # A number is an integer too.
        kinds = [kind for kind in types if not (kind == "integer" and "number" in types)]
        several = [{k: v for k, v in keywords.items() if k in SHAPES.get(kind, ())} for kind in kinds]
        return shaped | {"anyOf": [self._typed(kind, inner, where) for kind, inner in zip(kinds, several, strict=True)]}

    def _definitions(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        kept = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)}
        return {
            name: {k: self.shaped(v, f"{where}/{name}/{k}") for k, v in made.items()} for name, made in kept.items()
        }

    def _type_of(self, keywords: dict[str, Any], where: str) -> str | None:
        """Returns the only type with which keywords without a type mean something; None without keywords."""
        if not keywords:
            return None
        found = [kind for kind, known in SHAPES.items() if keywords.keys() <= known and kind != "integer"]
        if len(found) != 1:
            name = next((name for name in keywords if not any(name in known for known in SHAPES.values())), "")
            if name:
                raise _refuse(where, name, "is not enforced by xgrammar")
            raise _refuse(where, next(iter(keywords)), "has no type beside it, and several that it would need")
        return found[0]

    def _chosen(self, name: str, keywords: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns a schema that is a choice among values or schemas, or another schema's name."""
        value = keywords.pop(name)
        types = keywords.pop("type", None) if name in ("enum", "const") else None
        for other in keywords:
            raise _refuse(where, other, f"is not enforced beside {name} by xgrammar")
        if name in ("enum", "const"):
            values = value if name == "enum" else [value]
            kinds = [types] if isinstance(types, str) else types
            kept = [one for one in values if kinds is None or any(_is(kind, one) for kind in kinds)]
            for number in numbers_of(kept):
                if Decimal(f"{number:.17g}") != Decimal(repr(number)):
                    raise _refuse(where, name, f"{number!r} is written in other digits by xgrammar")
            if not kept:
                raise _refuse(where, name, "has no value of the type beside it")
            return {"enum": kept}
        if name == "$ref":
            if not (value == "#" or (value.startswith(("#/$defs/", "#/definitions/")) and value.count("/") == 2)):
                raise _refuse(where, name, "must be # or name one of the definitions with xgrammar")
            return {"$ref": value}
        inner = [self.shaped(one, f"{where}/{name}/{i}") for i, one in enumerate(value)]
        if name == "allOf":
            if len(inner) != 1:
                raise _refuse(where, name, "is enforced by xgrammar with one schema alone")
            if isinstance(inner[0], dict):
                return dict(inner[0])
        # llguidance has found alternatives of oneOf disjoint.
        return {"anyOf": inner}

    def _typed(self, kind: str, keywords: dict[str, Any], where: str) -> dict[str, Any]:
        """Returns a schema of one type."""
        for name in keywords:
            if name not in SHAPES.get(kind, ()):
                raise _refuse(where, name, f"is not enforced beside the type {kind} by xgrammar")
        made: dict[str, Any] = {"type": kind}
        if kind == "string":
            return made | self._text(keywords, where)
        if kind == "array":
            return made | self._items(keywords, where)
        if kind == "object":
            return made | self._properties(keywords, where)
        if "multipleOf" in keywords:
            for name in keywords.keys() & BOUNDS:
                raise _refuse(where, name, "is not enforced beside multipleOf by xgrammar")
            if not isinstance(keywords["multipleOf"], int) or not 1 <= keywords["multipleOf"] <= LARGEST_MULTIPLE:
                raise _refuse(where, "multipleOf", f"must be a whole number up to {LARGEST_MULTIPLE} with xgrammar")
        return made | keywords

    def _text(self, keywords: dict[str, Any], where: str) -> dict[str, Any]:
        own = [name for name in ("pattern", "format") if name in keywords]
        for name in keywords:
            if own and name != own[0]:
                raise _refuse(where, name, f"is not enforced beside {own[0]} by xgrammar")
        try:
            if own == ["pattern"]:
                return {"pattern": self._pattern(within_json(keywords["pattern"]))}
        except GrammarRefused as refused:
            raise _refuse(where, "pattern", str(refused)) from None
        if own:
            if keywords["format"] not in FORMATS:
                raise _refuse(where, "format", f"must be one of {', '.join(FORMATS)} with xgrammar")
            return {"pattern": self._pattern(within_json(FORMATS[keywords["format"]]))}
        if not keywords:
            return {}
        least, most = keywords.get("minLength", 0), keywords.get("maxLength")
        if most is not None and most < least:
            raise _refuse(where, "maxLength", "is below minLength")
        return {"pattern": self._pattern(of_length(least, most))}

    def _items(self, keywords: dict[str, Any], where: str) -> dict[str, Any]:
        made = dict(keywords)
        if "items" in made:
            made["items"] = self.shaped(made["items"], f"{where}/items")
        if "prefixItems" in made:
            made["prefixItems"] = [
                self.shaped(one, f"{where}/prefixItems/{i}") for i, one in enumerate(made["prefixItems"])
            ]
        return made

    def _properties(self, keywords: dict[str, Any], where: str) -> dict[str, Any]:
        made = dict(keywords)
        other = self.shaped(made.get("additionalProperties", True), f"{where}/additionalProperties")
        properties = {k: self.shaped(v, f"{where}/properties/{k}") for k, v in made.get("properties", {}).items()}
        if "patternProperties" in made:
            for name in keywords.keys() - {"patternProperties", "additionalProperties", "maxProperties"}:
                raise _refuse(where, name, "is not enforced beside patternProperties by xgrammar")
            if other is not False or len(made["patternProperties"]) != 1:
                raise _refuse(
                    where,
                    "patternProperties",
                    "is enforced by xgrammar with one pattern, and additionalProperties: false",
                )
            ((pattern, inner),) = made["patternProperties"].items()
            try:
                rule = within_json(pattern)
            except GrammarRefused as refused:
                raise _refuse(where, "patternProperties", str(refused)) from None
            inner = self.shaped(inner, f"{where}/patternProperties/{pattern}")
            return made | {"patternProperties": {self._pattern(rule): inner}}
        for name in made.get("required", ()):
            if name not in properties:
                if other is False:
                    raise _refuse(where, "required", f"{name!r:.40} is no property, and others are not allowed")
                properties[name] = {} if other is True else other
        if properties:
            made["properties"] = properties
        return made | {"additionalProperties": other}
