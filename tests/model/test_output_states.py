"""Answers about outputs do not depend on what was asked before, and a longer text costs what is new in it."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.inputs.grammar_process import encoded, matcher_of
from model.inputs.grammars import GrammarRefused
from model.inputs.output_states import OutputStates
from tests.support.examples import examples

PATTERNS = ["(ab)*", "[ab.]*", "a+(\\.b)?", "ab\\.a"]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PATTERNS), st.text("ab.", max_size=6)), max_size=25), st.integers(0, 3))
def test_answers_are_those_of_a_search_from_the_start(asked: list[tuple[str, str]], most: int) -> None:
    states = OutputStates(matcher_of, encoded, most)
    for pattern, text in asked:
        assert states.is_complete("regex", pattern, text) is bool(re.fullmatch(pattern, text))
        assert len(states) <= most


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
