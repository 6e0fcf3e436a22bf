"""Regular expressions are written anew: no text is accepted that the expression does not match, and few are lost."""

import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer

from model.inputs.grammars import ByteVocabulary, GrammarRefused
from model.inputs.with_xgrammar.expressions import ANY, IN_JSON, common, complement, union, whole, within_json, written
from tests.support.examples import examples
from tests.support.grammar_backends import compiler

xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed")

TOKENS = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper

REFUSED = {
    "(?i)a": "(?i", "(?=a)b": "(?=", "(?!a)b": "(?!", "(?<=a)b": "(?<", r"\ba": r"\b", r"\Aa": r"\A", r"a\z": r"\z",
    r"(a)\1": r"\1", r"\p{L}": r"\p", "a^b": "^", "a$b": "$", "(^a)": "^", "(a$)": "$", "[[:alpha:]]": "class within",
    "[a&&b]": "class within", "[a--b]": "range", "[]a]": "empty class", "[z-a]": "range", r"[\d-z]": "range",
    "a{,2}": "{m}", "a{": "{m}", "a{2": "{m}", "a{3,2}": "allows nothing", "a{2000}": "at most 1000", "a**": "*",
    "a++": "+", "*a": "repeats nothing", "(a": "has no )", "a)": "without its (", "[a": "too early", "a\\": "too early",
    r"\x{110000}": "code", r"\xZZ": "code", r"\x{0}": "code", "(?#c)a": "(?#", r"\ud800": "no character",
    "(" * 5000: "nested",
}  # fmt: skip


@pytest.mark.parametrize("expression", REFUSED, ids=lambda one: one[:20])
def test_what_has_no_form_is_refused_by_name(expression: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        whole(expression)
    assert REFUSED[expression] in str(refused.value)


MATCHED = {
    r"\d+\.\d*": (["5.", "12.75"], ["5", ".5", "٣."]),
    "^a|b$": (["a", "b"], ["ab", ""]),
    "a.c": (["abc", "aéc", "a\rc"], ["a\nc", "ac"]),
    r"\w\W": (["a-", "_ "], ["aa", "é-"]),
    r"\s\S": (["\ta", " é", "\u2003x", "\u0085\ufeff"], ["ab", "  ", "\ufeffa", "  \u0085"]),
    "[^a-c]": (["d", "é", "\n"], ["a", "b", ""]),
    r"[^\d]": (["a", "\n"], ["5"]),
    r"[\]\-^\\]+": (["]-^\\"], ["a"]),
    "[a-]": (["a", "-"], ["b"]),
    "(?P<name>x)(?<other>y)(?:z)": (["xyz"], ["x"]),
    r"\x41\u00e9\x{1F600}\U0001F600": (["Aé😀😀"], ["A"]),
    "a{2}b{2,}c{0,1}": (["aabb", "aabbbc"], ["abb", "aabbcc"]),
    "(x[0-9]+)?y": (["y", "x12y"], ["1y", "12y"]),
    "a*?b+?c??": (["b", "aabc"], ["a"]),
    "a||b": (["a", "", "b"], ["ab"]),
    "": ([""], ["a"]),
    '"\\n\t': (['"\n\t'], ["n"]),
}


def accepts(rule: str, text: str) -> bool:
    matcher = compiler(TOKENS).matcher(f"root ::= {rule}")
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("expression", MATCHED)
def test_texts_are_matched_as_a_whole(expression: str) -> None:
    matched, others = MATCHED[expression]
    rule = whole(expression)
    assert [text for text in matched if not accepts(rule, text)] == []
    assert [text for text in others if accepts(rule, text)] == []


def test_a_pattern_of_json_is_searched_for_and_has_no_escapes() -> None:
    rule = within_json("b|^c$")
    assert all(accepts(rule, text) for text in ("b", "aba", "c"))
    assert not any(accepts(rule, text) for text in ("", "ca", 'b"', "b\\", "b\n"))
    for expression in ('"', r"\\", r"\n", "[\x01\x02]", r"a\tb"):
        with pytest.raises(GrammarRefused, match="a quote, a backslash or a control character"):
            within_json(expression)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    """Expressions that Python reads as Rust does, if ASCII is meant."""
    kind = draw(
        st.sampled_from(["letter", "class", "group", "repeat", "several", "either"] if depth else ["letter", "class"])
    )
    if kind == "letter":
        return draw(st.sampled_from(["a", "b", "1", " ", r"\.", r"\d", r"\w", ".", r"\s", r"\W", r"\D"]))
    if kind == "class":
        return draw(st.sampled_from(["[ab]", "[^a]", "[a-c1-3]", r"[\w-]", r"[^\s]", r"[^\d\n]", r"[\]b]"]))
    inner = expressions(depth=depth - 1)
    if kind == "group":
        return f"({draw(inner)})"
    if kind == "repeat":
        return f"(?:{draw(inner)}){draw(st.sampled_from(['*', '+', '?', '{2}', '{1,2}', '{0,2}', '*?']))}"
    return f"(?:{draw(inner)}{'|' if kind == 'either' else ''}{draw(inner)})"


@settings(max_examples=examples(150), deadline=None)
@given(expressions(), st.lists(st.text("ab1 .é\n-]", max_size=5), max_size=12))
def test_texts_are_those_of_the_expression(expression: str, texts: list[str]) -> None:
    """In ASCII exactly those."""
    rule = whole(expression)
    for text in texts:
        matched = re.fullmatch(expression, text, re.ASCII) is not None
        if accepts(rule, text):
            assert matched
        elif matched:
            assert not text.isascii()


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 40)).map(lambda r: (r[0], r[0] + r[1])), max_size=5))
def test_classes_are_sets(ranges: list[tuple[int, int]]) -> None:
    points = {code for first, last in ranges for code in range(first, last + 1)}
    others = {code for first, last in complement(tuple(ranges)) for code in range(first, min(last, 999) + 1)}
    assert {code for first, last in union(tuple(ranges)) for code in range(first, last + 1)} == points
    assert others == set(range(1, 1000)) - points
    assert union(complement(tuple(ranges)), union(tuple(ranges))) == ANY


def test_every_character_is_written_as_itself() -> None:
    """In a class and as a literal, near the ends of each range of UTF-8 and all of ASCII."""
    codes = [*range(1, 0x101), 0x7FF, 0x800, 0xD7FF, 0xE000, 0xFFFF, 0x10000, sys.maxunicode]
    for code in codes:
        alone = written(((code, code),))
        assert accepts(alone, chr(code)), hex(code)
        around = common(((max(1, code - 1), code),), ANY)
        assert accepts(written(around), chr(code)), hex(code)
        assert not accepts(written(complement(((code, code),))), chr(code)), hex(code)
    assert not any(accepts(written(IN_JSON), text) for text in ('"', "\\", "\x1f", "\n"))
