"""Constraints as grammars of llguidance, and what of them is refused.

llguidance (Moskal and others, 2024) reads JSON schemas, regular expressions and context-free grammars, and computes
which tokens may follow. A frontend translates a constraint and tries the grammar in a process with limits
(`model.inputs.grammar_process`). An engine gets the grammar alone.
"""

import json
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from scheduler.structured import CHOICE, JSON_OBJECT, JSON_SCHEMA, REGEX

WHITESPACE = r" |\n {0,40}"  # between JSON tokens: a space, or a new line with its indentation; a run would have no end
NO_TEXT = ("NoExtension", "NoExtensionBias")  # the library's names
# Without \u, as that could write a known property's name in letters that the schema does not see.
JSON_FORM: Any = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": '"\\bfnrt'}
# Without it the library follows bytes of which each is the only one to their end, within one mask: 300,000 in a quarter
# of a second, and for ever where a grammar goes on so, as /a+/ "ab" does. Steps of an engine would wait for that.
UNFORCED = '%llguidance {"no_forcing": true}'
LONGEST_NAMED = 200  # characters of an error of the library that are shown
LONGEST_POINTER = 100  # characters of a place in a schema that are shown


class GrammarRefused(Exception):
    """A constraint cannot be kept. Says why.

    Attributes:
        field: The client's name of the part of the constraint; "" for the whole of it.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def limits() -> LLParserLimits:
    """Bounds on compiling a grammar and on a mask. They hold in the trial and in an engine alike."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 14 ms
        step_max_items=50_000,  # 3 ms
        max_lexer_states=20_000,  # 40 MB
        max_grammar_size=500_000,
        verbose_errors=False,  # they would quote the output
    )


def grammar_of(kind: str, text: str) -> str:
    """Returns a constraint, as in `scheduler.structured.Structured`, as a grammar of llguidance.

    Structural tags, which are made of such grammars, have one by `model.inputs.tag_grammar.grammar_of_any`.

    Raises:
        GrammarRefused: It is malformed, or has a keyword that is not enforced.
    """
    grammar = _grammar_of(kind, text)
    if not is_list(grammar):
        return f"{grammar}\n{UNFORCED}"
    return unforced(json.loads(grammar)["grammars"])


def unforced(grammars: list[dict[str, Any]]) -> str:
    """Returns a list of grammars as JSON, in which no bytes are forced: what one of them says holds for all."""
    return json.dumps({"grammars": [*grammars, {"name": "unforced", "lark_grammar": f'start: ""\n{UNFORCED}'}]})


def is_list(grammar: str) -> bool:
    """Returns whether a grammar of `grammar_of` is a list of them as JSON, not a text in Lark's syntax."""
    return grammar.startswith('{"grammars"')


def _grammar_of(kind: str, text: str) -> str:
    if kind in (JSON_SCHEMA, JSON_OBJECT):
        schema = {"type": "object"} if kind == JSON_OBJECT else read_schema(text)
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
    if kind == REGEX:
        return LLMatcher.grammar_from_regex(text)
    if kind == CHOICE:
        texts = sorted(set(json.loads(text)))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(quoted, texts)))
    bare = LITERALS.sub("", text)
    if "::=" not in bare:
        _check_lark(bare)
        return LLMatcher.grammar_from_lark(text)
    try:
        lark = gbnf_to_lark(without_escapes(text)).removeprefix("%llguidance {}")
        _check_lark(LITERALS.sub("", lark))
        return LLMatcher.grammar_from_lark(lark)
    except GrammarRefused:
        raise
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    except Exception as error:  # the converter of GBNF raises what it likes
        raise GrammarRefused(shown(str(error))) from None


def read_schema(text: str) -> dict[str, Any]:
    """Reads a JSON schema.

    Raises:
        GrammarRefused: It is no JSON object, or has a keyword that llguidance would ignore or understand otherwise.
    """
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(f"it is no JSON: {shown(str(error))}") from None
    if not isinstance(schema, dict):
        raise GrammarRefused("it must be a JSON object; as a schema true means {}")
    try:
        if not is_unicode(schema):
            raise GrammarRefused("it has a lone surrogate, which is no character")
        _check_schema(schema, "")
    except RecursionError:
        raise GrammarRefused("it is nested too deeply") from None
    return schema


