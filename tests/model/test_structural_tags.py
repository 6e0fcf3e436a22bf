"""Outputs with structural tags: each has free text without triggers, and tags whose content is valid."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from model.inputs.chat_output.chat_output import ChatOutput
from model.inputs.chat_output.grammar_form import OutputForm
from model.inputs.completion import Completions
from model.inputs.grammar_process import answer_to, encoded, output_grammar, trial_ids
from model.inputs.grammars import FIRST_SPECIAL, ByteVocabulary, limits, try_grammar
from model.inputs.tag_grammar import TagGrammar, grammar_of_any
from model.structured.closing import Closing
from scheduler.structured import STRUCTURAL_TAG, Structured
from scheduler.tools import NO_TOOLS
from tests.support.chats import TOOLED
from tests.support.examples import examples
from tests.support.planted import plant
from tests.support.tagged_text import END_TOKEN, NotTagged, Tagged, Writer

pytestmark = pytest.mark.sample(3)

BYTES = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
COMPLETIONS = Completions(BYTES, 10.0)
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALLS = (("<function=get_weather>", CITY, "</function>"), ("<function=now>", {"type": "boolean"}, "</function>"))
TREE = {
    "$ref": "#/$defs/t",
    "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
}
CASES = {
    "calls": Tagged(("<function=",), CALLS),
    "two triggers": Tagged(("<f", "[["), (("<f>", CITY, "</f>"), ("[[n", {"type": "integer"}, "]]"))),
    "the trigger is the begin": Tagged(("<t>",), (("<t>", TREE, "</t>"),)),
    "a trigger is the beginning of another": Tagged(("<a", "<ab"), (("<ab>", CITY, "</>"), ("<a>", TREE, "</>"))),
    "a trigger repeats itself": Tagged(("aab",), (("aab:", {"type": "null"}, ";"),)),
    "end begins a trigger": Tagged(("<g",), (("<g>", {"type": "null"}, "</g><"),)),
    "other contents": Tagged(
        ("<",),
        (("<x>", "[a-z<>/]{2,}", "</x>"), ("<y>", None, "</y>"), ("<z>", "y*x", "</z>"), ("<w>", "a|bé+", "</w>")),
        grammars=(("y*x", 'root ::= "x" | "y" root'),),
    ),
    "one": Tagged(("<f",), (("<f>", CITY, "</f>"), ("<fg>", None, "!")), stop_after_first=True),
    "at least one": Tagged(("<f",), (("<f>", TREE, "</f>"), ("<fg>", "[!-~]+", "!")), at_least_one=True),
    "exactly one": Tagged(("<f",), (("<f>", CITY, "</f>"),), at_least_one=True, stop_after_first=True),
    "controls": Tagged(("\t\x00\x7f/",), (("\t\x00\x7f/\r\n\\", None, "\n\x01\"'\x7f"),)),
}


def constraint(name: str) -> Structured:
    return Structured.structural_tag(CASES[name].newer())


@cache
def begun(name: str) -> LLMatcher:
    return try_grammar(grammar_of_any(STRUCTURAL_TAG, constraint(name).text), BYTES)


@cache
def longest(name: str) -> int:
    """Bytes of the longest among the short forms of tags."""
    answer = answer_to(json.dumps({"kind": STRUCTURAL_TAG, "text": constraint(name).text}))
    assert "refused" not in answer, answer
    return len(max(answer["short"], answer["closing"], key=len).encode())


def written(name: str, seed: int, most: int, closes: bool = True, cut: int | None = None) -> str:
    """Returns a random output of at most so many tokens. cut: the processor is made anew behind this many tokens."""
    matcher, writer = begun(name).deep_copy(), Writer(CASES[name], seed)
    closing, tokens = Closing(COMPLETIONS, most, longest(name)), list[int]()
    while len(tokens) < most and not matcher.is_stopped():
        token = writer.token(matcher)
        if closes and closing.near:
            token = closing.settled(matcher, token)
        closing.drew(matcher, token)
        assert matcher.consume_token(token)
        tokens.append(token)
        if len(tokens) == cut:
            matcher, closing = begun(name).deep_copy(), Closing(COMPLETIONS, most, longest(name))
            for known in tokens:
                closing.drew(matcher, known)
                assert matcher.consume_token(known)
    return bytes(token for token in tokens if token != END_TOKEN).decode("utf-8", "replace" if not closes else "strict")


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=examples(12))
@given(st.integers(0, 2**32), st.integers(0, 300))
def test_every_output_reads_as_text_and_tags(name: str, seed: int, more: int) -> None:
    """Also one that comes to its end in the middle of a tag: it is closed in time."""
    CASES[name].read(written(name, seed, longest(name) + more))


@pytest.mark.parametrize("name", ["calls", "other contents", "at least one"])
def test_it_is_closed_at_every_number_of_tokens(name: str) -> None:
    least = longest(name) if CASES[name].at_least_one else 0
    for most in range(least, least + 90):
        text = written(name, most, most)
        CASES[name].read(text)
        assert len(text.encode()) <= most


@settings(max_examples=examples(12))
@given(st.sampled_from([*CASES]), st.integers(0, 2**32), st.integers(0, 60), st.integers(1, 60))
def test_it_is_the_same_when_it_is_made_again_in_the_middle(name: str, seed: int, more: int, cut: int) -> None:
    most = longest(name) + more
    assert written(name, seed, most, cut=cut) == written(name, seed, most)


@pytest.mark.parametrize("name", CASES)
def test_writers_write_tags(name: str) -> None:
    """Else the laws would be of free text alone."""
    found = {begin for seed in range(40) for begin, _ in CASES[name].read(written(name, seed, longest(name) + 150))}
    assert len(found) == len(CASES[name].tags)


def allows(name: str, text: str) -> bool:
    matcher, ids = begun(name).deep_copy(), list(text.encode())
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


VALUES: dict[str, list[str]] = {
    "calls": ['<function=get_weather>{"city":"a</function>","days":1}</function>', "<function=now>true</function>"],
    "two triggers": ['<f>{"city":"<f[[","days":-4}</f>', "[[n12]]", "[[n-3]]"],
    "a trigger is the beginning of another": ['<ab>{"city":"","days":0}</>', "<a>[[],[[]]]</>"],
    "other contents": ["<x>a</x></x>", "<y></x>é\n</y>", "<y></y>", "<z>yyx</z>", "<w>béé</w>", "<w>a</w>"],
    "end begins a trigger": ["<g>null</g><"],
    "at least one": ["<f>[]</f>", "<fg>!!"],
    "one": ['<f>{"city":"x","days":1}</f>'],
}
FREE = st.lists(
    st.sampled_from(["a", "é", "\n", "<", "</f>", "<f", "[", "[[", "<a", "n>", "<function", " ", "<g>", "!"])
)


@given(st.sampled_from([*VALUES]), st.data())
@settings(max_examples=examples(300))
def test_it_allows_what_reads_as_text_and_tags_and_no_more(name: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.one_of(st.sampled_from(VALUES[name]), FREE.map("".join)), max_size=5))
    text = "".join(parts)
    try:
        CASES[name].read(text)
        reads = True
    except NotTagged:
        reads = False
    assert allows(name, text) == reads


def test_the_older_form_means_the_same() -> None:
    older, newer = (Structured.structural_tag(form) for form in (CASES["calls"].older(), CASES["calls"].newer()))
    assert grammar_of_any(STRUCTURAL_TAG, older.text) == grammar_of_any(STRUCTURAL_TAG, newer.text)


def refusal(value: Any) -> dict[str, str]:
    """Returns the trial's answer to contents of the newer form, each in a tag of its own."""
    tags = [{"begin": f"<{i}>", "content": content, "end": "</>"} for i, content in enumerate(value)]
    given = {"format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}}
    return answer_to(json.dumps({"kind": STRUCTURAL_TAG, "text": Structured.structural_tag(given).text}))


GOOD = {"type": "json_schema", "json_schema": CITY}
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}


