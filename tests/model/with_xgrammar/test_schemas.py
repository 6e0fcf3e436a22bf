"""No keyword of a schema is accepted and not enforced: what XGrammar ignores is refused by name."""

import decimal
import json
import random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from model.inputs.grammars import ByteVocabulary, GrammarRefused, grammar_of, try_grammar
from model.inputs.matcher import Matcher
from model.inputs.with_xgrammar.schemas import CONSTRAINTS, FORMATS, schema_of
from scheduler.structured import Structured
from tests.model.test_written_schemas import CLOSERS, is_valid
from tests.model.written_schemas import SCHEMAS, Written
from tests.support.examples import examples
from tests.support.grammar_backends import matcher

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

END = ByteVocabulary.eos_token_id
TOKENS = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
SEEDS, MOST = 8, 300  # walks of a schema, and bytes of a walk


def walk(begun: Matcher, seed: int) -> str | None:
    """Returns a text of random bytes that a constraint allows; None if it has not ended after `MOST`."""
    drawn, rng, ahead = bytearray(), random.Random(seed), begun.deep_copy()
    for _ in range(MOST):
        mask = int.from_bytes(ahead.compute_bitmask(), "little")
        allowed = [token for token in range(END + 1) if mask >> token & 1]
        assert allowed, bytes(drawn)
        if allowed[-1] == END and (len(allowed) == 1 or rng.random() < 1 / 2):
            return drawn.decode()
        closers = [token for token in allowed if token in CLOSERS]
        token = rng.choice(closers if closers and rng.random() < 1 / 2 else [t for t in allowed if t != END])
        assert ahead.consume_token(token)
        drawn.append(token)
    return None


def walks(begun: Matcher) -> set[str]:
    return {text for seed in range(SEEDS) if (text := walk(begun, seed)) is not None}


def is_kept(written: Written, text: str) -> bool:
    try:
        return is_valid(written, text)
    except decimal.InvalidOperation:  # an exponent of thirty digits
        return True


def by_xgrammar(schema: Any) -> Matcher | None:
    """Returns a constraint; None where one of the libraries refuses it."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        try_grammar(grammar_of("json_schema", text), TOKENS)
        return matcher("xgrammar", Structured.json_schema(text), TOKENS)
    except GrammarRefused:
        return None


ACCEPTED = 180  # of the written schemas, at least


def test_what_both_libraries_accept_of_written_schemas_is_enforced() -> None:
    accepted = 0
    for written in (one for one in SCHEMAS if not one.refused):
        text = written.schema if isinstance(written.schema, str) else json.dumps(written.schema)
        if (begun := by_xgrammar(text)) is None:
            continue
        accepted += 1
        assert [made for made in walks(begun) if not is_kept(written, made)] == [], written.name
        assert [t for t in written.rejects if not is_kept(written, t) and is_accepted(begun, t)] == [], written.name
    assert accepted >= ACCEPTED


def is_accepted(begun: Matcher, text: str) -> bool:
    ahead, tokens = begun.deep_copy(), list(text.encode())
    return ahead.try_consume_tokens(tokens) == len(tokens) and ahead.is_accepting()


def raw(schema: Any) -> Matcher:
    """Returns a constraint as XGrammar itself has it, without any check of ours."""
    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

    made = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, strict_mode=False)
    return XGrammarCompiler(TOKENS).matcher(str(made))


A = {"a": {"type": "null"}}
IGNORED: dict[str, tuple[Any, str]] = {
    "not": ({"not": {"type": "string"}}, '"x"'),
    "if": ({"type": "integer", "if": {"minimum": 0}, "then": {"minimum": 9}}, "1"),
    "contains": ({"type": "array", "contains": {"type": "null"}}, "[]"),
    "uniqueItems": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"),
    "dependentRequired": ({"type": "object", "properties": A, "dependentRequired": {"a": ["b"]}}, '{"a": null}'),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, '{"a": 1}'),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 2}}, '{"\x01": 1}'),
    "unevaluatedProperties": ({"type": "object", "properties": A, "unevaluatedProperties": False}, '{"b": 1}'),
    "minLength beside pattern": ({"type": "string", "pattern": "^a", "minLength": 5}, '"a"'),
    "maxLength beside format": ({"type": "string", "format": "date", "maxLength": 3}, '"2020-01-01"'),
    "type beside enum": ({"type": "string", "enum": [1, "a"]}, "1"),
    "minimum beside enum": ({"enum": [1, 2], "minimum": 2}, "1"),
    "type beside anyOf": ({"type": "string", "anyOf": [{"type": "string"}, {"type": "null"}]}, "null"),
    "required beside anyOf": ({"type": "object", "required": ["a"], "anyOf": [{"required": ["a"]}]}, "{}"),
    "minimum beside $ref": ({"$ref": "#/$defs/a", "minimum": 7, "$defs": {"a": {"type": "integer"}}}, "1"),
    "minimum beside allOf": ({"allOf": [{"type": "integer"}], "minimum": 6}, "1"),
    "several of allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "1"),
    "minimum without type": ({"minimum": 3}, "1"),
    "maxLength without type": ({"maxLength": 1}, '"abc"'),
    "required without property": ({"type": "object", "required": ["z"]}, "{}"),
    "multipleOf of a number": ({"type": "number", "multipleOf": 2}, "1"),
    "a large multipleOf": ({"type": "integer", "multipleOf": 1025}, "1"),
    "multipleOf in a range": ({"type": "integer", "multipleOf": 3, "minimum": 4}, "7"),
    "pattern over a property": (
        {"type": "object", "properties": {"xa": {}}, "patternProperties": {"^x": {"type": "integer"}}}, '{"xa": null}',
    ),
    "days of a month": ({"type": "string", "format": "date"}, '"2023-02-30"'),
    "numbers of an address": ({"type": "string", "format": "ipv4"}, '"1.2.3.089"'),
    "a quote in a pattern": ({"type": "string", "pattern": '^"$'}, '"""'),
    "repetition in an optional group": ({"type": "string", "pattern": "^a(x[0-9]+)?$"}, '"a1"'),
    "control characters": ({"type": "string", "maxLength": 3}, '"\x01"'),
    "names in escapes": ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"\\u0061": "x"}'),
}  # fmt: skip
"""Schemas, and texts that are invalid by them and that XGrammar accepts."""


