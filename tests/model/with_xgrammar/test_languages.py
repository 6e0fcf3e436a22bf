"""The texts that each library accepts, side by side. docs/guides/structured-output.md has a table of what differs."""

from typing import Any

import pytest
from llguidance import LLTokenizer

from model.inputs.grammars import ByteVocabulary
from scheduler.structured import Structured
from tests.model.with_xgrammar.test_expressions import MATCHED
from tests.support.grammar_backends import matcher

TOKENS = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
pytest.importorskip("xgrammar", reason="xgrammar is not installed")

LIBRARIES = ("llguidance", "xgrammar")


def schema(text: Any) -> Structured:
    return Structured.json_schema(text)


NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT, UUID = {"type": "string"}, '"12345678-1234-1234-1234-123456789abc"'
INTEGERS = {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}
LISTS = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
SAME: list[tuple[Structured, list[str], list[str]]] = [
    (Structured.choice(["yes", "no", 'q"\\\n', "é"]), ["yes", 'q"\\\n', "é"], ["", "y", "yesno"]),
    (Structured.grammar('root ::= "a" root "b" | [0-9]+'), ["1", "aa12bb"], ["", "a1", "ab"]),
    (Structured.grammar('root ::= x | y\nx ::= x "1" | "0"\ny ::= "é"? "\\n"'), ["011", "é\n", "\n"], ["1", "é"]),
    (Structured.json_object(), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "", "{", '{"a" 1}']),
    (schema(NAMED), ['{"a": -12}'], ["{}", '{"a": 1.5}', '{"a": 1, "b": 2}', '{"a": 01}', '{"a": "1"}']),
    (schema(OPEN), ["{}", '{"a": 1, "b": "x"}', '{"b": 1}'], ['{"a": "x"}', '{"a": 1, "a": 2}', '{"\\u0061": "x"}']),
    (schema(TEXT), ['"a\\nb"', '""', '"é\\\\"'], ['"', '"\n"', '"\\u0061"', '"\\/"', '"\\x"']),
    (schema({"type": "string", "minLength": 2, "maxLength": 3}), ['"ab"', '"é😀x"'], ['"a"', '"abcd"', '"a\x01"']),
    (schema({"type": "string", "pattern": "^[a-z]+x?[0-9]{2}$"}), ['"ab12"', '"xx01"'], ['"12"', '"ab1"', '"ab123"']),
    (schema({"type": "string", "pattern": r"^\s$"}), ['" "', '"\u3000"'], ['"\u0085"', '"\ufeff"', '"a"']),
    (schema({"type": "string", "pattern": r"^[x\s]$"}), ['" "', '"x"'], ['"\u0085"', '"\ufeff"', '"a"']),
    (schema({"type": "string", "pattern": r"^\S$"}), ['"a"', '"é"'], ['"\u0085"', '"\ufeff"', '"\u3000"']),
    (schema({"type": "string", "pattern": r"^[^x\s]$"}), ['"a"', '"é"'], ['"\u0085"', '"\ufeff"', '" "', '"x"']),
    (schema({"type": "string", "pattern": r"^[\s\S]$"}), ['"\u0085"', '"\ufeff"', '" "', '"a"'], ['""']),
    (schema({"type": "string", "format": "date"}), ['"2024-02-29"'], ['"2023-02-29"', '"2023-13-01"', '"2023-1-1"']),
    (schema({"type": "string", "format": "uuid"}), [UUID], ['"1"']),
    (schema({"type": "integer", "minimum": 3, "exclusiveMaximum": 120}), ["3", "119"], ["2", "120", "3.0", "-3"]),
    (schema({"type": "number", "minimum": -1.5, "maximum": 7}), ["-1.5", "0.25", "7"], ["-1.51", "7.01", "70"]),
    (schema({"enum": ["a", 1, None, True]}), ['"a"', "1", "null", "true"], ["false", "2", '"b"']),
    (schema({"type": "string", "enum": ["a", 1]}), ['"a"'], ["1"]),
    (schema({"type": ["integer", "null"]}), ["1", "null"], ['"1"', "1.5"]),
    (schema({"anyOf": [{"type": "null"}, NAMED]}), ["null", '{"a": 1}'], ["{}", "1"]),
    (schema(INTEGERS), ["[1]", "[1, 2]"], ["[]", "[1, 2, 3]"]),
    (schema(LISTS), ["[]", "[[], [[]]]"], ["[1]"]),
]  # fmt: skip
"""Constraints, and texts that both libraries accept or reject."""
DIFFERENT: list[tuple[str, Structured, str, bool, bool]] = [
    ("no space", schema(NAMED), '{"a":1}', True, False),
    ("new lines", schema(NAMED), '{\n  "a": 1\n}', True, False),
    ("no space in an array", schema({"type": "array", "items": {"type": "null"}}), "[null,null]", True, False),
    ("escapes of a bounded text", schema({"type": "string", "maxLength": 4}), '"a\\n"', True, False),
    ("escapes of a pattern", schema({"type": "string", "pattern": "^.$"}), '"\\""', True, False),
    ("digits beyond ASCII", Structured.regex(r"\d"), "٣", True, False),
    ("words beyond ASCII", Structured.regex(r"\w"), "é", True, False),
    ("what is no digit", Structured.regex(r"\D"), "é", True, False),
    ("other types", schema({"properties": {"a": {}}}), "1", True, False),
    ("whole numbers as decimals", schema({"enum": [1000.0]}), "1000", True, True),
    ("NUL", Structured.regex("[^a]"), "\x00", True, False),
]
"""Differences, by name: a text, and whether llguidance and XGrammar accept it. XGrammar's texts are always fewer."""


def accepts(library: str, structured: Structured, text: str) -> bool:
    begun, tokens = matcher(library, structured, TOKENS), list(text.encode())
    return begun.try_consume_tokens(tokens) == len(tokens) and begun.is_accepting()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", SAME, ids=lambda case: f"{case[0].kind} {case[0].text[:24]}")
def test_both_accept_and_reject(case: tuple[Structured, list[str], list[str]], library: str) -> None:
    structured, accepted, rejected = case
    assert [text for text in accepted if not accepts(library, structured, text)] == []
    assert [text for text in rejected if accepts(library, structured, text)] == []


@pytest.mark.parametrize("expression", [one for one in MATCHED if one])
def test_both_match_expressions(expression: str) -> None:
    matched, others = MATCHED[expression]
    for library in LIBRARIES:
        found = [text for text in (*matched, *others) if accepts(library, Structured.regex(expression), text)]
        assert set(matched) <= set(found)
        assert found == matched or (library == "llguidance" and not any(map(str.isascii, set(found) - set(matched))))


@pytest.mark.parametrize(("name", "structured", "text", "one", "other"), DIFFERENT, ids=[case[0] for case in DIFFERENT])
def test_differences_are_those_that_are_known(
    name: str, structured: Structured, text: str, one: bool, other: bool
) -> None:
    assert [accepts(library, structured, text) for library in LIBRARIES] == [one, other]
    assert one or not other


def test_what_llguidance_keeps_in_any_case() -> None:
    from model.inputs.with_xgrammar import grammars

    assert not grammars.serves("grammar", 'start: "a"')
    assert not grammars.serves("structural_tag", "{}")
    assert all(grammars.serves(structured.kind, structured.text) for structured, *_ in SAME)
