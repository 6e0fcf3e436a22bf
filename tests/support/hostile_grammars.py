"""Draws hostile constraints by seed: `draw(seed)` gives the same one everywhere.

Most are small, so that many can be tried. Some in a thousand are as large as a client can send.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scheduler.structured import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, KINDS, REGEX, STRUCTURAL_TAG, Structured
from tests.support.hostile_larks import deep_grammar, random_gbnf, random_lark, scratched_lark
from tests.support.hostile_tags import structural_tags
from tests.support.hostile_texts import (
    LETTERS,
    nested_regex,
    odd_text,
    random_regex,
    regex,
    scratched,
    scratched_regex,
    size,
)

SHOWN = 300  # characters of a constraint in a report


@dataclass(frozen=True)
class Hostile:
    """A hostile constraint.

    Attributes:
        seed: Seed that draws it.
        family: Name of what it is an example of.
        kind: Kind of the constraint, most often one of `KINDS`.
        given: Text of the constraint; for a choice what stands in place of its texts.
    """

    seed: int
    family: str
    kind: str
    given: Any

    def structured(self) -> Structured:
        """Returns it as a frontend does.

        Raises:
            InvalidRequest: The frontend refuses it before it is checked.
        """
        return Structured.choice(self.given) if self.kind == CHOICE else Structured(self.kind, self.given)

    def __str__(self) -> str:
        length = len(self.given) if isinstance(self.given, str) else len(repr(self.given))
        return f"seed {self.seed} ({self.family}): {self.kind} of {length} characters, {repr(self.given)[:SHOWN]}"


Maker = Callable[[random.Random], Any]

# Schemas.

TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")
BOUNDS = (
    "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
BOUNDS_OF = {"array": BOUNDS[:2], "string": BOUNDS[2:4], "number": BOUNDS[4:9], "integer": BOUNDS[4:9]}
FORMATS = ("date", "time", "date-time", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "duration", "regex", "x")
NESTING = (
    "items", "additionalProperties", "anyOf", "allOf", "oneOf", "prefixItems", "properties", "patternProperties",
    "$defs",
)  # fmt: skip
REFUSED = ("not", "contains", "propertyNames", "if", "then", "else", "unevaluatedItems", "dependentSchemas")
"""The others that lead to schemas."""
ALL_NESTING = (*NESTING, *NESTING, *REFUSED)
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "$defs", "dependentSchemas")
OTHERS = (
    "$schema", "$id", "$anchor", "$dynamicRef", "$dynamicAnchor", "$comment", "$vocabulary", "title", "default",
    "examples", "deprecated", "readOnly", "contentEncoding", "uniqueItems", "dependentRequired", "nullable",
    "x-guidance", "x-unknown", "discriminator", "definitions", "unevaluatedProperties", "additionalItems",
    "lark_grammar", "grammars",
)  # fmt: skip
NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 0.5, 1.0, 1e-300, 5e-324, 1e308, 1e15, 0.1, 1 / 3, 2**31, 2**32, 2**53, 2**63, 2**64, 10**12,
    10**19, 10**40, -(10**9), 10**400, -(10**400), float("inf"), float("nan"), -0.0, 1e-7, 123456789.123456, 10**5000,
]  # fmt: skip
GOOD = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, '
    '"age": {"type": "integer", "minimum": 0}, "tags": {"type": "array", "items": {"enum": ["a"]}, "maxItems": 3}}, '
    '"required": ["name", "age"], "additionalProperties": false}',
    '{"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"v": {"type": "number"}, '
    '"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}, "required": ["v"]}}}',
    '{"anyOf": [{"type": "string", "pattern": "^[a-z]+-[0-9]{2,4}$"}, {"type": "integer", "multipleOf": 5}, '
    '{"const": null}]}',
    '{"type": "array", "prefixItems": [{"type": "string", "format": "date-time"}, {"type": "boolean"}], '
    '"items": false}',
    '{"type": "object", "patternProperties": {"^n_": {"type": "integer"}, "^s_": {"type": "string"}}, '
    '"minProperties": 1}',
    '{"oneOf": [{"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, '
    '"required": ["kind"]}, {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}]}',
    '{"allOf": [{"type": "string", "minLength": 2}, {"pattern": "^a"}, {"pattern": "b$"}]}',
)


def dumps(value: Any, chance: random.Random) -> str:
    """Writes JSON; integers that Python does not write are cut."""
    text = json.dumps(_cut(value, 10**4000), ensure_ascii=chance.random() < 0.5)
    return text.encode("utf-8", "backslashreplace").decode()  # a lone surrogate becomes an escape of JSON's form


def _cut(value: Any, limit: int) -> Any:
    if isinstance(value, int) and abs(value) > limit:
        return limit
    if isinstance(value, dict):
        return {key: _cut(one, limit) for key, one in value.items()}
    return [_cut(one, limit) for one in value] if isinstance(value, list) else value


def number(chance: random.Random) -> Any:
    if chance.random() < 0.7:
        return chance.randint(0, 40)
    return chance.choice(NUMBERS) if chance.random() < 0.6 else 10 ** chance.randint(1, 30) * chance.choice((1, -1, 7))


def junk(chance: random.Random) -> Any:
    """Returns a value of a type that is likely to be wrong."""
    return chance.choice([
        None, True, False, [], {}, "", "x", [[]], [None], {"": {}}, [{}], odd_text(chance), number(chance),
        [number(chance)], [odd_text(chance)], chance.choice(TYPES), {"type": chance.choice(TYPES)},
        {odd_text(chance): number(chance)},
    ])  # fmt: skip


def pointer(chance: random.Random) -> str:
    return chance.choice([
        "#", "#/", "#/$defs/a0", "#/$defs/a1", "#/$defs/a2", "#/$defs/none", "#/properties/a", "#/items", "#/anyOf/0",
        "#/$defs/a0/anyOf/0", "#a", "http://example.org/x.json", "#/%24defs/a0", "#/$defs/~0~1", "", "#/not", "a0",
        "#/$defs/" + odd_text(chance), "https://json-schema.org/draft/2020-12/schema",
    ])  # fmt: skip


def schema(chance: random.Random, depth: int) -> Any:
    """Returns a random schema, of which nearly each keyword's value is of the right type."""
    if chance.random() < 0.05:
        return chance.choice([True, False, {}, junk(chance)])
    made: dict[str, Any] = {}
    if chance.random() < 0.7:
        made["type"] = chance.choice(TYPES) if chance.random() < 0.9 else chance.sample(TYPES, chance.randint(0, 4))
    for _ in range(chance.choice((0, 1, 1, 2, 3))):
        name, value = keyword(chance, depth, made.get("type"))
        made[name] = value if chance.random() < 0.97 else junk(chance)
    return made