def is_unicode(value: Any) -> bool:
    """Returns whether all texts of a JSON value are Unicode: an escape can write half a character."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_number(name: str) -> object:
    raise ValueError(f"{name} is no number of JSON")


CONTROLS = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")  # JSON can write them in \u escapes alone
DRAFTS = ("draft/2020-12", "draft/2019-09", "draft-07", "draft-06")
VALUES = ("enum", "const", "default", "examples")
MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose keys are names, each with a schema."""


NOTES = ("default", "examples")  # annotations with values
EXACT, DIGITS = 2**53, 15  # the library reads numbers as doubles
LARGEST_MULTIPLE = 2**32 // 10
LEAP_DAY = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29"
DATE = rf"([0-9]{{4}}-(0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{LEAP_DAY})"
TIME = "[0-9]{2}:[0-9]{2}:[0-5]"  # without leap seconds, as they are not in every minute
ATOM, LABEL = "[A-Za-z0-9_+-]", "[A-Za-z0-9]([A-Za-z0-9-]{0,28}[A-Za-z0-9])?"
CLASSES = re.compile(r"\\.|\[\^?(?:[^\]\\]++|\\.)*+(?:\]|\\?\Z)", re.DOTALL)
"""Escapes, and classes as ECMA-262 has them. One without an end goes to the end, so that nothing is looked at twice."""
CLASS_ATOM = r"(\\(?:x[0-9A-Fa-f]{2}|u\{[0-9A-Fa-f]+\}|u[0-9A-Fa-f]{4}|[pP]\{[^}]*\}|c[A-Za-z]|.)|[^\\])"
CLASS_ITEMS = re.compile(f"{CLASS_ATOM}(?:-{CLASS_ATOM})?", re.DOTALL)
RUSTS, ANY = "[&~-^", r"[\s\S]"
"""Characters with a meaning in Rust's classes that ECMA-262 has not everywhere; the class of all characters."""
CLASS_NAMES = ("\\d", "\\D", "\\w", "\\W", "\\s", "\\S", "\\p", "\\P")  # no end of a range
SPACES = {r"\s": (r"[\s--\x85]", r"[\s\u{FEFF}]"), r"\S": (r"[^\s\u{FEFF}]", r"[\S\x85]")}
"""What is surely white space or not, and what may be: U+0085 is for Rust and Python, U+FEFF for ECMA-262."""

NARROWED: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}"},
    "date-time": {"pattern": f"^{DATE}[Tt]{TIME}"},
    "hostname": {"maxLength": 253},
}
"""What the library's formats allow too much of, in terms of itself."""
EMAIL = f"^{ATOM}{{1,32}}(\\.{ATOM}{{1,14}}){{0,2}}@{LABEL}(\\.{LABEL}){{1,4}}$"


def _check_schema(schema: dict[str, Any], where: str) -> None:
    """Refuses what llguidance does not refuse itself, and narrows formats. References lead anywhere.

    So all objects count as schemas.

    Args:
        schema: A schema, or an object that may hold some. Changed in place.
        where: JSON pointer to it.
    """
    for name in NOTES:
        schema.pop(name, None)
    _take_patterns(schema, where)
    _narrow(schema)
    if "x-guidance" in schema:
        raise GrammarRefused(f"{place_in_schema(where, 'x-guidance')}: options of the library are the server's")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(schema.get(name), bool):
            raise GrammarRefused(f"{place_in_schema(where, name)}: must be a number, as from draft 6 on")
    draft = schema.get("$schema")
    if draft is not None and not (isinstance(draft, str) and any(known in draft for known in DRAFTS)):
        raise GrammarRefused(
            f"{place_in_schema(where, '$schema')}: {shown(str(draft))} is not read; JSON Schema 2020-12 is"
        )
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
        raise GrammarRefused(
            f"{place_in_schema(where, 'minProperties')}: can be at most the number of required ones: keys could repeat"
        )
    for name, value in schema.items():
        for number in _numbers(value, name in VALUES):
            if (
                not abs(number) < EXACT
                or len(repr(number).replace(".", "").lstrip("-0").partition("e")[0]) > DIGITS + 1
            ):
                raise GrammarRefused(
                    f"{place_in_schema(where, name)}: {number!r:.40} cannot be kept exactly: at most {DIGITS} digits"
                )
    multiple = schema.get("multipleOf")
    if isinstance(multiple, int | float) and multiple > LARGEST_MULTIPLE:
        raise GrammarRefused(f"{place_in_schema(where, 'multipleOf')}: can be at most {LARGEST_MULTIPLE}")
    for name in ("enum", "const", "properties"):
        if any(map(CONTROLS.search, _texts(schema.get(name), deep=name != "properties"))):
            raise GrammarRefused(f"{place_in_schema(where, name)}: has control characters, which are not written")
    for name, inner in schema.items():
        if name not in VALUES:
            _check_inner(inner, f"{where}/{name}", is_map=name in MAPS)


