"""Grammars of a call's arguments by their JSON schema, in each form of arguments."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from llguidance import LLTokenizer

from model.inputs.chat_output.formats import Arguments, ParameterTags, ToolFormat
from model.inputs.chat_output.grammar_form import OfferedTool
from model.inputs.chat_output.schema_types import NULLABLE, SHARED, resolved, types_of
from model.inputs.grammars import JSON_FORM, GrammarRefused, read_schema, try_schema

ANY_OBJECT: dict[str, Any] = {"type": "object"}
NOTES = {"title", "description", "default", "examples", "$schema", "$comment", "deprecated", "readOnly", "writeOnly"}
OF_OBJECT = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"} | NOTES
OF_TEXT = {"type", "enum", "const"} | NOTES
EMPTY = '""'
MOST_NAME = 128  # characters of a property's name where the parser reads it as a word
PLAIN = ("integer", "number", "boolean", "null")


class ArgumentsGrammar:
    """Makes the symbols of arguments.

    Args:
        form: Form of the calls, marked.
        literal: Returns a marked text as symbols.
        until: Adds a rule of text up to a literal, and returns its name.
        add_rule: Adds a rule.
        add_grammar: Adds a named grammar, in llguidance's form.
        tokenizer: Tries schemas.
    """

    def __init__(
        self,
        form: ToolFormat,
        literal: Callable[[str], str],
        until: Callable[[str, str], str],
        add_rule: Callable[[str], None],
        add_grammar: Callable[[dict[str, Any]], None],
        tokenizer: LLTokenizer,
    ) -> None:
        self._form, self._literal, self._until = form, literal, until
        self._add_rule, self._add_grammar = add_rule, add_grammar
        self._tokenizer = tokenizer
        self._prefix, self._count = "", 0

    def of(self, number: int, tool: OfferedTool) -> str:
        """Returns the symbols of a tool's arguments. The schema of a tool that is not strict is kept where it can be.

        Args:
            number: Number of the tool, for names of rules.
            tool: The tool.

        Raises:
            GrammarRefused: A strict schema cannot be enforced.
        """
        self._prefix, self._count = f"arguments_{number}", 0
        try:
            schema = read_schema(tool.parameters) if tool.parameters else {**ANY_OBJECT, "additionalProperties": False}
            if schema.get("type", "object") != "object":
                raise GrammarRefused("arguments are an object: its type must be that")
            try_schema(schema, self._tokenizer)
            return self._arguments({**schema, "type": "object"})
        except GrammarRefused as refused:
            if tool.strict:
                raise GrammarRefused(str(refused), tool.field) from None
            return self._any()

    def _name(self) -> str:
        self._count += 1
        return f"{self._prefix}_{self._count}"

    def _json(self, schema: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> str:
        """Returns JSON that is valid by a schema. whole: the schema that its references are relative to."""
        if whole is not None and not all(ref.startswith(SHARED) for ref in _references(schema)):
            raise GrammarRefused("$ref: must lead to $defs in the form of this model's calls")
        name = self._name()
        shared = {key: whole[key] for key in ("$defs", "definitions") if whole and key in whole}
        self._add_grammar({"name": name, "json_schema": {**shared, **schema, "x-guidance": JSON_FORM}})
        return "@" + name

    def _arguments(self, schema: Mapping[str, Any]) -> str:
        if self._form.arguments is Arguments.JSON:
            return self._json(schema)
        properties, required = _members(schema)
        made = []
        for key in sorted(properties) if self._form.arguments is Arguments.GEMMA else properties:
            one = properties[key]
            if self._form.arguments is Arguments.TAGGED:
                made.append(
                    (self._tagged(self._form.tags or ParameterTags("", "", ""), key, one, schema), key in required)
                )
            elif self._form.arguments is Arguments.PYTHON:
                made.append((f"{self._key(key, '=')} {self._json(one, schema)}", key in required))
            else:
                made.append((f"{self._key(key, ':')} {self._gemma(one)}", key in required))
        if self._form.arguments is Arguments.TAGGED:
            return " ".join(part if needed else f"({part})?" for part, needed in made)
        listed = self._listed(made, ", " if self._form.arguments is Arguments.PYTHON else ",")
        return f'"{{" {listed} "}}"' if self._form.arguments is Arguments.GEMMA else listed

    def _key(self, key: str, sign: str) -> str:
        if not key.isidentifier() or len(key) > MOST_NAME:
            raise GrammarRefused(f"properties/{key[:40]}: this model's calls have names of letters, digits and _ alone")
        return json.dumps(key + sign, ensure_ascii=False)

    def _listed(self, members: list[tuple[str, bool]], separator: str) -> str:
        """Returns members in their order, with separators between them.

        Args:
            members: Symbols of each, and whether it must be there.
            separator: What stands between two.
        """
        sign, rest, first = json.dumps(separator), "", ""
        for symbols, needed in reversed(members):
            after = f"{sign} {symbols} {rest}"
            whole = f"{symbols} {rest}"
            first = whole if needed else f"({whole} | {first})" if first else f"({whole})?"
            name = self._name()
            self._add_rule(f"{name}: " + (after if needed else f"({after})" + (f" | {rest}" if rest else " | ")))
            rest = name
        return first

    # Arguments in tags

    def _tagged(self, tags: ParameterTags, key: str, schema: Any, whole: Mapping[str, Any]) -> str:
        stop = tags.named.split()[0]
        if not key or stop in key or key != key.strip() or any(sign in key for sign in '\n<>"'):
            raise GrammarRefused(f"properties/{key[:40]}: this model's calls cannot have this name")
        types = types_of(schema, whole)
        if "string" not in types or not types <= NULLABLE:
            value = self._json(schema if isinstance(schema, dict) else {}, whole)
            return f"{self._before(tags, key, False)} {value} {self._literal(tags.end)}"
        ways = list(_alternatives(schema, whole, key))
        if "null" in types and not tags.typed and not any(map(_allows_null, ways)) and _may_be_null(ways, whole, key):
            raise GrammarRefused(f"properties/{key[:40]}: the text null reads as null in this model's calls")
        made = [self._text(tags, key, one) for one in ways if "string" in types_of(one, whole)]
        if any(_allows_null(one) for one in ways):
            made.append(f'{self._before(tags, key, False)} "null" {self._literal(tags.end)}')
        return made[0] if len(made) == 1 else "(" + " | ".join(made) + ")"

    def _before(self, tags: ParameterTags, key: str, is_text: bool) -> str:
        return self._literal(tags.begin + key + tags.named + (tags.typed and str(is_text).lower() + tags.typed))

    def _text(self, tags: ParameterTags, key: str, schema: Mapping[str, Any]) -> str:
        before, end = self._before(tags, key, True), tags.end.strip()
        behind = tags.end[tags.end.index(end) + len(end) :]
        if (texts := _texts_of(schema, key)) is None:
            return f"{before} {self._until(self._name(), end)} {self._literal(behind)}"
        if any(end in text or text != text.strip("\n") for text in texts):
            raise GrammarRefused(f"properties/{key[:40]}/enum: this model's calls cannot have one of these texts")
        listed = " | ".join(self._literal(text) or EMPTY for text in texts)
        return f"{before} ({listed}) {self._literal(tags.end)}"

    # Gemma's arguments

    def _gemma(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            raise GrammarRefused("this model's calls need a type for each value")
        kind = schema.get("type")
        if kind == "string":
            texts = _texts_of(schema, "")
            if texts is None:
                return f"{self._literal(self._form.quote)} {self._until(self._name(), self._form.quote)}"
            return "(" + " | ".join(self._literal(f"{self._form.quote}{one}{self._form.quote}") for one in texts) + ")"
        if kind in PLAIN:
            return self._json(schema)
        if kind == "array" and set(schema) <= {"type", "items"} | NOTES:
            item = self._name()
            self._add_rule(f"{item}: {self._gemma(schema.get('items'))}")
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            properties, required = _members(schema)
            made = [(f"{self._key(k, ':')} {self._gemma(properties[k])}", k in required) for k in sorted(properties)]
            return f'"{{" {self._listed(made, ",")} "}}"'
        raise GrammarRefused("this model's calls can have texts, numbers, booleans, and lists and objects of them")

    # Any arguments

    def _any(self) -> str:
        """Returns arguments that no schema says anything of."""
        form = self._form
        if form.arguments is Arguments.JSON:
            return self._json(ANY_OBJECT)
        key = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"
        if form.arguments is Arguments.TAGGED:
            tags = form.tags or ParameterTags("", "", "")
            end = tags.end.strip()
            named = self._literal(tags.named + ("true" + tags.typed if tags.typed else ""))
            behind = self._literal(tags.end[tags.end.index(end) + len(end) :])
            return f"({self._literal(tags.begin)} {key} {named} {self._until(self._name(), end)} {behind})*"
        if form.arguments is Arguments.PYTHON:
            one = f'{key} "=" {self._json({})}'
            return f'({one} (", " {one})*)?'
        text = f"{self._literal(form.quote)} {self._until(self._name(), form.quote)}"
        one = f'{key} ":" ({text} | {self._json({"type": list(PLAIN)})})'
        return f'"{{" ({one} ("," {one})*)? "}}"'


def _members(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns properties and the names of those that are required, of an object that says nothing else.

    Raises:
        GrammarRefused: It says more.
    """
    if more := sorted(set(schema) - OF_OBJECT):
        raise GrammarRefused(f"{more[0][:40]}: is not enforced in the form of this model's calls")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if unknown := [name for name in required if name not in properties]:
        raise GrammarRefused(f"required: {unknown[0]!r:.60} is no property")
    return properties, required


