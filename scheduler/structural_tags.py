"""Structural tags: free text until a trigger, then constrained content up to an end marker, then free text again.

Clients write them in one of two forms. The older one of vLLM has `structures` and `triggers`; the newer one of XGrammar
has a `format`, of which `triggered_tags` is kept. Both give the same tags.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from scheduler.invalid import InvalidRequest, require

TYPE, FORMAT, SHOWN_KEYS = "structural_tag", "triggered_tags", 40
MOST_TAGS, MOST_TRIGGERS = 256, 64
CONTENTS = {"json_schema": "json_schema", "regex": "pattern", "grammar": "grammar", "any_text": ""}
"""Kinds of content, and the key that has it."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "type": ("tag",), "excludes": ([],), "style": ("json",), "any_order": (False,),
}  # fmt: skip
"""Keys that say nothing where they have one of these values; with any other they are refused."""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag that an output may have.

    Attributes:
        begin: Text that begins it.
        end: Text that ends it.
        kind: Kind of its content, one of `CONTENTS`.
        text: A JSON schema, a regular expression or a grammar; "" for any text.
        place: The client's name of the tag.
        key: Name of its content within it.
        trigger: Text at the front of `begin`, behind which the output must go on as a tag.
    """

    begin: str
    end: str
    kind: str
    text: str
    place: str
    key: str
    trigger: str = ""

    @property
    def field(self) -> str:
        """The client's name of the content."""
        return f"{self.place}.{self.key}"


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Tags of an output, and where they may stand.

    Attributes:
        tags: At least one. No `begin` is the beginning of another one.
        at_least_one: The output begins with a tag.
        stop_after_first: The output ends with its first tag.
    """

    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False


def read_tags(text: str, name: str) -> StructuralTags:
    """Reads what a client wrote.

    Args:
        text: JSON of it.
        name: The client's name of it.

    Raises:
        InvalidRequest: It is malformed, says something that is not supported, or cannot be kept. Names the field.
    """
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
        return _read(value, name)
    except InvalidRequest:
        raise
    except UnicodeEncodeError:
        raise InvalidRequest(name, text, "has a lone surrogate, which is no character") from None
    except RecursionError:
        raise InvalidRequest(name, text, "is nested too deeply") from None
    except ValueError as error:
        raise InvalidRequest(name, text, f"is no JSON: {error}") from None


def _read(value: Any, name: str) -> StructuralTags:
    _check_object(value, name)
    require(value.get("type", TYPE) == TYPE, f"{name}.type", value.get("type"), f"must be {TYPE}")
    if "format" in value:
        _check_keys(value, name, ("type", "format"))
        return _newer(value["format"], f"{name}.format")
    _check_keys(value, name, ("type", "structures", "triggers"))
    listed = _list(value, "structures", name, MOST_TAGS)
    tags = [_older_tag(one, f"{name}.structures[{i}]") for i, one in enumerate(listed)]
    return StructuralTags(_triggered(value, name, "structures", tags))


def _newer(value: Any, name: str) -> StructuralTags:
    _check_object(value, name)
    kind = value.get("type")
    require(kind == FORMAT, f"{name}.type", kind, f"is not supported: {FORMAT} is")
    _check_keys(value, name, ("type", "triggers", "tags", "at_least_one", "stop_after_first"))
    listed = _list(value, "tags", name, MOST_TAGS)
    tags = [_newer_tag(one, f"{name}.tags[{i}]") for i, one in enumerate(listed)]
    flags = {}
    for flag in ("at_least_one", "stop_after_first"):
        flags[flag] = value.get(flag, False)
        require(isinstance(flags[flag], bool), f"{name}.{flag}", flags[flag], "must be true or false")
    return StructuralTags(_triggered(value, name, "tags", tags), **flags)


def _older_tag(value: Any, name: str) -> Tag:
    _check_object(value, name)
    _check_keys(value, name, ("begin", "schema", "end"))
    begin, end = _text(value, "begin", name), _text(value, "end", name)
    return Tag(begin, end, "json_schema", _schema(value.get("schema"), f"{name}.schema"), name, "schema")


def _newer_tag(value: Any, name: str) -> Tag:
    _check_object(value, name)
    _check_keys(value, name, ("begin", "content", "end"))
    begin, end = _text(value, "begin", name), _text(value, "end", name)
    content, field = value.get("content"), f"{name}.content"
    _check_object(content, field)
    kind = content.get("type")
    known = isinstance(kind, str) and kind in CONTENTS
    require(known, f"{field}.type", kind, f"is not supported: {', '.join(CONTENTS)} are")
    key = CONTENTS[kind]
    _check_keys(content, field, ("type", key) if key else ("type",))
    if not key:
        return Tag(begin, end, kind, "", name, "content")
    made = _schema(content.get(key), f"{field}.{key}") if kind == "json_schema" else _text(content, key, field)
    return Tag(begin, end, kind, made, name, f"content.{key}")


def _triggered(value: Mapping[str, Any], name: str, key: str, tags: Sequence[Tag]) -> tuple[Tag, ...]:
    """Returns tags with their triggers, once triggers and beginnings are found to be unambiguous.

    The shorter of two triggers counts where one is the beginning of the other, as it comes first in any output.
    """
    listed = _list(value, "triggers", name, MOST_TRIGGERS)
    for i, trigger in enumerate(listed):
        allowed = isinstance(trigger, str) and trigger
        require(allowed, f"{name}.triggers[{i}]", trigger, "must be a text, and not empty")
    first = [one for one in listed if not any(one != other and one.startswith(other) for other in listed)]
    for i, trigger in enumerate(listed):
        inner = next((one for one in first if trigger in first and trigger.find(one, 1) > 0), None)
        says = f"has the trigger {inner!r:.60} within it, behind which it could not go on"
        require(inner is None, f"{name}.triggers[{i}]", trigger, says)
        begun = any(tag.begin.startswith(trigger) for tag in tags)
        says = f"begins no tag: the begin of one of {key} must start with it"
        require(begun, f"{name}.triggers[{i}]", trigger, says)
    made = []
    for i, tag in enumerate(tags):
        trigger = next((one for one in first if tag.begin.startswith(one)), None)
        says = "starts with none of the triggers, so that it could never be written"
        if trigger is None:
            raise InvalidRequest(f"{name}.{key}[{i}].begin", tag.begin, says)
        made.append(replace(tag, trigger=trigger))
    order = sorted(range(len(tags)), key=lambda i: (tags[i].begin, i))
    for one, other in pairwise(order):
        says = f"starts with the begin of {key}[{one}], so that an output could be read as either"
        distinct = not tags[other].begin.startswith(tags[one].begin)
        require(distinct, f"{name}.{key}[{other}].begin", tags[other].begin, says)
    return tuple(made)


def _check_object(value: Any, name: str) -> None:
    require(isinstance(value, dict), name, value, "must be a JSON object")


def _check_keys(value: Mapping[str, Any], name: str, known: Sequence[str]) -> None:
    for key, given in value.items():
        if key not in known and not (key in NEUTRAL and given in NEUTRAL[key]):
            other = f" but {NEUTRAL[key][0]!r}" if key in NEUTRAL else f": {', '.join(known)} are"
            raise InvalidRequest(f"{name}.{key[:SHOWN_KEYS]}", given, f"is not supported{other}")


def _list(value: Mapping[str, Any], key: str, name: str, most: int) -> list[Any]:
    listed = value.get(key)
    if not isinstance(listed, list) or not listed:
        raise InvalidRequest(f"{name}.{key}", listed, "must be a list of at least one")
    require(len(listed) <= most, f"{name}.{key}", f"{len(listed)} of them", f"at most {most}")
    return listed


def _text(value: Mapping[str, Any], key: str, name: str) -> str:
    text = value.get(key)
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{name}.{key}", text, "must be a text, and not empty")
    return text


def _schema(value: Any, name: str) -> str:
    """Returns a schema as JSON. It may be given as such too."""
    if isinstance(value, str) and value:
        return value
    require(isinstance(value, dict), name, value, "must be a JSON schema, an object; as a schema true means {}")
    return json.dumps(value, ensure_ascii=False)