def place_in_schema(where: str, name: str) -> str:
    """Returns the JSON pointer to a keyword. Keeps the end of a long one: names may be of any length."""
    pointer = f"{where}/{name}"
    return pointer if len(pointer) <= LONGEST_POINTER else "..." + pointer[3 - LONGEST_POINTER :]


def _check_inner(inner: Any, where: str, is_map: bool) -> None:
    if isinstance(inner, list) or (is_map and isinstance(inner, dict)):
        for name, one in enumerate(inner) if isinstance(inner, list) else inner.items():
            _check_inner(one, f"{where}/{name}", is_map=False)
    elif isinstance(inner, dict):
        _check_schema(inner, where)


def _narrow(schema: dict[str, Any]) -> None:
    """Takes what is no value of a format out of what the library allows of it."""
    kind = schema.get("format")
    if kind == "email":
        del schema["format"]
        narrower: dict[str, Any] = {"pattern": EMAIL}
    elif isinstance(kind, str) and kind in NARROWED:
        narrower = NARROWED[kind]
    else:
        return
    others = schema.get("allOf", [])
    if isinstance(others, list):
        schema["allOf"] = [*others, {"type": "string", **narrower} if schema.get("type") == "string" else narrower]


def _numbers(value: Any, deep: bool) -> Iterator[int | float]:
    """Yields the numbers in a keyword's value; those of inner objects, which may be schemas, only if deep."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list):
        for one in value:
            if deep or not isinstance(one, dict):
                yield from _numbers(one, deep)
    elif deep and isinstance(value, dict):
        yield from _numbers(list(value.values()), deep)


def _take_patterns(schema: dict[str, Any], where: str) -> None:
    """Writes the patterns of a schema as the library, which reads Rust's expressions, reads them."""
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _plain_pattern(pattern, place_in_schema(where, "pattern"))
    if isinstance(keyed := schema.get("patternProperties"), dict):
        at = place_in_schema(where, "patternProperties")
        # A name that none of them matches may have any value, unless there may be no other.
        wide = schema.get("additionalProperties") is not False
        plain = [_plain_pattern(pattern, at, wide) for pattern in keyed]
        if len(set(plain)) < len(plain):
            raise GrammarRefused(f"{at}: two of its patterns are the same")
        schema["patternProperties"] = dict(zip(plain, keyed.values(), strict=True))


def _plain_pattern(pattern: str, where: str, wide: bool = False) -> str:
    """Returns an expression of JSON Schema as Rust's, in whose classes brackets and some pairs have a meaning.

    Args:
        pattern: The expression.
        where: JSON pointer to it.
        wide: What may be white space, or another character, counts as both; otherwise it counts as neither.

    Raises:
        GrammarRefused: A class is empty.
    """

    def plain(found: re.Match[str]) -> str:
        text = found[0]
        if text in SPACES:
            return SPACES[text][wide]
        if text[0] == "\\" or text[-1] != "]":
            return text
        if text == "[]":
            raise GrammarRefused(f"{where}: the class [] is empty")
        if text == "[^]":
            return ANY
        negated = text.startswith("[^")
        inside = text[1 + negated : -1]
        ends = {end for item in CLASS_ITEMS.finditer(inside) for end in item.groups()}
        named = {name: both[negated != wide] for name, both in SPACES.items()}
        if ends.issuperset(SPACES):  # it is of all characters
            named = {}
        return text[: 1 + negated] + CLASS_ITEMS.sub(partial(_plain_item, named), inside) + "]"

    return CLASSES.sub(plain, pattern)


def _plain_item(named: Mapping[str, str], found: re.Match[str]) -> str:
    """Returns an item of a class, a character or a range, with the characters escaped that Rust gives a meaning.

    Args:
        named: What stands for names of classes.
        found: The item.
    """
    ends = [one for one in (found[1], found[2]) if one is not None]
    sign = "\\-" if any(one.startswith(CLASS_NAMES) for one in ends) else "-"
    return sign.join(named.get(one, "\\" + one if one in RUSTS else one) for one in ends)


