"""Law: a pattern matches the names that `re.match` says, and takes no time that grows with its repetitions."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.weight_formats.patterns import NamePattern

pytestmark = pytest.mark.sample(3)

CHARACTERS = st.sampled_from(["a", "b", "0", r"\.", ".", r"\d", r"\w", "[ab]", "[^a.]", "[0-9a]", r"[\d.]"])
TIMES = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "{1,3}?"])


def grown(part: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    sequence = st.lists(part, max_size=4).map("".join)
    opened = st.sampled_from(["(", "(?:", "(?=", "(?!"])
    group = st.builds("{}{})".format, opened, st.lists(sequence, min_size=1, max_size=3).map("|".join))
    edge = st.sampled_from(["^", "$"])
    return st.builds("{}{}".format, CHARACTERS | group, TIMES) | edge


PATTERNS = st.lists(grown(grown(CHARACTERS)), max_size=5).map("".join)
NAMES = st.text("ab0.", max_size=8)


@given(PATTERNS, NAMES)
@example(r".*\.(?:up|down)_proj$", "mlp.up_proj")
def test_names_are_those_of_re(pattern: str, name: str) -> None:
    assert NamePattern(pattern).matches(name) == (re.match(pattern, name) is not None)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r".*\.18\..*gate.*", "model.layers.18.mlp.gate_proj", "model.layers.1.mlp.gate_proj"),
        (r"model\.layers\.(0|1|35)\.mlp", "model.layers.35.mlp.up_proj", "model.layers.3.mlp.up_proj"),
        (r"lm_head", "lm_head", "model.lm_head"),
        (r"^(?!.*experts).*mlp", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.experts.1.up_proj"),
        (r".*[qkv]_proj$", "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"),
        (r"model.layers.\d{1,2}.mlp", "model.layers.12.mlp.up_proj", "model.layers.123.mlp.up_proj"),
    ],
)
def test_patterns_as_they_are_written(pattern: str, matching: str, other: str) -> None:
    assert NamePattern(pattern).matches(matching)
    assert not NamePattern(pattern).matches(other)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "a?" * 60 + "a" * 60 + "$",
        "(a|a|b)*c",
        "(((a*)*)*)*b",
        "(.|.)" * 80 + "b",
        "((((a?){999}){999}){999}){999}b",
    ],
)
def test_patterns_that_re_does_not_finish(pattern: str) -> None:
    assert not NamePattern(pattern).matches("a" * 59 + "!")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(a", "a group is not closed at character 3"),
        ("a)", r"'\)' before character 3 closes nothing"),
        ("*a", r"'\*' before character 2 repeats nothing"),
        ("a*+b", r"'\+' before character 4 repeats a repetition"),
        ("[a", "character 1 is not understood"),
        (r"(a)\1", "character 4 is not understood"),
        ("(?i)a", "character 1 is not understood"),
        ("a{2000}", "repeats more than 1000 times"),
        ("a{3,2}", "repeats more than 1000 times, or never"),
        ("a{" + "9" * 400 + "}", "repeats more than 1000 times"),
        ("((((( a )))))", "more than 4 groups within each other"),
        ("a" * 501, "it has 501 characters, may have 500"),
        ("[b-a]", "bad character range b-a"),
    ],
)
def test_patterns_that_are_not_understood(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamePattern(pattern)
