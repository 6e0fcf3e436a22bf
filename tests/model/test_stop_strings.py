"""Stop strings against a brute-force search of the whole text, however the text is cut into parts."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.inputs.stop_strings import StopStrings
from tests.support.examples import examples


@dataclass(frozen=True)
class Outcome:
    """told: all text that was given out. stop: what matched."""

    told: str
    stop: str | None


def brute_force(text: str, stops: tuple[str, ...], include: bool) -> Outcome:
    """Reads character by character; the first end of a stop string is the match, the list decides among several."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return Outcome(text[: end if include else end - len(stop)], stop)
    return Outcome(text, None)


def feed(parts: list[str], stops: tuple[str, ...], include: bool) -> Outcome:
    matcher, told = StopStrings(stops, include), ""
    for part in parts:
        found = matcher.push(part)
        told += found.text
        if found.stop is not None:
            assert matcher.flush() == "", "nothing follows a match"
            return Outcome(told, found.stop)
    return Outcome(told + matcher.flush(), None)


def test_what_completes_before_the_search_begins_is_passed_over() -> None:
    matcher = StopStrings(("ab", "bc"), include=False)
    assert matcher.push("xab", searched=False).text + matcher.push("y").text == "xaby"
    matcher = StopStrings(("ab", "bc"), include=False)
    assert matcher.push("ab", searched=False).text == "a", "b may begin another"
    found = matcher.push("c")
    assert (found.text, found.stop) == ("", "bc"), "a match may begin there"


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


letters = st.sampled_from(["ab", "abc", "aé🐈"])
stops_of = letters.flatmap(
    lambda alphabet: st.tuples(
        st.text(alphabet, max_size=24),
        st.lists(st.text(alphabet, min_size=1, max_size=5), max_size=4).map(tuple),
    )
)


@settings(max_examples=examples(1000), deadline=None)
@given(case=stops_of, places=st.lists(st.integers(0, 100), max_size=12), include=st.booleans())
@example(case=("aab", ("ab",)), places=[1, 2], include=False)
@example(case=("abcd", ("bcd", "abc")), places=[], include=False)
@example(case=("xabc", ("c", "bc", "abc")), places=[3], include=False)
@example(case=("ababab", ("abac", "bab")), places=[4], include=True)
def test_equals_brute_force_however_the_text_is_cut(
    case: tuple[str, tuple[str, ...]], places: list[int], include: bool
) -> None:
    text, stops = case
    expected = brute_force(text, stops, include)
    assert feed([text], stops, include) == expected
    assert feed(list(text), stops, include) == expected
    assert feed(cut(text, places), stops, include) == expected


@settings(max_examples=examples(500), deadline=None)
@given(case=stops_of, places=st.lists(st.integers(0, 100), max_size=12))
def test_no_part_of_a_stop_string_leaks_and_nothing_else_is_held(
    case: tuple[str, tuple[str, ...]], places: list[int]
) -> None:
    text, stops = case
    expected = brute_force(text, stops, include=False)
    matcher, told, given_in = StopStrings(stops, include=False), "", ""
    for part in cut(text, places):
        found = matcher.push(part)
        told, given_in = told + found.text, given_in + part
        assert expected.told.startswith(told), "what was told cannot be taken back when the match completes"
        if found.stop is not None:
            return
        held = given_in[len(told) :]
        assert not held or any(stop.startswith(held) for stop in stops), "only the start of a stop string is held"
        longest = next((n for n in range(len(given_in), 0, -1) if any(s.startswith(given_in[-n:]) for s in stops)), 0)
        assert len(held) == longest


@pytest.mark.parametrize(
    ("stops", "include", "parts", "told", "stop"),
    [
        (("END",), False, ["some E", "ND more"], "some ", "END"),
        (("END",), True, ["some E", "ND more"], "some END", "END"),
        (("END",), False, ["some E", "N", "x"], "some ENx", None),
        (("END",), False, ["some EN"], "some EN", None),
        (("abc", "b"), False, ["abc"], "a", "b"),  # completes first
        (("bc", "abc"), False, ["xabc"], "xa", "bc"),  # complete together: order of the list
        (("abc", "bc"), False, ["xabc"], "x", "abc"),
        ((), False, ["anything"], "anything", None),
        (("🐈",), False, ["a🐈b"], "a", "🐈"),
        (("\n\n",), False, ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (("aa",), False, ["", "a", "", "a", "a"], "", "aa"),
    ],
)
def test_examples(stops: tuple[str, ...], include: bool, parts: list[str], told: str, stop: str | None) -> None:
    assert feed(parts, stops, include) == Outcome(told, stop)


def test_flush_returns_what_was_held_once() -> None:
    matcher = StopStrings(("stop",), include=False)
    assert matcher.push("sto").text == ""
    assert [matcher.flush(), matcher.flush()] == ["sto", ""]


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopStrings((), include=False)
    assert matcher.push("abc").text == "abc"
    assert matcher.flush() == ""
