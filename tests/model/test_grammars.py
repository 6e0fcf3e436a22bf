"""What a grammar allows is what its constraint means: random walks through the masks, checked by other libraries."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from model.inputs.completion import Completions
from model.inputs.grammars import (
    FIRST_SPECIAL,
    UNFORCED,
    ByteVocabulary,
    GrammarRefused,
    grammar_of,
    limits,
    read_schema,
    try_grammar,
)
from scheduler.structured import Structured
from tests.support.checkpoints import byte_tokenizer
from tests.support.examples import examples

END = 0
MOST = 3000  # tokens of a walk
TOKENS = LLTokenizer(byte_tokenizer().to_str(), n_vocab=320, eos_token=END)
BYTES = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type]


def walk(structured: Structured, seed: int) -> str:
    """Returns a text of random allowed tokens, which ends as soon as it may with a chance of a third."""
    drawn, rng = list[int](), random.Random(seed)
    matcher = LLMatcher(TOKENS, grammar_of(structured.kind, structured.text), log_level=0, limits=limits())
    for _ in range(MOST):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(320) if mask >> token & 1]
        assert allowed, TOKENS.decode_str(drawn)
        if END in allowed and (allowed == [END] or rng.random() < 1 / 3):
            return TOKENS.decode_bytes(drawn).decode()
        token = rng.choice([token for token in allowed if token != END])
        assert matcher.consume_token(token)
        drawn.append(token)
    raise AssertionError(f"no end after {MOST} tokens: {TOKENS.decode_str(drawn)[:300]}")


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


SHORT = {"type": "string", "maxLength": 6}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": closed(
            {"name": SHORT, "children": {"type": "array", "maxItems": 1, "items": {"$ref": "#/$defs/leaf"}}},
            required=["name"],
        ),
        "leaf": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]},
    },
}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer"},
    {"type": "integer", "minimum": -3, "maximum": 120},
    {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 13},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000},
    {"type": "number", "minimum": 0.5, "maximum": 2.25},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10},
    {"type": "integer", "minimum": 10**15, "maximum": 10**15 + 5},
    {"type": "boolean"},
    {"type": "null"},
    SHORT,
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "string", "pattern": "^(a|b)+c$", "maxLength": 9},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "ipv6"},
    {"enum": ["red", "green", 7, None, {"a": [1]}, "é😀\"\\\n", "\b\f\r\t/\u2028"]},
    {"const": {"k": [1, 2.5, "x", None, True]}},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 4},
    {"type": "array", "items": SHORT, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "integer", "maximum": 9, "minimum": 0}, SHORT], "items": False},
    {"type": "array", "prefixItems": [SHORT], "items": {"type": "null"}, "minItems": 1, "maxItems": 4},
    closed({"a": SHORT, "b": {"type": "boolean"}}),
    closed({"a": SHORT, "b": {"type": "boolean"}}, required=["b"]),
    closed({"a": closed({"b": closed({"c": {"enum": [1, 2]}}, required=["c"])}, required=["b"])}, required=["a"]),
    closed({}, patternProperties={"^x[0-9]$": {"type": "boolean"}}, maxProperties=2),
    closed({"a": {"type": "null"}, "b": {"type": "null"}}, required=["a", "b"], minProperties=2),
    closed({"é ü": SHORT, 'q"uote': {"type": "null"}}, required=["é ü", 'q"uote']),
    {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, closed({"a": SHORT}, required=["a"])]},
    {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "string", "pattern": "^aaaa$"}]},
    {"oneOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
    {"allOf": [{"type": "string", "maxLength": 5}, {"pattern": "^a*$"}]},
    {"allOf": [closed({"a": SHORT, "b": SHORT}), {"required": ["a"]}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 11}, {"multipleOf": 2}]},
    {"$ref": "#/definitions/n", "definitions": {"n": {"type": "integer", "minimum": 1, "maximum": 2}}},
    {"$ref": "#/$defs/a/properties/b", "$defs": {"a": {"properties": {"b": {"enum": ["deep"]}}}}},
    {"type": "array", "items": {"anyOf": [SHORT, {"type": "array", "items": {"type": "null"}, "maxItems": 1}]},
     "maxItems": 2},
    TREE,
    {"type": "object", "maxProperties": 0},
    {"title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True, "enum": [5]},
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_json_of_a_schema_is_valid_by_it(number: int) -> None:
    schema, checker = SCHEMAS[number], jsonschema.Draft202012Validator.FORMAT_CHECKER
    texts = {walk(Structured.json_schema(schema), seed) for seed in range(12)}
    for text in texts:
        jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=checker)


LEAVES = st.sampled_from([
    {"type": "integer", "minimum": -20, "maximum": 300}, SHORT, {"type": "boolean"}, {"type": "null"},
    {"enum": ["a", 1, None]}, {"const": "x"}, {"type": "string", "pattern": "^[ab]{2}$"},
])  # fmt: skip


def _larger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.sampled_from(["a", "b", "long name", "ü", 'q"'])
    objects = st.builds(
        lambda properties, count: closed(properties, required=sorted(properties)[:count]),
        st.dictionaries(names, inner, max_size=3),
        st.integers(0, 3),
    )
    arrays = st.builds(
        lambda items, least, more: {"type": "array", "items": items, "minItems": least, "maxItems": least + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    return objects | arrays | st.builds(lambda kinds: {"anyOf": kinds}, st.lists(inner, min_size=1, max_size=3))


@given(st.recursive(LEAVES, _larger, max_leaves=8), st.integers(0, 2**31))
@settings(max_examples=examples(400))
def test_json_of_drawn_schemas_is_valid_by_them(schema: dict[str, Any], seed: int) -> None:
    text = walk(Structured.json_schema(schema), seed)
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def test_white_space_between_tokens_is_bounded() -> None:
    for seed in range(40):
        text = walk(Structured.json_schema({"type": "array", "items": {"type": "null"}, "maxItems": 2}), seed)
        assert re.fullmatch(r"((\[|\]|,|null)( |\n {0,40})?)*", text)


@pytest.mark.parametrize("pattern", ["[a-c]{2,4}", "(ab|cd)*e", r"\d{3}-\d{2}", "é+", "(?i:yes|no)", "[^a-z]{3}"])
def test_text_of_a_regex_matches_it(pattern: str) -> None:
    for seed in range(12):
        assert re.fullmatch(pattern, walk(Structured.regex(pattern), seed))


@pytest.mark.parametrize("structured", [
    Structured.choice(["x" * 300]), Structured.regex("x{300}"), Structured.json_schema({"const": "x" * 300}),
    Structured.grammar(f'start: "{"x" * 300}"'), Structured.grammar(f'root ::= "{"x" * 300}"'),
], ids=lambda one: one.kind)  # fmt: skip
def test_a_mask_follows_no_bytes_and_a_completion_does(structured: Structured) -> None:
    """A mask that follows the only bytes takes as long as there are some; the search for a completion has a bound."""
    matcher = try_grammar(grammar_of(structured.kind, structured.text), BYTES)
    assert matcher.compute_ff_tokens() == []
    path = Completions(BYTES, 10.0).find(matcher)
    assert path is not None
    assert bytes(path).strip(b'"') == b"x" * 300


def test_a_completion_follows_no_bytes_past_an_end_or_a_special_token() -> None:
    tokens = LLTokenizer(ByteVocabulary(1))  # type: ignore[arg-type]
    completions = Completions(tokens, 10.0)
    for text, path in (('start: "ab" ("cd")?', b"ab"), (f'start: "ab" ("c" "d" | <[{FIRST_SPECIAL}]>)', None)):
        matcher = LLMatcher(tokens, f"{text}\n{UNFORCED}", log_level=0, limits=limits())
        assert completions.find(matcher) == ([*b"ab", FIRST_SPECIAL] if path is None else list(path))


def test_a_choice_may_have_any_character() -> None:
    texts = [f"a{chr(code)}" for code in (*range(0x100), 0x2028, 0xFEFF, 0xFFFF, 0x10FFFF)]
    matcher = try_grammar(grammar_of("choice", Structured.choice(texts).text), BYTES)
    assert [text for text in texts if matcher.validate_tokens(list(text.encode())) != len(text.encode())] == []


def test_a_choice_is_one_of_its_texts() -> None:
    texts = ["yes", "no", "yes and no", "é😀", 'a "quoted"\n\\', "</tag>"]
    assert {walk(Structured.choice(texts), seed) for seed in range(80)} == set(texts)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ('start: "a" INNER* "z"\nINNER: "b" | /[0-9]/', "a[b0-9]*z"),
        ('root ::= "a" [0-9]{2} tail\ntail ::= "x" | "y" tail', "a[0-9]{2}y*x"),
        ('start: "(" start ")" | "."', r"\(*\.\)*"),
        ('start: "<b>" /[^<"]{2}/ "</b>" # <i>', '<b>[^<"]{2}</b>'),
        ('root ::= [^<] "<" # <i>', "[^<]<"),
        ("start[max_tokens=9]: /a{1,3}/", "a{1,3}"),
        ('?start: "a::=" | /c<\n/', "(a::=|c<\n)"),
        (r'root ::= "\u0041\x42" [\u00e9\u005d]+ "\u005c"', r"AB[é\]]+\\"),
        ('root ::= [<>/"#]+ # <[65]>', '[<>/"#]+'),
    ],
)
def test_text_of_a_grammar(grammar: str, pattern: str) -> None:
    for seed in range(12):
        assert re.fullmatch(pattern, walk(Structured.grammar(grammar), seed))


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", "{", "it is no JSON: Expecting property name"),
        ("json_schema", "[]", "it must be a JSON object"),
        ("json_schema", '{"minimum": NaN}', "NaN is no number of JSON"),
        ("json_schema", '{"a":' * 9999, "it is no JSON"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("json_schema", '{"items": {"if": {}, "then": {}}}', 'Unimplemented keys: ["if", "then"]'),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "array", "contains": {}}', "contains"),
        ("json_schema", '{"propertyNames": {}}', "propertyNames"),
        ("json_schema", '{"dependentRequired": {}}', "dependentRequired"),
        ("json_schema", '{"unevaluatedProperties": false}', "unevaluatedProperties"),
        ("json_schema", '{"type": "string", "format": "iri"}', "Unknown format: iri"),
        ("json_schema", '{"$ref": "https://example.com/a.json"}', "not present in a registry"),
        ("json_schema", '{"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}]}', "oneOf"),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 2}', "Unsatisfiable"),
        ("json_schema", '{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ("json_schema", '{"$defs": {"a": {"exclusiveMinimum": true}}}', "/$defs/a/exclusiveMinimum: must be a number"),
        ("json_schema", '{"$schema": "http://json-schema.org/draft-04/schema#"}', "/$schema: "),
        ("json_schema", r'{"enum": ["a", "b\u0001"]}', "control characters"),
        ("json_schema", r'{"properties": {"a\u007f": {}}}', "control characters"),
        ("json_schema", r'{"const": [{"a": "\u001f"}]}', "control characters"),
        ("json_schema", '{"$ref": "#/x", "x": {"minimum": 3, "exclusiveMinimum": true}}', "/x/exclusiveMinimum: must"),
        ("json_schema", '{"patternProperties": {"^x": {}}, "minProperties": 2}', "/minProperties: can be at most"),
        ("json_schema", '{"anyOf": [{"x-guidance": {"lenient": true}}]}', "/anyOf/0/x-guidance: "),
        ("regex", "(a", "unclosed group"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "(" * 9999 + ")" * 9999, "nest"),
        ("json_schema", '{"properties": {"a": {}}, "minProperties": 1}', "min/maxProperties only supported"),
        ("regex", r"[^\s\S]", "it allows no text"),
        ("grammar", "start: thing", 'unknown name: "thing"'),
        ("grammar", "begin: 'a'", ""),
        ("grammar", "start: start", "it allows no text"),
        ("grammar", "start: " + "(" * 9999, "too deeply nested"),
        ("grammar", "root ::= " + "(" * 9999, "nested too deeply"),
        ("grammar", "start: <|end|>", "special tokens and token ids are not supported"),
        ("grammar", 'start: "<" <[0-9]> "a"', "special tokens and token ids are not supported"),
        ("grammar", 'start: "x" <[65]> // ::=', "special tokens and token ids are not supported"),
        ("grammar", "start: /a\nb/ <[65]> /c/", "special tokens and token ids are not supported"),
        ("grammar", 'start: %json {"type": "string"} # ::=', "%json is not supported"),
        ("grammar", "root ::= [+--]", "are not read in a class of characters"),
        ("grammar", r'root ::= "\ud800"', "is no character"),
        ("grammar", '%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llguidance"),
        ("grammar", 'start: %json {"x-guidance": {"lenient": true}, "not": {}}', "%json"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_by_name(kind: str, text: str, says: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        try_grammar(grammar_of(kind, text), BYTES)
    assert says in str(refused.value)
    assert len(str(refused.value)) <= 300
    assert "\n" not in str(refused.value)


def test_no_escape_gives_a_property_another_name() -> None:
    """The key "\\u0061" would be an a that the schema of a does not see."""
    grammar = grammar_of("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    for text, fits in {'{"a":1}': True, '{"b\\n":1}': True, '{"\\u0061":': False, '{"b\\u0061': False}.items():
        tokens = TOKENS.tokenize_str(text)
        assert (LLMatcher(TOKENS, grammar, log_level=0).validate_tokens(tokens) == len(tokens)) is fits, text


HONEST: list[dict[str, Any]] = [
    closed({"x-guidance": SHORT, "$schema": SHORT, "exclusiveMinimum": {"type": "boolean"}}),
    {"enum": [{"exclusiveMinimum": True, "x-guidance": {}}]},
    {"type": "string", "pattern": r"^[^\u0000-\u001f]*$", "description": "\x01 or \\u0001"},
    {"type": "array", "items": [SHORT], "additionalItems": False},
    closed({"a": SHORT, "b": SHORT}, required=["a", "b"], minProperties=2),
]


@pytest.mark.parametrize("number", range(len(HONEST)))
def test_what_only_looks_like_a_keyword_is_taken(number: int) -> None:
    assert read_schema(json.dumps(HONEST[number])) == HONEST[number]


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[a[b]{4}$", r"^[^[\]]{3}$", r"^[[:alpha:]]\]$", r"^\[[&a~]{2}\]$", r"^[\[\]\\]{3}$", "^[^a&&b]{3}$",
        "^[^a~~b]{3}$", "^[^!--]{3}$", "^[ -~~]{3}$", "^[+--]{3}$", "^[--a]{3}$", "^[a-z&&]+$", "^[a-]{3}$",
        "^[a^]{3}$", r"^[\d-]{3}$", r"^[\w\s\S]{3}$", r"^[\x41-\u0043]{3}$",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Possible :FutureWarning")  # of Python's expressions, which may follow Rust's
def test_characters_of_a_class_are_ecmas(pattern: str) -> None:
    """In Rust's expressions brackets begin classes of classes, and some pairs are operators."""
    for seed in range(30):
        schema = {"type": "string", "pattern": pattern}
        made = json.loads(walk(Structured.json_schema(schema), seed))
        jsonschema.validate(made, schema)
        closing = closed({}, patternProperties={pattern: {"type": "null"}}, maxProperties=1)
        jsonschema.validate(json.loads(walk(Structured.json_schema(closing), seed)), closing)


