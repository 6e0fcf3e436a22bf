"""Which library keeps a constraint: the frontend's setting, and what is said where XGrammar is missing."""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from model.errors import RequestFault
from model.inputs import grammar_backends
from model.inputs.grammar_backends import BACKENDS, DEPENDENCY, EXTRA, LLGUIDANCE, MARK, XGRAMMAR
from model.inputs.grammar_checker import GrammarChecker
from model.inputs.grammars import ByteVocabulary, GrammarRefused
from model.structured.grammar_mask import GrammarMask
from model.structured.grammar_store import MOST_TEXT, XGRAMMARS, GrammarStore
from rpc.frontend.settings import FrontendSettings
from scheduler.controls import LogitsParams
from scheduler.structured import Structured
from tests.model.test_grammar_store import bits
from tests.support.grammar_backends import NEEDS_XGRAMMAR, grammar
from tests.support.processes import wait_until

TOKENS = LLTokenizer(ByteVocabulary())  # type: ignore[arg-type] # it has what is asked of a wrapper
TAGS = {"structures": [{"begin": "<a>", "schema": {"type": "null"}, "end": "</a>"}], "triggers": ["<"]}


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(XGRAMMAR)
    yield made
    made.close()


@pytest.fixture
def store() -> Iterator[GrammarStore]:
    made = GrammarStore(lambda: TOKENS)
    yield made
    made.close()


@NEEDS_XGRAMMAR
@pytest.mark.parametrize(
    "structured",
    [
        Structured.json_schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}),
        Structured.json_object(),
        Structured.regex("a+b"),
        Structured.choice(["yes", "no"]),
        Structured.grammar('root ::= "a" root | "b"'),
    ],
    ids=lambda one: one.kind,
)
def test_xgrammar_keeps_what_it_can(checker: GrammarChecker, structured: Structured) -> None:
    checked = checker.grammar(structured, "")
    assert checked.grammar.startswith(MARK)
    assert checked.short in ("{}", "ab", "no", "b")
    assert checked.sure


@NEEDS_XGRAMMAR
@pytest.mark.parametrize("structured", [Structured.grammar('start: "a"'), Structured.structural_tag(TAGS)])
def test_llguidance_keeps_the_rest(checker: GrammarChecker, structured: Structured) -> None:
    assert not checker.grammar(structured, "").grammar.startswith(MARK)


@NEEDS_XGRAMMAR
@pytest.mark.parametrize(
    ("structured", "says"),
    [
        (Structured.json_schema({"type": "string", "format": "date", "minLength": 3}), "/minLength: is not enforced"),
        (Structured.json_schema({"not": {}}), "not"),
        (Structured.regex("(?i)a"), "(?i in a regular expression is not read by xgrammar"),
        (Structured.grammar("root ::= Token(3)"), "Token"),
        (Structured.grammar('root ::= TagDispatch(("a", b))\nb ::= "b"'), ""),
        (
            Structured.json_schema({"type": "integer", "multipleOf": 1025}),
            "/multipleOf: must be a whole number up to 1024",
        ),
    ],
    ids=lambda one: one.text[:30] if isinstance(one, Structured) else "",
)
def test_it_refuses_the_rest_of_these(checker: GrammarChecker, structured: Structured, says: str) -> None:
    with pytest.raises(GrammarRefused) as refused:
        checker.grammar(structured, "")
    assert says in str(refused.value)


@NEEDS_XGRAMMAR
def test_it_knows_complete_outputs(checker: GrammarChecker) -> None:
    """In its own form: there is a space behind a comma."""
    pair = Structured.json_schema({"type": "array", "items": {"type": "null"}})
    texts = ("[]", "[null", "[null, null]", "[null,null]")
    assert [checker.is_complete(pair, text) for text in texts] == [True, False, True, False]


def test_the_setting_is_one_of_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--structured-output-backend: 'outlines' is no library"):
        FrontendSettings(structured_output_backend="outlines")
    monkeypatch.setattr(grammar_backends, "find_spec", lambda name: None if name == XGRAMMAR else object())
    FrontendSettings()
    with pytest.raises(ValueError, match="by xgrammar needs the package xgrammar: pip install 'xgrammar"):
        FrontendSettings(structured_output_backend=XGRAMMAR)


@pytest.mark.parametrize("name", BACKENDS)
def test_without_llguidance_it_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It checks the constraints of both."""
    monkeypatch.setattr(grammar_backends, "find_spec", lambda name: None if name == LLGUIDANCE else object())
    with pytest.raises(ValueError, match=f"by {name} needs the package llguidance: pip install 'llguidance") as refused:
        FrontendSettings(structured_output_backend=name)
    assert "pip install 'xgrammar" not in str(refused.value)


def test_what_is_said_to_install_is_what_the_project_requires() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    required = {*project["dependencies"], *project["optional-dependencies"]["xgrammar"]}
    assert {how.split("'")[1] for how in (DEPENDENCY, EXTRA)} <= required


def test_an_engine_without_it_ends_the_request_alone(store: GrammarStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    monkeypatch.delitem(sys.modules, "model.inputs.with_xgrammar.matcher", raising=False)
    with pytest.raises(RequestFault, match="this engine has no xgrammar: pip install"):
        wait_until(lambda: store.ready(f'{MARK}root ::= "a"', ""), "its compilation")
    wait_until(lambda: store.ready('start: "a"', ""), "the other library's")


@NEEDS_XGRAMMAR
def test_an_engine_keeps_grammars_of_both(store: GrammarStore) -> None:
    for structured, first in ((Structured.choice(["no"]), "n"), (Structured.grammar('start: "yes"'), "y")):
        mask = GrammarMask.of(LogitsParams(grammar=grammar(XGRAMMAR, structured)), store)
        assert mask is not None
        assert bits(mask, TOKENS.vocab_size) == [ord(first)]


@NEEDS_XGRAMMAR
def test_what_cannot_be_compiled_is_a_fault_of_its_request(store: GrammarStore) -> None:
    with pytest.raises(RequestFault, match="cannot be compiled: RuntimeError"):
        wait_until(lambda: store.ready(f"{MARK}root ::= nothing", ""), "its compilation")


@NEEDS_XGRAMMAR
def test_its_grammars_are_evicted_sooner(store: GrammarStore) -> None:
    """Compiled they take more memory."""
    for number in range(9):
        text = f'{MARK}root ::= "{number}" # {"x" * (MOST_TEXT // XGRAMMARS // 4)}'
        wait_until(lambda text=text: store.ready(text, ""), "its compilation")  # type: ignore[misc]
    assert store.count == 3
