"""Constrained outputs are complete within their tokens, whatever is drawn, and the same when they are made again."""

import json
import random
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from model.inputs.completion import Completions
from model.inputs.grammar_backends import LLGUIDANCE
from model.inputs.grammars import ByteVocabulary, grammar_of, limits
from model.inputs.matcher import Matcher
from model.structured.closing import AHEAD, MORE, Closing
from scheduler.structured import Structured
from tests.support.grammar_backends import BACKENDS
from tests.support.grammar_backends import matcher as matcher_by
from tests.support.grammar_engine import Substrings
from tests.support.planted import plant
from tests.support.sentence_pieces import load

pytestmark = pytest.mark.sample(3)

END = 256
VOCABULARY = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
COMPLETIONS = Completions(VOCABULARY, 10.0)

TREE = {
    "$ref": "#/$defs/t",
    "$defs": {
        "t": {
            "type": "object",
            "properties": {"v": {"type": "integer"}, "k": {"type": "array", "items": {"$ref": "#/$defs/t"}}},
            "required": ["v", "k"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, Any] = {
    "flat": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"enum": ["long one", "y"]}},
        "required": ["a", "b", "c"],
        "additionalProperties": False,
    },
    "any object": {"type": "object"},
    "tree": TREE,
    "dates": {"type": "array", "items": {"type": "string", "format": "date"}, "minItems": 2},
    "lengths": {"type": "array", "items": {"type": "string", "minLength": 5}, "minItems": 2, "maxItems": 4},
    "either": {
        "anyOf": [{"type": "object", "properties": {"n": {"type": "null"}}, "required": ["n"]}, {"type": "string"}]
    },
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 7}},
}  # fmt: skip
OTHERS = {
    "bounded": Structured.regex("a{3,10}b"),
    "choice": Structured.choice(["abc", "z", "zebra"]),
    "pairs": Structured.grammar('start: "<" start ">" | "x"'),
    "pairs of GBNF": Structured.grammar('root ::= "<" root ">" | "x"'),
}


def matcher_of(name: str, backend: str = LLGUIDANCE) -> Matcher:
    constraint = OTHERS[name] if name in OTHERS else Structured.json_schema(SCHEMAS[name])
    return matcher_by(backend, constraint, VOCABULARY)


@cache
def shortest(name: str, backend: str = LLGUIDANCE) -> int:
    path = COMPLETIONS.find(matcher_of(name, backend))
    assert path is not None
    return len(path)


class Paused:
    """Completions whose searches run out of time where `paused` says so, by their number from 0."""

    def __init__(self, paused: Callable[[int], bool]) -> None:
        self.searches, self._paused = 0, paused

    def __getattr__(self, name: str) -> Any:
        return getattr(COMPLETIONS, name)

    def find(self, matcher: Matcher, room: int = 0) -> list[int] | None:
        self.searches += 1
        return None if self._paused(self.searches - 1) else COMPLETIONS.find(matcher, room)


def written(
    name: str, most: int, seed: int, cut: int | None = None, backend: str = LLGUIDANCE, completions: Any = COMPLETIONS
) -> list[int]:
    """Tokens of an output of random draws. cut: the processor is made anew behind this many tokens."""
    matcher, closing = matcher_of(name, backend), Closing(completions, most, shortest(name, backend))
    tokens, rng = list[int](), random.Random(seed)
    while len(tokens) < most and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        token = rng.choice([t for t in range(END + 1) if mask >> t & 1])
        if closing.near:
            token = closing.settled(matcher, token)
        closing.drew(matcher, token)
        assert matcher.consume_token(token)
        tokens.append(token)
        if len(tokens) == cut:
            matcher, closing = matcher_of(name, backend), Closing(COMPLETIONS, most, shortest(name, backend))
            for known in tokens:
                closing.drew(matcher, known)
                assert matcher.consume_token(known)
    assert matcher.is_accepting() or matcher.is_stopped()
    return tokens