@pytest.mark.parametrize("space", [r"\s", r"[\s]", r"[x\s]", r"[^\S]", r"[\d-\s]"])
@pytest.mark.parametrize("other", [r"\S", r"[\S]", r"[x\S]", r"[^\s]", r"[\w-\S]"])
def test_characters_that_are_white_space_for_some_are_in_no_class_of_it(space: str, other: str) -> None:
    """U+0085 is for Rust and Python, U+FEFF for ECMA-262."""
    for pattern, kept, left in ((space, " \u00a0\u3000", "a"), (other, "a\u0660", " \u3000")):
        grammar = grammar_of("json_schema", json.dumps({"type": "string", "pattern": f"^{pattern}$"}))
        for character in kept + left + "\u0085\ufeff":
            matcher, text = LLMatcher(BYTES, grammar, log_level=0, limits=limits()), f'"{character}"'.encode()
            taken = matcher.validate_tokens(list(text)) == len(text)
            assert taken == (character in kept), (pattern, character)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (r"^[\s\S]*$", "\u0085\ufeff a"), (r"[\s\S]", "\u0085\ufeff a"), ("[^]", "\u0085\ufeff a"),
        (r"^\s", "\u0085\ufeff "), (r"\S", "\u0085\ufeffa"), (r"^[^\s]", "\u0085\ufeffa"), (r"[^\S]", "\u0085\ufeff "),
    ],
)  # fmt: skip
def test_a_name_that_a_pattern_may_match_has_no_other_value(pattern: str, names: str) -> None:
    schema = {"type": "object", "patternProperties": {pattern: {"type": "integer"}}}
    grammar = grammar_of("json_schema", json.dumps(schema))
    for name in names:
        for value, kept in (('"', False), ("1", True)):
            matcher, text = LLMatcher(BYTES, grammar, log_level=0, limits=limits()), f'{{"{name}":{value}'.encode()
            assert (matcher.validate_tokens(list(text)) == len(text)) == kept, (name, value)