@pytest.mark.parametrize(
    ("content", "key", "says"),
    [
        ({"type": "json_schema", "json_schema": {"not": {}}}, "json_schema", 'Unimplemented keys: ["not"]'),
        ({"type": "json_schema", "json_schema": {"minProperties": 2}}, "json_schema", "/minProperties: can be at most"),
        ({"type": "json_schema", "json_schema": {"x-guidance": {}}}, "json_schema", "/x-guidance: "),
        ({"type": "json_schema", "json_schema": {"enum": []}}, "json_schema", ""),
        ({"type": "json_schema", "json_schema": CYCLE}, "json_schema", ""),
        ({"type": "json_schema", "json_schema": "{"}, "json_schema", "it is no JSON"),
        ({"type": "json_schema", "json_schema": '{"a":' * 3000}, "json_schema", "it is no JSON"),
        ({"type": "regex", "pattern": "(a"}, "pattern", "unclosed group"),
        ({"type": "regex", "pattern": "a)|(b"}, "pattern", ""),
        ({"type": "regex", "pattern": "(?=a)b"}, "pattern", "look-around"),
        ({"type": "regex", "pattern": r"[^\s\S]"}, "pattern", "it allows no text"),
        ({"type": "grammar", "grammar": "start: /[ -~]+/"}, "grammar", "no end of it was found"),
        ({"type": "grammar", "grammar": "start: thing"}, "grammar", 'unknown name: "thing"'),
        ({"type": "grammar", "grammar": "start: <[3]>"}, "grammar", "special tokens and token ids"),
        ({"type": "grammar", "grammar": "start: @tags"}, "grammar", "names of other grammars (@)"),
        ({"type": "grammar", "grammar": "start: start"}, "grammar", "it allows no text"),
        ({"type": "grammar", "grammar": "root ::= " + "(" * 9000}, "grammar", "nested too deeply"),
    ],
)  # fmt: skip
def test_a_content_that_cannot_be_kept_is_refused_with_its_field(content: Any, key: str, says: str) -> None:
    answer = refusal([GOOD, content, GOOD])
    assert answer["field"] == f"structured_output.structural_tag.format.tags[1].content.{key}"
    assert says in answer["refused"]