def is_valid(name: str, text: str) -> bool:
    if name in OTHERS:
        return {"bounded": re.fullmatch("a{3,10}b", text), "choice": text in ("abc", "z", "zebra"),
                "pairs": re.fullmatch("<*x>*", text)}[name.removesuffix(" of GBNF")] not in (None, False)  # fmt: skip
    jsonschema.validate(json.loads(text), SCHEMAS[name])
    return True


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*SCHEMAS, *OTHERS])
@settings(max_examples=10)
@given(st.integers(0, 40), st.integers(0, 2**32))
def test_an_output_is_complete_within_any_number_of_tokens_that_is_enough(
    name: str, backend: str, more: int, seed: int
) -> None:
    most = shortest(name, backend) + more
    tokens = written(name, most, seed, backend=backend)
    assert len(tokens) <= most
    assert is_valid(name, bytes(token for token in tokens if token != END).decode("utf-8", "replace"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["flat", "tree", "dates", "any object"])
@settings(max_examples=8)
@given(st.integers(0, 40), st.integers(0, 2**32), st.integers(1, 60))
def test_it_is_the_same_when_it_is_made_again_in_the_middle(
    name: str, backend: str, more: int, seed: int, cut: int
) -> None:
    most = shortest(name, backend) + more
    assert written(name, most, seed, cut, backend) == written(name, most, seed, backend=backend)


@pytest.mark.parametrize("name", ["flat", "tree", "dates", "any object"])
def test_a_pause_of_the_machine_in_a_search_changes_nothing(name: str) -> None:
    paused = 0
    for seed in range(6):
        completions = Paused(lambda number: number % 3 == 1)
        tokens = written(name, shortest(name) + 40, seed, completions=completions)
        assert tokens == written(name, shortest(name) + 40, seed)
        paused += completions.searches // 3
    assert paused > 6


def test_an_output_whose_searches_are_in_vain_has_one_more_of_them() -> None:
    completions = Paused(lambda _: True)
    matcher, closing = matcher_of("pairs"), Closing(completions, 400, 1)  # type: ignore[arg-type]
    for _ in range(200):
        closing.drew(matcher, ord("<"))
        assert matcher.consume_token(ord("<"))
    assert completions.searches == len([0, *range(4, 200, 32)]) + 1


def test_an_output_with_room_is_not_looked_at() -> None:
    closing = Closing(COMPLETIONS, 1000, 10)
    assert not closing.near
    assert Closing(COMPLETIONS, AHEAD * 10 + MORE, 10).near


RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {f"field_{i}": {"type": "integer"} for i in range(20)},
        "required": [f"field_{i}" for i in range(20)],
        "additionalProperties": False,
    },
}


@settings(max_examples=6)
@given(st.integers(300, 900), st.integers(0, 2**32))
def test_an_item_that_is_longer_than_the_shortest_output_is_closed_too(most: int, seed: int) -> None:
    """Each item has 300 tokens here, and the shortest output 2."""
    grammar = grammar_of("json_schema", json.dumps(RECORDS))
    matcher, closing = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits()), Closing(COMPLETIONS, most, 2)
    tokens, rng = list[int](), random.Random(seed)
    while len(tokens) < most and not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [t for t in range(END + 1) if mask >> t & 1 and chr(t % 256) not in " \n]"] or [ord("]")]
        token = rng.choice(allowed)
        token = closing.settled(matcher, token) if closing.near else token
        closing.drew(matcher, token)
        assert matcher.consume_token(token)
        tokens.append(token)
    jsonschema.validate(json.loads(bytes(token for token in tokens if token != END)), RECORDS)