def test_a_name_that_a_pattern_may_not_match_is_no_other_where_there_is_none() -> None:
    for pattern in (r"^\s$", r"^\S$"):
        schema = closed({}, patternProperties={pattern: {"type": "integer"}})
        grammar = grammar_of("json_schema", json.dumps(schema))
        for name in "\u0085\ufeff":
            matcher, text = LLMatcher(BYTES, grammar, log_level=0, limits=limits()), f'{{"{name}":1'.encode()
            assert matcher.validate_tokens(list(text)) < len(text), (pattern, name)


def test_a_backslash_before_a_letter_names_no_class() -> None:
    grammar = grammar_of("json_schema", json.dumps({"type": "string", "pattern": r"^[\s\\S]$"}))
    for character, kept in ((" ", True), ("S", True), ("\u0085", False), ("\ufeff", False), ("a", False)):
        matcher, text = LLMatcher(BYTES, grammar, log_level=0, limits=limits()), f'"{character}"'.encode()
        assert (matcher.validate_tokens(list(text)) == len(text)) == kept, character


def test_an_empty_class_is_refused_by_name() -> None:
    for schema in ({"type": "string", "pattern": "^[]$"}, {"patternProperties": {"^[]$": {}}}):
        with pytest.raises(GrammarRefused, match=r"/pattern.*: the class \[\] is empty"):
            grammar_of("json_schema", json.dumps(schema))


def test_patterns_that_are_one_are_refused() -> None:
    schema = {"patternProperties": {"^[[]$": {"type": "string"}, r"^[\[]$": {"type": "integer"}}}
    with pytest.raises(GrammarRefused, match="/patternProperties: two of its patterns are the same"):
        grammar_of("json_schema", json.dumps(schema))


def test_a_pattern_of_brackets_takes_no_time() -> None:
    grammar_of("json_schema", json.dumps({"type": "string", "pattern": "[" * 10**6}))


@pytest.mark.parametrize("value", [{"a": 9007199254740993}, [{"b": [{"c": 10**22}]}]])
def test_numbers_in_objects_of_values_are_kept_exactly_or_refused(value: Any) -> None:
    for schema in ({"const": value}, {"enum": ["x", value]}):
        with pytest.raises(GrammarRefused, match="cannot be kept exactly"):
            grammar_of("json_schema", json.dumps(schema))
