"""Reads values that are written as Python or Gemma 4 write them, and gives them out as JSON."""

import json
import re
from collections.abc import Callable
from typing import Any

from model.inputs.chat_output.source import Source, Waiting

MOST_LEVELS, MOST_BARE = 128, 2**14  # a number's digits
BARE = re.compile(r"[^,\]\[(){}:=\s\"']")
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
CODES = {"x": 2, "u": 4, "U": 8}
CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")


class Number(str):
    """A number as it was written: Python's own would change some."""

    __slots__ = ()


class NoValue(Exception):
    """There is no value at this place of the text."""


def read_value(source: Source, quote: str, levels: int = MOST_LEVELS) -> Waiting[Any]:
    """Reads a value: a text, number, constant, list or mapping.

    Args:
        source: The text.
        quote: Text around texts; "" for Python's quotes.
        levels: Lists and mappings that it may have in each other.

    Raises:
        NoValue: There is none.
    """
    if not levels:
        raise NoValue
    char = yield from source.skip_space()
    if quote and (yield from source.literal(quote)):
        return (yield from _raw(source, quote))
    if char == '"' or (not quote and char == "'"):  # Gemma writes JSON's quotes at times
        return (yield from _quoted(source))
    if char == "[":
        return (yield from _list(source, quote, levels - 1))
    if char == "{":
        return (yield from _mapping(source, quote, levels - 1))
    return _bare((yield from source.matching(BARE, MOST_BARE)))


def _raw(source: Source, quote: str) -> Waiting[str]:
    parts = list[str]()
    if (yield from source.until((quote,), parts.append)) is None:
        raise NoValue
    return "".join(parts)


def _quoted(source: Source) -> Waiting[str]:
    quote, parts = source.text[source.at], list[str]()
    source.at += 1
    while (stop := (yield from source.until((quote, "\\"), parts.append))) == "\\":
        char = yield from source.peek()
        source.at += len(char)
        parts.append((yield from _escape(source, char)))
    if stop is None:
        raise NoValue
    return "".join(parts)


def _escape(source: Source, char: str) -> Waiting[str]:
    if char not in CODES:
        return ESCAPES.get(char, char if char in "\\'\"/" else "\\" + char)
    code = yield from _code(source, CODES[char])
    if 0xD800 <= code < 0xDC00 and (yield from source.literal("\\u")):  # JSON writes some characters as two halves
        low = yield from _code(source, 4)
        code = 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00 if 0xDC00 <= low < 0xE000 else code
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code < 0xE000 else "\ufffd"


def _code(source: Source, length: int) -> Waiting[int]:
    digits = ""
    while len(digits) < length:
        digit = yield from source.peek()
        if not re.fullmatch("[0-9A-Fa-f]", digit):
            raise NoValue
        digits, source.at = digits + digit, source.at + 1
    return int(digits, 16)


def _list(source: Source, quote: str, levels: int) -> Waiting[list[Any]]:
    source.at += 1
    made = list[Any]()
    while (char := (yield from source.skip_space())) != "]":
        if char == ",":
            source.at += 1
        else:
            made.append((yield from read_value(source, quote, levels)))
    source.at += 1
    return made


def _mapping(source: Source, quote: str, levels: int) -> Waiting[dict[str, Any]]:
    source.at += 1
    made = dict[str, Any]()
    while (char := (yield from source.skip_space())) != "}":
        if char == ",":
            source.at += 1
            continue
        key = yield from read_key(source, quote)
        if (yield from source.skip_space()) != ":":
            raise NoValue
        source.at += 1
        made[key] = yield from read_value(source, quote, levels)
    source.at += 1
    return made


def read_key(source: Source, quote: str) -> Waiting[str]:
    """Reads a name, with quotes or without. Raises NoValue."""
    char = yield from source.skip_space()
    if quote and (yield from source.literal(quote)):
        return (yield from _raw(source, quote))
    if char in ("'", '"'):
        return (yield from _quoted(source))
    if not (key := (yield from source.matching(BARE, 256))):
        raise NoValue
    return key


def _bare(text: str) -> Any:
    if not text:
        raise NoValue
    if text in CONSTANTS:
        return CONSTANTS[text]
    return Number(text) if NUMBER.fullmatch(text) else text


def dumped(value: Any, shown: Callable[[str], str] = str) -> str:
    """Returns a value that was read as JSON. shown: returns a text with special tokens written out."""
    match value:
        case Number():
            return str(value)
        case str():
            return json.dumps(shown(value), ensure_ascii=False)
        case list():
            return "[" + ", ".join(dumped(one, shown) for one in value) + "]"
        case dict():
            members = (dumped(key, shown) + ": " + dumped(one, shown) for key, one in value.items())
            return "{" + ", ".join(members) + "}"
    return json.dumps(value)
