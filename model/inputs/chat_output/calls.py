"""Reads tool calls out of a model's output, in each form of their arguments."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from model.inputs.chat_output.formats import Arguments, ParameterTags, ToolFormat
from model.inputs.chat_output.schema_types import NULLABLE, allows, types_of
from model.inputs.chat_output.source import JsonEnd, Source, Waiting
from model.inputs.chat_output.values import NUMBER, NoValue, dumped, read_key, read_value

NAME = re.compile(r"[A-Za-z0-9_.-]")
MOST_NAME, MOST_ID = 128, 64  # characters
MOST_VALUE = 2**16  # characters of JSON in tags, behind which the end tag ends it wherever it stands
MOST_LOOSE = 64  # characters between a name and the end of what follows it
ANY: frozenset[str] = frozenset()
TEXT = frozenset({"string"})
OBJECT_START = "{"
ARGUMENTS = ("arguments", "parameters")  # models take one for the other
BESIDE = ("id", "type", "index", "tool_call_id")  # keys of a call that mean nothing to its arguments


class CallSink(Protocol):
    """Takes the parts of calls."""

    def begin(self, name: str, call_id: str) -> None:
        """Takes the beginning of a call. From now on it is one, whatever follows."""

    def arguments(self, text: str) -> None:
        """Takes more text of its arguments."""


class CallReader:
    """Reads one call after the other."""

    def __init__(
        self,
        form: ToolFormat,
        schemas: Mapping[str, Mapping[str, Any]],
        source: Source,
        sink: CallSink,
        shown: Callable[[str], str],
    ) -> None:
        """Makes a reader.

        Args:
            form: Form of the calls.
            schemas: JSON schema of the arguments by the tool's name.
            source: The output.
            sink: Takes the calls.
            shown: Returns a text with special tokens written out.
        """
        self._form, self._schemas, self._source, self._sink = form, schemas, source, sink
        self._shown = shown
        self._broken_json = False  # a value in tags was no JSON

    def read(self, bare: bool = False) -> Waiting[bool]:
        """Reads a call, from behind `begin` to behind `end`. Returns whether there was one.

        Args:
            bare: What stands before the name is `ToolFormat.bare` alone, so that it has to be a tool's.
        """
        form = self._form
        if form.keys is not None:
            if not (yield from self._object(*form.keys)):
                return False
        else:
            name = yield from self._source.matching(NAME, MOST_NAME)
            if not name or ((form.at_start or bare) and name not in self._schemas):
                return False
            call_id = yield from self._call_id(name)
            if not (yield from self._behind_name()) or not (yield from self._named(name, call_id)):
                return False
        yield from self._end()
        return True

    def _end(self) -> Waiting[bool]:
        """Reads the end of a call, or as much of it as a model writes before another one. Returns whether it came."""
        if (yield from self._source.literal(" " + self._form.end.rstrip())):
            return True
        return bool(self._form.bare) and (yield from self._source.literal(" " + self._form.bare[-1]))

    def _call_id(self, name: str) -> Waiting[str]:
        form = self._form
        if not form.id_begin or not (yield from self._source.literal(form.id_begin)):
            return ""
        found = yield from self._source.matching(NAME, MOST_ID)
        return form.call_id.format(name=name, id=found) if re.fullmatch(form.id_pattern, found) else ""

    def _behind_name(self) -> Waiting[bool]:
        if not self._form.skips_to:
            return (yield from self._source.literal(self._form.named.rstrip()))
        source, limit = self._source, self._source.limit
        source.limit = min(source.end if limit is None else limit, source.at + MOST_LOOSE)
        try:
            return (yield from source.until((self._form.skips_to,), _nowhere)) is not None
        finally:
            source.limit = limit

    def _named(self, name: str, call_id: str) -> Waiting[bool]:
        """Reads the arguments of a call whose name is known. Returns whether some begin."""
        match self._form.arguments:
            case Arguments.JSON:
                if (yield from self._source.skip_space()) != OBJECT_START:
                    return False
                self._sink.begin(name, call_id)
                yield from self._json(self._give_json)
            case Arguments.TAGGED:
                self._sink.begin(name, call_id)
                yield from self._tagged(self._form.tags or ParameterTags("", "", ""), self._schemas.get(name, {}))
            case Arguments.PYTHON:
                return (yield from self._members(name, call_id, ")"))
            case Arguments.GEMMA:
                if (yield from self._source.skip_space()) != OBJECT_START:
                    return False
                self._source.at += 1
                return (yield from self._members(name, call_id, "}"))
        return True

    def _json(self, give: Callable[[str], None]) -> Waiting[None]:
        """Reads an object, an array or a text as it comes."""
        source, value = self._source, JsonEnd()
        while True:
            found = value.feed(source.text, source.at, source.end)
            end = source.end if found is None else found
            give(source.text[source.at : end])
            source.at = end
            if found is not None or source.over:
                return
            yield

    def _give_json(self, text: str) -> None:
        """Gives out JSON, in which special tokens can only stand in texts."""
        if not text.isascii():
            text = "".join(_escaped(self._shown(char)) if "\ud800" <= char <= "\udfff" else char for char in text)
        self._sink.arguments(text)

    def _json_text(self) -> Waiting[str | None]:
        """Reads a JSON text; None where there is none."""
        if (yield from self._source.skip_space()) != '"':
            return None
        parts = list[str]()
        yield from self._json(parts.append)
        try:
            return str(json.loads("".join(parts), strict=False))
        except ValueError:
            return None

    # A call that is one JSON object

    def _object(self, name_key: str, arguments_key: str) -> Waiting[bool]:
        """Reads a JSON object with a name and arguments, in any order, and maybe other keys."""
        source, name, held = self._source, "", ""
        if (yield from source.skip_space()) != OBJECT_START:
            return False
        source.at += 1
        given, others, first = False, False, True
        while (char := (yield from source.skip_space())) != "}":
            if char == "," and not (self._form.at_start and first):
                source.at += 1
                continue
            before, first = source.at, False
            key = yield from self._json_text()
            if key is None or (yield from source.skip_space()) != ":":
                return given
            if self._form.at_start and not given and not source.text.startswith(f'"{key}"', before):
                return given  # its grammar knows a call by its first key, as models write it
            source.at += 1
            is_arguments = key in (arguments_key, *ARGUMENTS)
            others |= not (is_arguments or key == name_key or key in BESIDE)
            if others and self._form.at_start:
                return given
            if key == name_key:
                name = (yield from self._json_text()) or ""
                if not self._is_name(name):
                    return given
            elif is_arguments and name and not given and (yield from source.skip_space()) == OBJECT_START:
                self._sink.begin(name, "")
                given = True
                yield from self._json(self._give_json)
            else:
                value = yield from self._any_json()
                held = value if is_arguments else held
        source.at += 1
        return given or ((bool(held) or not others) and self._whole(name, held))

    def _is_name(self, name: str) -> bool:
        known = name in self._schemas or not self._form.at_start
        return known and 0 < len(name) <= MOST_NAME and all(map(NAME.fullmatch, name))

    def _any_json(self) -> Waiting[str]:
        if (yield from self._source.skip_space()) in ('"', "{", "["):
            parts = list[str]()
            yield from self._json(parts.append)
            return "".join(parts)
        return (yield from self._source.matching(re.compile(r"[^,}\]\s]"), MOST_LOOSE))

    def _whole(self, name: str, arguments: str) -> bool:
        """Gives out a call that was read to its end. Arguments may be missing, or be JSON within a text."""
        try:
            if arguments.startswith('"'):
                arguments = str(json.loads(arguments, strict=False))
                arguments.encode()
            known = isinstance(json.loads(arguments or "{}"), dict)
        except (ValueError, RecursionError):  # also a lone surrogate, which no message can have
            known = False
        if name and known:
            self._sink.begin(name, "")
            self._give_json(arguments or "{}")
        return bool(name) and known

    # Arguments in tags

    def _tagged(self, tags: ParameterTags, schema: Mapping[str, Any]) -> Waiting[None]:
        source, separator, types_by_name = self._source, "{", dict[str, frozenset[str]]()
        known = schema.get("properties")
        while (yield from source.literal(" " + tags.begin)):
            key = list[str]()
            if (yield from source.until((tags.named.split()[0],), key.append)) is None:
                break
            yield from source.literal(tags.named[len(tags.named.split()[0]) :].rstrip())
            name = "".join(key)
            if name not in types_by_name:
                types_by_name[name] = types_of(known.get(name), schema) if isinstance(known, Mapping) else ANY
            types = types_by_name[name]
            if tags.typed:
                types = ANY
                if not (yield from source.literal("false")):
                    yield from source.literal("true")
                    types = TEXT
                yield from source.literal(tags.typed)
            self._sink.arguments(separator + dumped(name, self._shown) + ": ")
            yield from self._tagged_value(tags, types)
            separator = ", "
        self._close(separator, (yield from self._end()))

    def _close(self, separator: str, ends: bool) -> None:
        """Ends the object of arguments, unless the output was cut off: its arguments must not look whole."""
        if ends or not self._source.ended:
            self._sink.arguments("{}" if separator == "{" else "}")

    def _tagged_value(self, tags: ParameterTags, types: frozenset[str]) -> Waiting[None]:
        """Reads a value, to behind its end tag. types: those of its schema; none for any."""
        source, end = self._source, tags.end.strip()
        stops = ("\n" + end, end) if tags.indented else (end,)
        if tags.indented and (yield from source.peek()) == "\n":
            source.at += 1
        if "null" in types and (yield from source.literal(f" null {end}")):
            self._sink.arguments("null")
            return
        if "string" in types and types <= NULLABLE:
            self._sink.arguments('"')
            stop = yield from source.until(stops, lambda text: self._sink.arguments(_escaped(self._shown(text))))
            self._sink.arguments("" if stop is None else '"')
            return
        value = yield from self._json_in_tags(tags, types)
        if value is None:
            parts = list[str]()
            stop = yield from source.until(stops, parts.append)
            value = "".join(parts) if stop is None else as_json(self._shown("".join(parts)), types)
        self._sink.arguments(value)

    def _json_in_tags(self, tags: ParameterTags, types: frozenset[str]) -> Waiting[str | None]:
        """Reads JSON, whose texts may have the end tag; None, with nothing read, where something else stands there.

        Where a text may stand too, JSON of other types than its schema has is one.
        """
        source, parts = self._source, list[str]()
        if self._broken_json:
            return None
        source.pinned += 1
        before, source.limit = source.at, source.at + MOST_VALUE
        try:
            if (yield from source.skip_space()) in ("{", "[", '"'):
                yield from self._json(parts.append)
                if (yield from source.literal(" " + tags.end.strip())) and is_json("".join(parts), types):
                    return "".join(parts)
                self._broken_json = True  # not tried again: with every value the time would be quadratic
            source.at = before
            return None
        finally:
            source.pinned -= 1
            source.limit = None

    # Arguments as members

    def _members(self, name: str, call_id: str, end: str) -> Waiting[bool]:
        """Reads arguments as Python and Gemma 4 write them, of a call that begins with the first of them.

        What is none ends them. Then they must not look whole.
        """
        source, separator, begun = self._source, "{", False
        while (char := (yield from source.skip_space())) != end:
            if char == ",":
                source.at += 1
                continue
            member = yield from self._member(":" if end == "}" else "=")
            if member is None:
                return begun
            if not begun:
                self._sink.begin(name, call_id)
                begun = True
            key, value = member
            self._sink.arguments(f"{separator}{dumped(key, self._shown)}: {dumped(value, self._shown)}")
            separator = ", "
        if not begun:
            self._sink.begin(name, call_id)
        self._sink.arguments("{}" if separator == "{" else "}")
        if end == "}":
            source.at += 1
        return True

    def _member(self, sign: str) -> Waiting[tuple[str, Any] | None]:
        """Reads a name and a value; None, with nothing read, where something else stands there."""
        source, quote = self._source, self._form.quote
        source.pinned += 1
        before = source.at
        try:
            key = yield from read_key(source, quote)
            if (yield from source.skip_space()) == sign:
                source.at += 1
                return key, (yield from read_value(source, quote))
        except NoValue:
            pass
        finally:
            source.pinned -= 1
        source.at = before
        return None


def _nowhere(text: str) -> None:
    """Takes text that nobody wants."""


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str, types: frozenset[str] = ANY) -> bool:
    """Returns whether a text is JSON. types: of which a text is one; it is one of these then."""
    try:
        value = json.loads(text, parse_constant=_no_json)
    except (ValueError, RecursionError):
        return False
    return "string" not in types or allows(types, value)


def as_json(text: str, types: frozenset[str] = ANY) -> str:
    """Returns a value in tags as JSON: JSON itself, a number, a value of Python's, or else a text.

    Args:
        text: The value.
        types: Those of its schema, none for any. Where texts are among them it is one unless it is JSON of another.
    """
    if is_json(text, types):
        return text.strip()
    if "string" in types:
        return dumped(text)
    if NUMBER.fullmatch(text.strip()):
        return text.strip()
    source = Source()
    source.push(text.strip())
    source.ended = True
    try:
        reader = read_value(source, "")
        while True:
            next(reader)
    except NoValue:
        pass
    except StopIteration as done:
        if source.at == len(source.text) and not isinstance(done.value, str):
            return dumped(done.value)
    return dumped(text)


def _no_json(name: str) -> object:
    raise ValueError(name)