@pytest.mark.parametrize(
    ("end", "kind", "fits"),
    [("0;", "integer", False), ("e", "number", False), (";", "integer", True), ("0;", "object", True)],
)
def test_a_number_cannot_take_the_end_marker(end: str, kind: str, fits: bool) -> None:
    given = {"structures": [{"begin": "<n>", "schema": {"type": kind}, "end": end}], "triggers": ["<"]}
    answer = answer_to(json.dumps({"kind": STRUCTURAL_TAG, "text": Structured.structural_tag(given).text}))
    assert ("a number could go on" in answer.get("refused", "")) != fits
    assert fits or answer["field"] == "structured_output.structural_tag.structures[0].schema"


def test_many_large_tags_are_answered() -> None:
    many = [{"type": "json_schema", "json_schema": {"type": "string", "const": f"{i}" * 50}} for i in range(256)]
    assert "grammar" in refusal(many)


MARKS = {chr(0xD800): "<|call|>", chr(0xD801): "<|end|>"}


def special_form(tagged: Tagged, **more: Any) -> OutputForm:
    ids = {mark: 1000 + i for i, mark in enumerate(MARKS)}
    text = Structured.structural_tag(tagged.newer()).text
    return OutputForm(None, None, ids, answer=(STRUCTURAL_TAG, text), special=MARKS, **more)