@given(st.integers(20, 80), st.integers(0, 60), st.integers(0, 2**32))
@settings(max_examples=10)
def test_it_gives_up_alike_when_it_is_made_again(most: int, cut: int, seed: int) -> None:
    """No completion fits, as of items of a hundred letters."""
    grammar = grammar_of("json_schema", '{"type": "array", "items": {"type": "string", "minLength": 100}}')
    made = list[list[int]]()
    for again in (None, cut):
        matcher, closing = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits()), Closing(COMPLETIONS, most, 2)
        tokens, rng = list[int](), random.Random(seed)
        for number in range(most):
            if matcher.is_stopped():
                break
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            token = rng.choice([t for t in range(END + 1) if mask >> t & 1])
            token = closing.settled(matcher, token) if closing.near else token
            closing.drew(matcher, token)
            assert matcher.consume_token(token)
            tokens.append(token)
            if number == again:
                matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
                closing = Closing(COMPLETIONS, most, 2)
                for known in tokens:
                    closing.drew(matcher, known)
                    assert matcher.consume_token(known)
        made.append(tokens)
    assert made[0] == made[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_ways_are_found(backend: str) -> None:
    texts = {
        name: VOCABULARY.decode_bytes(COMPLETIONS.find(matcher_of(name, backend)) or []).decode()
        for name in (*SCHEMAS, *OTHERS)
    }
    assert texts["any object"] == "{}"
    assert texts["choice"] == "z"
    assert texts["bounded"] == "aaab"
    assert texts["pairs"] == "x"
    assert texts["either"] == '""'
    assert texts["numbers"] == "[]"
    assert texts["tree"].replace(" ", "") == '{"v":0,"k":[]}'
    for name in SCHEMAS:
        assert is_valid(name, texts[name])


@pytest.mark.parametrize("name", ["llama", "mistral 3", "gemma", "unigram as it comes"])
def test_short_ways_are_found_with_tokenizers_of_sentence_pieces(tmp_path: Path, name: str) -> None:
    """Some begin each text with a space, which no text within another has."""
    tokenizer = load(tmp_path, name)
    vocabulary = tokenizer.vocabulary(tokenizer.size, (2,))
    grammar = grammar_of("json_schema", json.dumps(SCHEMAS["flat"]))
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    path = Completions(vocabulary, 10.0).find(matcher)
    assert path is not None
    assert matcher.consume_tokens(path)
    assert matcher.is_accepting()
    jsonschema.validate(json.loads(vocabulary.decode_bytes(path)), SCHEMAS["flat"])


def test_another_token_that_begins_the_known_completion_needs_no_search() -> None:
    vocabulary = LLTokenizer(Substrings(3000))  # type: ignore[arg-type] # it has what is asked
    text = b" the king and the queen"
    completions, path = Completions(vocabulary, 0.0), vocabulary.tokenize_bytes(text)
    begins = [token for token in range(3000) if (own := completions.text([token])) and text.startswith(own)]
    assert len(begins) > 1
    for token in range(3000):
        rest = completions.rest(path, token)
        assert (rest is not None) == (token in begins)
        assert rest is None or completions.text([token, *rest]) == text
    grammar = grammar_of("choice", json.dumps([text.decode()]))
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=limits())
    closing = Closing(completions, len(path), 0, start=lambda: path)
    assert [closing.settled(matcher, token) for token in begins] == begins
    for token in vocabulary.tokenize_bytes(b" the"):
        assert completions.rest([vocabulary.eos_token, *path], token) is None, "not behind a special token"


def test_where_no_way_is_found_nothing_is_changed() -> None:
    grammar = grammar_of("regex", "[a-z]{5,}x")
    matcher = LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits())
    completions = Completions(VOCABULARY, 10.0)
    if completions.find(matcher) is None:
        closing = Closing(completions, 6, 0)
        assert closing.settled(matcher, ord("b")) == ord("b")


def test_harness_catches_a_completion_that_is_a_token_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Closing, "settled", lambda right: lambda closing, matcher, token: token)
    with pytest.raises(AssertionError):
        assert [written("flat", shortest("flat") + 3, seed) for seed in range(20)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [*SCHEMAS, *OTHERS])
def test_a_walk_finds_what_a_search_with_one_way_does(name: str, backend: str) -> None:
    """At all places of some outputs."""
    rng = random.Random(name)
    for _ in range(3):
        matcher = matcher_of(name, backend)
        for _ in range(40):
            end = time.thread_time() + 60
            assert COMPLETIONS._walk(matcher, end) == COMPLETIONS._search(matcher, 1, 1, end)
            allowed = [token for token in range(257) if matcher.compute_bitmask()[token >> 3] >> (token & 7) & 1]
            if not allowed or not matcher.consume_token(rng.choice(allowed)) or matcher.is_stopped():
                break
