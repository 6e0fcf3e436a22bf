"""Constraints as grammars of XGrammar, and what of them is refused.

llguidance is asked first (`model.inputs.grammar_process`), so that a malformed constraint is refused alike with both.
An engine gets rules in XGrammar's form of EBNF behind a mark.
"""

import json
import re

import xgrammar

from model.inputs.grammar_backends import MARK
from model.inputs.grammars import LITERALS, GrammarRefused, shown
from model.inputs.with_xgrammar.expressions import quoted, whole
from model.inputs.with_xgrammar.matcher import XGrammarCompiler, XGrammarMatcher
from model.inputs.with_xgrammar.schemas import Shaped, schema_of
from scheduler.structured import CHOICE, GRAMMAR, JSON_OBJECT, JSON_SCHEMA, REGEX

ESCAPES = 'basic_escape ::= (([\\"\\\\/bfnrt]) | ("u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]))\n'
FEWER_ESCAPES = 'basic_escape ::= (([\\"\\\\bfnrt]))\n'
"""Without \\u and \\/, as those could write a known property's name in letters that the schema does not see."""
UNKNOWN = re.compile(r'Regex\("|"u" \[A-Fa-f0-9\]')  # a quote within a literal has a backslash before it
PATTERN = 'Regex("%s", json_string=true)'
OWN_FORMS = re.compile(r"\b[A-Za-z]\w*\s*\(|\(\s*=")
PLACE = re.compile(r"^\[[0-9:]+\] \S+: ")  # of an error in the library's source


def serves(kind: str, text: str) -> bool:
    """Returns whether XGrammar keeps a constraint; llguidance keeps the others: Lark's grammars, and tags."""
    return kind in (JSON_SCHEMA, JSON_OBJECT, REGEX, CHOICE) or (kind == GRAMMAR and "::=" in LITERALS.sub("", text))


def grammar_of(kind: str, text: str) -> str:
    """Returns a constraint that XGrammar `serves`, and that llguidance has accepted.

    Raises:
        GrammarRefused: XGrammar does not read it, or would not enforce all of it.
    """
    try:
        return MARK + _rules_of(kind, text)
    except (RuntimeError, ValueError) as error:
        raise GrammarRefused(f"xgrammar: {shown(PLACE.sub('', str(error)))}") from None


def _rules_of(kind: str, text: str) -> str:
    if kind == JSON_OBJECT:
        return _json_rules(Shaped({"type": "object"}, {}))
    if kind == JSON_SCHEMA:
        return _json_rules(schema_of(text))
    if kind == REGEX:
        return f"root ::= {whole(text)}"
    if kind == CHOICE:
        return "root ::= " + " | ".join(map(quoted, sorted(set(json.loads(text)))))
    if own := OWN_FORMS.search(LITERALS.sub("", text)):
        raise GrammarRefused(f"{own.group()} is a form of xgrammar alone, which is not supported in a grammar")
    xgrammar.Grammar.from_ebnf(text)
    return text


def _json_rules(shaped: Shaped) -> str:
    # One space behind a comma and a colon, and none elsewhere: its other form has spaces without an end.
    schema = json.dumps(shaped.schema)
    rules = str(xgrammar.Grammar.from_json_schema(schema, any_whitespace=False, strict_mode=False))
    rules = rules.replace(ESCAPES, FEWER_ESCAPES)
    for name in shaped.rules:
        rules = rules.replace(PATTERN % name, name)
    if UNKNOWN.search(rules):
        raise GrammarRefused("this version of xgrammar has other rules for texts than those that are known")
    return "\n".join([rules, *(f"{name} ::= {rule}" for name, rule in shaped.rules.items())])


def try_grammar(grammar: str, compiler: XGrammarCompiler) -> XGrammarMatcher:
    """Compiles a grammar of `grammar_of`, and computes its first mask.

    Returns:
        The constraint at the start of an output.

    Raises:
        GrammarRefused: It cannot be compiled, or allows no text.
    """
    try:
        matcher = compiler.matcher(grammar.removeprefix(MARK))
    except (RuntimeError, ValueError) as error:
        raise GrammarRefused(f"xgrammar: {shown(PLACE.sub('', str(error)))}") from None
    if matcher.is_error():
        raise GrammarRefused("it allows no text")
    return matcher