@pytest.mark.parametrize("end", ["<|end|>", "\n<|end|>.", "]"])
@pytest.mark.parametrize("content", [{"type": "integer"}, "[0-9]+", None])
def test_special_tokens_are_tokens_and_not_their_letters(content: Any, end: str) -> None:
    tagged = Tagged(("<|call|>", "[["), (("<|call|>n:", content, end), ("[[", content, "]")))
    form = special_form(tagged)
    answer = answer_to(json.dumps({"kind": "output", "text": form.constraint().text}))
    assert "<[1000]>" in answer["grammar"]
    trial = (
        answer["grammar"].replace("<[1000]>", f"<[{FIRST_SPECIAL}]>").replace("<[1001]>", f"<[{FIRST_SPECIAL + 1}]>")
    )
    tokens = LLTokenizer(ByteVocabulary(2))  # type: ignore[arg-type]
    marked = end.replace("<|end|>", "\ud801")

    def reads(text: str) -> bool:
        matcher, ids = LLMatcher(tokens, trial, log_level=0, limits=limits()), encoded(text, list(MARKS))
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    assert reads(f"a\ud800n:12{marked} b [[3] <| \ud800n:4{marked}")
    assert not reads(f"\ud800x:12{marked}")
    assert not reads("a <|call|>")
    assert not reads("a \ud801")
    if "\ud801" in marked:
        assert not reads(f"\ud800n:12{end}")
        assert not reads(f"\ud800n:12{end}{marked}")
    least = encoded(answer["closing"], list(MARKS))
    matcher = LLMatcher(tokens, trial, log_level=0, limits=limits())
    assert matcher.consume_tokens(encoded("a\ud800n:", list(MARKS)))
    path = Completions(tokens, 10.0).find(matcher)
    assert path is not None
    assert len(path) <= len(least)


@pytest.mark.parametrize("end", ["<[7]>", "<[999999999]>"])
def test_an_end_may_look_like_a_token(end: str) -> None:
    given = Tagged(("<a",), (("<a>", None, end),), at_least_one=True).newer()
    for text in (Structured.structural_tag(given).text, ""):
        lark = f'start: e /[ -~]*/ ";"\ne[capture="end:{end}"]: E\nE: //'
        grammar = grammar_of_any(STRUCTURAL_TAG, text) if text else grammar_of_any("grammar", lark)
        matcher = try_grammar(grammar, BYTES)
        assert matcher.consume_tokens([*b"<a>x"])
        COMPLETIONS.find(matcher)
        assert not matcher.is_error()


def test_a_tag_that_cannot_be_completed_in_time_is_not_begun() -> None:
    text = written("calls", 1, 20)
    assert CASES["calls"].read(text) == []


def test_harness_catches_an_output_that_is_not_closed() -> None:
    with pytest.raises(NotTagged):
        assert [CASES["calls"].read(written("calls", seed, 60, closes=False)) for seed in range(20)]


def test_harness_catches_tags_without_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, TagGrammar, "_body", lambda right: lambda self, *tag: right(self, *tag).rpartition(" ")[0])
    begun.cache_clear()
    try:
        with pytest.raises(NotTagged):
            assert [CASES["calls"].read(written("calls", seed, 200)) for seed in range(20)]
    finally:
        begun.cache_clear()


REASONS = [({}, "<think>", "</think>"), ({5: "<think>", 6: "</think>"}, "\ud800", "\ud801")]


@pytest.mark.parametrize(("special", "begin", "end"), REASONS)
@pytest.mark.parametrize("thinks", [False, True])
def test_reasoning_comes_first(special: dict[int, str], begin: str, end: str, thinks: bool) -> None:
    """Free text behind it may say what it likes, and does not hide that an output begins with reasoning."""
    made = ChatOutput.of(TOOLED, special).form(NO_TOOLS, constraint("calls"), "<think>\n" if thinks else "")
    assert made is not None
    assert made.thinks == thinks
    answer = answer_to(json.dumps({"kind": "output", "text": made.constraint().text}))
    assert "refused" not in answer
    assert answer["closing"].endswith('>{"city":"","days":0}</function>')
    tokens, marks = LLTokenizer(ByteVocabulary(len(made.ids))), list(made.ids)  # type: ignore[arg-type]
    grammar = output_grammar(made)[0].text(trial_ids(made))

    def reads(text: str) -> bool:
        matcher, ids = LLMatcher(tokens, grammar, log_level=0, limits=limits()), encoded(text, marks)
        return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()

    first = "" if thinks else begin
    call = "<function=now>true</function>"
    assert reads(f"{first}hm <function=no{end}\n\nIt is {call} or {call}.")
    assert not reads(f"{first}hm{end}\n\nIt is <function=no>")
    assert reads(f"It is {call}.") != thinks
    assert not reads(f"{first}hm {call}")