def keyword(chance: random.Random, depth: int, kind: Any) -> tuple[str, Any]:
    """Returns a keyword and its value. kind: the type of what it is about, if that is known."""
    drawn = chance.random()
    if drawn < 0.3:
        fitting = BOUNDS_OF.get(kind) if isinstance(kind, str) and chance.random() < 0.9 else None
        return chance.choice(fitting or BOUNDS), number(chance)
    if drawn < 0.38:
        return chance.choice(("pattern", "pattern", "contentMediaType")), regex(chance, 2)
    if drawn < 0.43:
        return "format", chance.choice(FORMATS)
    if drawn < 0.48:
        return chance.choice(("enum", "const", "examples")), [junk(chance) for _ in range(chance.randint(0, 4))]
    if drawn < 0.55:
        return "$ref", pointer(chance)
    if drawn < 0.6:
        return "required", [chance.choice((*LETTERS, odd_text(chance))) for _ in range(chance.randint(0, 4))]
    if drawn < 0.65 or depth <= 0:
        name = (
            chance.choice(("title", "default", "$comment", "deprecated"))
            if chance.random() < 0.7
            else chance.choice(OTHERS)
        )
        return name, junk(chance)
    name = chance.choice(NESTING if chance.random() < 0.93 else REFUSED)
    if name in LISTS:
        return name, [schema(chance, depth - 1) for _ in range(chance.randint(0, 4))]
    if name in MAPS:
        keys = {"$defs": ("a0", "a1", "a2"), "patternProperties": [regex(chance, 1) for _ in range(3)]}.get(
            name, LETTERS
        )
        return name, {chance.choice(keys): schema(chance, depth - 1) for _ in range(chance.randint(0, 4))}
    return name, schema(chance, depth - 1)


def random_schema(chance: random.Random) -> str:
    made = schema(chance, chance.choice((1, 2, 3, 4)))
    if isinstance(made, dict) and chance.random() < 0.5:
        made.setdefault("$defs", {f"a{i}": schema(chance, 1) for i in range(3)})
    return dumps(made, chance)


def deep_schema(chance: random.Random) -> str:
    """Writes text, as json.dumps has a limit of its own."""
    names = [chance.choice(ALL_NESTING) for _ in range(chance.choice((1, 1, 2, 3)))]
    pairs = [
        (f'{{"{n}": [', "]}") if n in LISTS else (f'{{"{n}": {{"a": ', "}}") if n in MAPS else (f'{{"{n}": ', "}")
        for n in names
    ]
    depth = size(chance, 3000, 100_000)
    used = [pairs[i % len(pairs)] for i in range(depth)]
    inner = dumps(schema(chance, 0), chance)
    text = "".join(begin for begin, _ in used) + inner + "".join(end for _, end in reversed(used))
    return text if chance.random() < 0.9 else text[: chance.randrange(len(text) + 1)]


