"""Reads values that a client sends as JSON, as text or as parameters of a request, each as its type.

The classes that hold the values check their ranges.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeGuard, TypeVar

from rpc.services.inference import pb
from scheduler.invalid import InvalidRequest

T = TypeVar("T")

MOST_BYTES = 2**18  # bytes of JSON: 2**20 of small lists took 80 ms of the event loop
MOST_VALUES = 256  # parameters of a request
LONGEST = 40  # characters of a number
INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
TRUTH = {"true": True, "1": True, "false": False, "0": False}


def read_json(name: str, data: bytes) -> object:
    """Parses JSON. Raises InvalidRequest of the field `name`."""
    if len(data) > MOST_BYTES:
        raise InvalidRequest(name, f"{len(data)} bytes", f"at most {MOST_BYTES} bytes of JSON")
    try:
        value: object = json.loads(data.decode(), parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, f"{len(data)} bytes", f"must be JSON: {error}") from None
    return value


def _no_json(constant: str) -> object:
    raise ValueError(f"{constant} is none")


def value_of(parameter: pb.InferParameter) -> object:
    """Returns the value of a parameter's message; None where none is set."""
    which = parameter.WhichOneof("parameter_choice")
    value: object = getattr(parameter, which) if which is not None else None
    return value


class Values:
    """Parameters of one request.

    Each is taken once, by its name; one that is absent or null gives the default. A taken value that is wrong raises
    InvalidRequest.

    Attributes:
        left: Parameters that were not taken.
    """

    def __init__(self, given: Mapping[str, object]) -> None:
        self.left = {name: value for name, value in given.items() if value is not None}

    def integer(self, name: str, default: T) -> int | T:
        value = self.left.pop(name, None)
        return default if value is None else _integer(name, value)

    def number(self, name: str, default: T) -> float | T:
        value = self.left.pop(name, None)
        return default if value is None else _number(name, value)

    def truth(self, name: str, default: bool) -> bool:
        value = self.left.pop(name, None)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        found = TRUTH.get(str(value).lower()) if isinstance(value, int | str) else None
        if found is None:
            raise _refused(name, value, "must be true or false")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """Takes a list of texts: a string alone is one text, or a list of them as JSON. None is an empty list."""
        value = self.left.pop(name, [])
        if isinstance(value, str) and value.startswith("["):
            with suppress(InvalidRequest):
                listed = read_json(name, value.encode(errors="replace"))
                value = listed if listed and _are_texts(listed) else value
        texts = [value] if isinstance(value, str) else value
        if not _are_texts(texts):
            raise _refused(name, value, "must be a string or a list of strings")
        return tuple(texts)

    def integers(self, name: str) -> tuple[int, ...] | None:
        """Takes a list of integers. A string is a list as JSON."""
        value = self._nested(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise _refused(name, value, "must be a list of whole numbers")
        if all(type(one) is int for one in value):
            return tuple(value)
        return tuple(_integer(f"{name}[{i}]", one) for i, one in enumerate(value))

    def pairs(self, name: str) -> tuple[tuple[int, float], ...]:
        """Takes the pairs of an object whose keys are whole numbers, sorted by key. A string is an object as JSON."""
        value = self._nested(name)
        if value is None:
            return ()
        if not isinstance(value, dict):
            raise _refused(name, value, "must be an object of numbers by token id")
        return tuple(sorted((_integer(name, key), _number(f"{name}[{key[:LONGEST]}]", value[key])) for key in value))

    def constraint(self, name: str) -> dict[str, object]:
        """Takes an object, without what is null or false in it. A string is one as JSON."""
        value = self._nested(name)
        if not isinstance(value, dict | None):
            raise _refused(name, value, "must be an object")
        return {key: one for key, one in (value or {}).items() if one is not None and one is not False}

    def _nested(self, name: str) -> object:
        value = self.left.pop(name, None)
        return read_json(name, value.encode(errors="replace")) if isinstance(value, str) else value


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _refused(name: str, value: object, reason: str) -> InvalidRequest:
    shown = f"a {type(value).__name__}" if isinstance(value, list | dict) else value  # they may be nested too deep
    return InvalidRequest(name, shown, reason)


def _integer(name: str, value: object) -> int:
    if isinstance(value, str) and INTEGER.fullmatch(value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _refused(name, value, "must be a whole number")


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool) and len(str(value)) <= LONGEST:
            return float(value)
    except ValueError:
        pass
    raise _refused(name, value, "must be a number")