def _alternatives(schema: Mapping[str, Any], whole: Mapping[str, Any], key: str) -> Iterator[Mapping[str, Any]]:
    """Yields the alternatives of a schema of texts and null.

    Raises:
        GrammarRefused: It says more beside them.
    """
    for reference in ("$ref", "anyOf", "oneOf"):
        if reference not in schema:
            continue
        if more := sorted(set(schema) - NOTES - {reference}):
            raise GrammarRefused(f"properties/{key[:40]}/{more[0][:40]}: is not enforced beside {reference}")
        if reference == "$ref":
            yield from _alternatives(resolved(schema, whole), whole, key)
            return
        if reference == "oneOf" and sum("string" in types_of(one, whole) for one in schema[reference]) > 1:
            raise GrammarRefused(f"properties/{key[:40]}/oneOf: of several texts is not enforced in this model's calls")
        for one in schema[reference]:
            yield from _alternatives(one, whole, key)
        return
    yield schema


def _allows_null(schema: Mapping[str, Any]) -> bool:
    listed = [[schema["const"]] if "const" in schema else [None], schema.get("enum", [None])]
    return "null" in types_of(schema, {}) and all(None in one for one in listed)


def _may_be_null(ways: Iterable[Mapping[str, Any]], whole: Mapping[str, Any], key: str) -> bool:
    """Returns whether one of a schema's alternatives allows the text null."""
    listed = (_texts_of(one, key) for one in ways if "string" in types_of(one, whole))
    return any(texts is None or any(text.strip() == "null" for text in texts) for texts in listed)


def _texts_of(schema: Mapping[str, Any], key: str) -> list[str] | None:
    """Returns the texts that a schema of texts lists; None where it allows any.

    Raises:
        GrammarRefused: It bounds them otherwise.
    """
    if more := sorted(set(schema) - OF_TEXT):
        raise GrammarRefused(f"properties/{key[:40]}/{more[0][:40]}: is not enforced in the form of this model's calls")
    allowed = [[schema["const"]] if "const" in schema else None, schema.get("enum")]
    lists = [one for one in allowed if one is not None]
    if not lists:
        return None
    texts = [text for text in lists[0] if isinstance(text, str) and all(text in one for one in lists)]
    if not texts:
        raise GrammarRefused(f"properties/{key[:40]}: allows no text")
    return texts


def _references(value: Any) -> Iterator[str]:
    """Yields the references in a schema."""
    if isinstance(value, dict):
        if isinstance(reference := value.get("$ref"), str):
            yield reference
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from _references(one)