def cyclic_schema(chance: random.Random) -> str:
    count = size(chance, 60, 1500)

    def ref() -> dict[str, str]:
        return {"$ref": f"#/$defs/a{chance.randrange(count)}"}

    def node() -> Any:
        name = chance.choice(
            ("$ref", "anyOf", "allOf", "oneOf", "items", "properties", "prefixItems", "additionalProperties")
        )
        if name == "$ref":
            return ref() | ({} if chance.random() < 0.7 else {chance.choice(BOUNDS): number(chance)})
        if name in LISTS:
            return {name: [ref() for _ in range(chance.randint(1, 4))] + [schema(chance, 0)] * chance.randint(0, 1)}
        if name == "properties":
            required = chance.sample("abc", chance.randint(0, 3))
            return {"type": "object", name: {key: ref() for key in "abc"}, "required": required}
        return {name: ref()}

    return dumps({"$ref": "#/$defs/a0", "$defs": {f"a{i}": node() for i in range(count)}}, chance)


def wide_schema(chance: random.Random) -> str:
    breadth, name = chance.randint(2, 5), chance.choice(LISTS)

    def node(depth: int) -> Any:
        if depth == 0:
            return schema(chance, 0)
        mixed = chance.choice(LISTS) if chance.random() < 0.3 else name
        return {mixed: [node(depth - 1) for _ in range(breadth)]}

    return dumps(node(chance.choice((1, 2, 2, 3, 4)) if chance.random() < 0.995 else 5), chance)


def enum_schema(chance: random.Random) -> str:
    count = size(chance, 300, 100_000)
    base = odd_text(chance)
    values = [
        chance.choice((f"{base}{i}", f"{i}{base}", i, -i, i / 8, None, [i], {"a": i})) if i % 3 else f"v{i}" * 3
        for i in range(count)
    ]
    return dumps(chance.choice(({"enum": values}, {"anyOf": [{"const": value} for value in values]})), chance)


def bounds_schema(chance: random.Random) -> str:
    kind = chance.choice(TYPES)
    fitting = BOUNDS_OF.get(kind, BOUNDS) if chance.random() < 0.9 else BOUNDS
    made = {chance.choice(fitting): number(chance) for _ in range(chance.randint(1, 4))} | {"type": kind}
    if chance.random() < 0.3:
        made["items"] = {"type": chance.choice(TYPES), chance.choice(BOUNDS): number(chance)}
    return dumps(made, chance)


def pattern_schema(chance: random.Random) -> str:
    pattern: dict[str, Any] = {"type": "string", "pattern": regex(chance, 3)}
    if chance.random() < 0.4:
        pattern |= {chance.choice(("minLength", "maxLength")): abs(chance.choice((1, 5, 100, 10**4, 10**6, 10**9)))}
    if chance.random() < 0.2:
        pattern["format"] = chance.choice(FORMATS)
    several = [{"pattern": regex(chance, 2)} for _ in range(chance.randint(1, 5))]
    keys = {regex(chance, 2): schema(chance, 1) for _ in range(chance.randint(1, 5))}
    objects = {"type": "object", "patternProperties": keys, "additionalProperties": chance.choice((False, True, {}))}
    return dumps(chance.choice((pattern, {"allOf": several}, objects, {"propertyNames": pattern})), chance)


def properties_schema(chance: random.Random) -> str:
    count = size(chance, 100, 20_000)
    begin = chance.choice(("p", "", "a" * 50, '"', "\\", "\x00", "é", "\ud800", "\u2028", odd_text(chance)))
    names = [f"{begin}{i}" for i in range(count)]
    more: dict[str, Any] = {} if chance.random() < 0.5 else {chance.choice(BOUNDS): number(chance)}
    if chance.random() < 0.5:
        more["required"] = [*names[: chance.randint(0, count)], *(["none"] if chance.random() < 0.2 else [])]
    if chance.random() < 0.3:
        more["additionalProperties"] = schema(chance, 0)
    one = schema(chance, 1)
    return dumps({"type": "object", "properties": dict.fromkeys(names, one), **more}, chance)


def long_names_schema(chance: random.Random) -> str:
    """A refusal that says where would quote them."""
    made = schema(chance, 1)
    if isinstance(made, dict) and chance.random() < 0.7:
        made |= {chance.choice(("minProperties", "multipleOf", "exclusiveMinimum", "$schema", "x-guidance")): 10**18}
    for _ in range(chance.randint(1, 3)):
        name = odd_text(chance) * size(chance, 300, 100_000)
        made = {chance.choice(("properties", "$defs", "x", "patternProperties")): {name: made}}
    return dumps(made, chance)


