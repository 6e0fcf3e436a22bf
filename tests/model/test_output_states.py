"""Answers about outputs do not depend on what was asked before, and a longer text costs what is new in it."""

import re
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.inputs.grammar_process import encoded, matcher_of
from model.inputs.grammars import GrammarRefused
from model.inputs.output_states import OutputStates
from tests.support.examples import examples

PATTERNS = ["(ab)*", "[ab.]*", "a+(\\.b)?", "ab\\.a"]
MORE = ["".join(more) for size in range(1, 4) for more in product("ab.", repeat=size)]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATTERNS), st.text("ab.", max_size=6)), max_size=25), st.integers(0, 3))
def test_answers_are_those_of_a_search_from_the_start(asked: list[tuple[str, str]], most: int) -> None:
    states = OutputStates(matcher_of, encoded, most)
    for pattern, text in asked:
        assert states.is_complete("regex", pattern, text) is bool(re.fullmatch(pattern, text))
        assert len(states) <= most


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(PATTERNS), st.text("ab.", max_size=8), st.sets(st.integers(0, 8))), max_size=8)
)
@example([("(ab)*", "abab", {0, 1, 2, 3, 4}), ("(ab)*", "ababab", {3, 6})])
@example([("(ab)*", "ab.ab", {2, 3, 5}), ("(ab)*", "abab", {4})])
def test_many_beginnings_have_the_answers_of_each(asked: list[tuple[str, str, set[int]]]) -> None:
    states = OutputStates(matcher_of, encoded)
    for pattern, text, places in asked:
        ends = sorted({min(place, len(text)) for place in places} | {len(text)})
        answer = states.complete_ends("regex", pattern, text, ends)
        assert answer.complete == [end for end in ends if re.fullmatch(pattern, text[:end])]
        if answer.over:
            assert not any(re.fullmatch(pattern, text + more) for more in ("", *MORE))


def test_a_longer_text_is_read_from_where_the_last_one_ended() -> None:
    read = list[str]()

    def counted(text: str, marks: list[str]) -> list[int]:
        read.append(text)
        return encoded(text, marks)

    states = OutputStates(matcher_of, counted)
    whole = "ab" * 50
    for end in range(2, 101, 2):
        assert states.is_complete("regex", "(ab)*", whole[:end])
    assert "".join(read) == whole
    assert states.is_complete("regex", "[ab]*", whole)
    assert read[-1] == whole, "a state of another constraint is none of this one"


def test_the_matcher_at_the_start_stays_there() -> None:
    states = OutputStates(matcher_of, encoded)
    assert states.is_complete("choice", '["yes", "no"]', "yes")
    assert states.is_complete("choice", '["yes", "no"]', "no")
    with pytest.raises(GrammarRefused):
        states.is_complete("regex", "(a", "a")