@pytest.mark.parametrize("name", IGNORED)
def test_what_xgrammar_ignores_is_refused_or_written_in_another_way(name: str) -> None:
    schema, text = IGNORED[name]
    assert is_accepted(raw(schema), text), "XGrammar enforces it: it need not be refused any more"
    with pytest.raises((ValueError, jsonschema.ValidationError)):
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    begun = by_xgrammar(schema)
    assert begun is None or not is_accepted(begun, text)


def test_all_refusals_name_the_keyword() -> None:
    """Whatever llguidance says of it before."""
    for name in sorted(CONSTRAINTS - {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}):
        with pytest.raises(GrammarRefused, match=rf"/properties/x/{name.replace('$', '[$]')}: "):
            schema_of(json.dumps({"type": "object", "properties": {"x": {"type": "null", name: {}}}}))


PATTERNS = ["^a+b?$", "x[0-9]{2}", "^(a|bc)*$", "^[^a]{1,3}$", "a.c", "^(x[0-9]+)?$", r"^\w+ \S$", r"\d|^a$"]


def values() -> st.SearchStrategy[Any]:
    """Schemas of all shapes, of which some are refused."""
    bounds = st.integers(-30, 300)
    leaves = st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("integer")}, optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum"), bounds)
        ),
        st.fixed_dictionaries(
            {"type": st.just("number")},
            optional={k: st.decimals(-30, 300, places=2).map(float) for k in ("minimum", "exclusiveMaximum")},
        ),
        st.fixed_dictionaries(
            {"type": st.just("string")}, optional={k: st.integers(0, 4) for k in ("minLength", "maxLength")}
        ),
        st.builds(lambda f: {"type": "string", "format": f}, st.sampled_from(sorted(FORMATS))),
        st.builds(lambda p: {"pattern": p}, st.sampled_from(PATTERNS)),
        st.builds(lambda v: {"enum": v}, st.lists(st.sampled_from([1, "a", None, 2.5, [1], {"b": "é"}]), min_size=1)),
        st.sampled_from([{}, True, {"type": "null"}, {"type": ["integer", "string"], "maxLength": 2, "minimum": 3}]),
    )

    def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        properties = st.dictionaries(st.sampled_from(["a", "b", "a/b", "é"]), inner, max_size=3)
        return st.one_of(
            st.fixed_dictionaries(
                {"type": st.just("array"), "items": inner},
                optional={"minItems": st.integers(0, 2), "maxItems": st.integers(0, 3)},
            ),
            st.builds(
                lambda first, rest: {"type": "array", "prefixItems": first, "items": rest},
                st.lists(inner, min_size=1, max_size=2), inner,
            ),
            st.fixed_dictionaries(
                {"type": st.just("object"), "properties": properties},
                optional={
                    "required": st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=2),
                    "additionalProperties": st.just(False) | inner, "maxProperties": st.integers(0, 3),
                },
            ),
            st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=2)),
            st.builds(lambda p: {"patternProperties": {"^x": p}, "additionalProperties": False}, inner),
        )  # fmt: skip

    return st.recursive(leaves, grown, max_leaves=4)


@settings(max_examples=examples(150), deadline=None)
@given(values().filter(lambda schema: isinstance(schema, dict)))
def test_what_is_accepted_of_any_schema_is_enforced(schema: dict[str, Any]) -> None:
    if (begun := by_xgrammar(schema)) is None:
        return
    written = Written("drawn", schema, (), ())
    assert [text for text in walks(begun) if not is_kept(written, text)] == []