def mutated_schema(chance: random.Random) -> str:
    made: Any = json.loads(chance.choice(GOOD))
    for _ in range(chance.choice((1, 1, 2, 3, 5))):
        node, key = chance.choice(_places(made) or [({"": None}, "")])
        drawn = chance.random()
        if drawn < 0.2:
            node[key] = junk(chance)
        elif drawn < 0.6:
            node[key] = number(chance) if isinstance(node[key], int) else schema(chance, 1)
        elif drawn < 0.75 and isinstance(node, dict):
            node |= dict([keyword(chance, 1, node.get("type"))])
        elif isinstance(node, dict):
            other = chance.choice((*BOUNDS, *ALL_NESTING, *OTHERS, "$ref", "type", odd_text(chance)))
            node[other] = node.pop(key)
    return dumps(made, chance)


def _places(node: Any) -> list[tuple[Any, Any]]:
    inner = list(node.items()) if isinstance(node, dict) else list(enumerate(node)) if isinstance(node, list) else []
    return [(node, key) for key, _ in inner] + [place for _, value in inner for place in _places(value)]


def scratched_schema(chance: random.Random) -> str:
    return scratched(chance, chance.choice(GOOD))


# Choices, and what is no constraint.


def choice(chance: random.Random) -> Any:
    drawn = chance.random()
    if drawn < 0.1:
        return chance.choice(
            [[], "yes", None, {}, [1], [None], [""], ["a", ""], [["a"]], 7, ["\ud800"], ["a", "\udfff"], ("a",)]
        )
    if drawn < 0.3:
        return [odd_text(chance) or "x" for _ in range(chance.randint(1, 8))]
    if drawn < 0.5:
        letter = odd_text(chance) or "a"
        return [letter * i for i in range(1, size(chance, 60, 1500) + 1)]
    if drawn < 0.6:
        return [odd_text(chance) * size(chance, 2000, 500_000) + "x" for _ in range(chance.randint(1, 3))]
    base = odd_text(chance)
    return [f"{base}{i}" if chance.random() < 0.5 else f"{i}{base}" for i in range(1, size(chance, 300, 100_000) + 1)]


def object_with_text(chance: random.Random) -> str:
    return chance.choice(["", "", "", odd_text(chance)])


def tags(chance: random.Random) -> str:
    return structural_tags(chance, {"json_schema": mutated_schema, "regex": random_regex, "grammar": random_lark})


MAKERS: dict[str, tuple[str, Maker, int]] = {
    "random schema": (JSON_SCHEMA, random_schema, 22),
    "mutated schema": (JSON_SCHEMA, mutated_schema, 14),
    "scratched schema": (JSON_SCHEMA, scratched_schema, 5),
    "deep schema": (JSON_SCHEMA, deep_schema, 3),
    "cyclic schema": (JSON_SCHEMA, cyclic_schema, 5),
    "wide schema": (JSON_SCHEMA, wide_schema, 3),
    "enum": (JSON_SCHEMA, enum_schema, 2),
    "bounds": (JSON_SCHEMA, bounds_schema, 6),
    "patterns": (JSON_SCHEMA, pattern_schema, 6),
    "properties": (JSON_SCHEMA, properties_schema, 3),
    "long names": (JSON_SCHEMA, long_names_schema, 2),
    "choice": (CHOICE, choice, 4),
    "object": (JSON_OBJECT, object_with_text, 1),
    "regex": (REGEX, random_regex, 10),
    "nested regex": (REGEX, nested_regex, 3),
    "scratched regex": (REGEX, scratched_regex, 4),
    "lark": (GRAMMAR, random_lark, 9),
    "scratched lark": (GRAMMAR, scratched_lark, 6),
    "gbnf": (GRAMMAR, random_gbnf, 5),
    "deep grammar": (GRAMMAR, deep_grammar, 1),
    "no grammar": (GRAMMAR, odd_text, 1),
    "structural tags": (STRUCTURAL_TAG, tags, 9),
}
"""By family: the kind, what makes one, and how often beside others."""
FAMILIES, WEIGHTS = list(MAKERS), [weight for _, _, weight in MAKERS.values()]


def draw(seed: int) -> Hostile:
    """Draws a hostile constraint."""
    chance = random.Random(seed)
    family = chance.choices(FAMILIES, WEIGHTS)[0]
    kind, make, _ = MAKERS[family]
    given = make(chance)
    if chance.random() < 0.01:  # a text where another kind is meant, or no kind
        kind = chance.choice((*KINDS, "xml", ""))
        given = given if isinstance(given, str) or kind == CHOICE else repr(given)
    return Hostile(seed, family, kind, given)