def _texts(value: Any, deep: bool) -> Iterator[str]:
    """Yields the texts in a JSON value; its keys alone unless deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        value = list(value.values()) if deep else []
    for one in value if isinstance(value, list) else ():
        yield from _texts(one, deep)


LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\]|\\.)+/', re.DOTALL)
"""Texts, comments and expressions of a grammar in Lark's syntax, as llguidance reads them."""
ESCAPES = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
CONTROL = re.compile(r"[\x00-\x1f\x7f]")
OPERATORS = re.compile(r"\[[^\]\n]*(?:--|&&|~~)")  # of Rust's classes of characters; GBNF means the characters


def without_escapes(gbnf: str) -> str:
    """Returns a grammar with characters in place of their codes, of which the library's converter drops digits.

    Raises:
        GrammarRefused: A code is no character, or the grammar has what the converter would take for something else.
    """

    def character(found: re.Match[str]) -> str:
        code = next((code for code in found.groups() if code is not None), None)
        if code is None:
            return found.group()
        number = int(code, 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise GrammarRefused(f"{found.group()} is no character")
        text = {10: "\\n", 13: "\\r", 9: "\\t"}.get(number, chr(number))
        return f"\\x{number:02X}" if text in '"\\[]^-' else text

    if operator := OPERATORS.search(gbnf):
        raise GrammarRefused(f"{shown(operator.group())} ...: --, && and ~~ are not read in a class of characters")
    return ESCAPES.sub(character, gbnf)


def _check_lark(bare: str) -> None:
    """Refuses token ids, which mean other texts in other models, and options of the library.

    Args:
        bare: A grammar without its `LITERALS`.
    """
    for refused in ("<", "%llguidance", "%json"):
        if refused in bare:
            what = "special tokens and token ids are" if refused == "<" else f"{refused} is"
            raise GrammarRefused(f"{what} not supported in a grammar")


def quoted(text: str) -> str:
    """Returns a literal of a grammar in Lark's syntax."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON may have it, Lark not


def escaped(text: str) -> str:
    """Returns a regular expression, as it stands between slashes in a grammar, that matches a text."""
    escapes = re.sub(r"([!#-&(-/;?@\[-`{-~])", r"\\\1", text)
    return CONTROL.sub(lambda found: f"\\x{{{ord(found[0]):X}}}", escapes)


def try_schema(schema: dict[str, Any], tokenizer: LLTokenizer) -> None:
    """Compiles a schema that `read_schema` has read.

    Raises:
        GrammarRefused: It cannot be enforced.
    """
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_FORM)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits())
    if failed:
        raise _refused(messages[0])


def try_grammar(grammar: str, tokenizer: LLTokenizer) -> LLMatcher:
    """Compiles a grammar, computes its first mask and takes one of the tokens that this allows.

    Returns:
        The constraint at the start of an output.

    Raises:
        GrammarRefused: It cannot be compiled within `limits`, allows no text, or exceeds them at any first token.
    """
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=limits())
    if failed:
        raise _refused(messages[0])
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    mask = b"" if matcher.is_error() else matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        raise _refused(matcher.get_error() or NO_TEXT[0])
    message = NO_TEXT[0]
    for token in range(tokenizer.vocab_size):
        if mask[token // 8] >> token % 8 & 1:
            ahead = matcher.deep_copy()
            if ahead.consume_token(token):
                return matcher
            message = ahead.get_error()
    raise _refused(message)


def _refused(message: str) -> GrammarRefused:
    return GrammarRefused("it allows no text" if shown(message) in NO_TEXT else shown(message))


def shown(message: str) -> str:
    """Returns the error in a message of the library, on one line: other lines quote the grammar."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    first = next(iter([*named, *lines]), "the grammar is invalid")
    return first if len(first) <= LONGEST_NAMED else first[: LONGEST_NAMED - 3] + "..."


FIRST_SPECIAL = 257


class ByteVocabulary:
    """A vocabulary of all bytes, one end token and special tokens, in the form that `LLTokenizer` takes."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None

    def __init__(self, special: int = 0) -> None:
        """Makes a vocabulary. special: the number of its special tokens, whose ids begin with FIRST_SPECIAL."""
        ids = range(FIRST_SPECIAL, FIRST_SPECIAL + special)
        self.tokens = (*(bytes([byte]) for byte in range(256)), b"", *(b"<%d>" % i for i in ids))
        self.special_token_ids = (256, *ids)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
