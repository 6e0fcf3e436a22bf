"""Structured output by each of its libraries, for tests that hold with all of them."""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from llguidance import LLMatcher, LLTokenizer

from model.inputs.grammar_backends import LLGUIDANCE, XGRAMMAR, is_for_xgrammar
from model.inputs.grammars import limits
from model.inputs.matcher import Matcher
from model.inputs.tag_grammar import grammar_of_any
from scheduler.structured import Structured

if TYPE_CHECKING:
    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

NEEDS_XGRAMMAR = pytest.mark.skipif(find_spec(XGRAMMAR) is None, reason="xgrammar is not installed")
BACKENDS = [LLGUIDANCE, pytest.param(XGRAMMAR, marks=NEEDS_XGRAMMAR)]
"""Parameters of a test."""


@cache
def grammar(backend: str, structured: Structured) -> str:
    """Returns the grammar that a frontend with this library gives to an engine. Raises GrammarRefused."""
    made = grammar_of_any(structured.kind, structured.text)
    if backend == XGRAMMAR:
        from model.inputs.with_xgrammar import grammars

        if grammars.serves(structured.kind, structured.text):
            return grammars.grammar_of(structured.kind, structured.text)
    return made


@cache
def _compiled(backend: str, structured: Structured, vocabulary: LLTokenizer) -> Matcher:
    made = grammar(backend, structured)
    if not is_for_xgrammar(made):
        return LLMatcher(vocabulary, made, log_level=0, limits=limits())
    from model.inputs.with_xgrammar.grammars import try_grammar

    return try_grammar(made, compiler(vocabulary))


@cache
def compiler(vocabulary: LLTokenizer) -> "XGrammarCompiler":
    """Returns XGrammar's compiler for a vocabulary."""
    from model.inputs.with_xgrammar.matcher import XGrammarCompiler

    return XGrammarCompiler(vocabulary)


def matcher(backend: str, structured: Structured, vocabulary: LLTokenizer) -> Matcher:
    """Returns a constraint at the start of an output. Raises GrammarRefused."""
    return _compiled(backend, structured, vocabulary).deep_copy()
