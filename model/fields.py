"""Typed access to a parsed JSON object, with errors that name the file and the key. Imports no torch."""

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from model.errors import CheckpointError

T = TypeVar("T")


class Fields:
    """A JSON object of this file. A key that holds null counts as missing. All methods raise CheckpointError."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.path}: {key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {key!r} is {value!r}, must be of type {kind.__name__}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        return self.get(key, bool, default)

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        if not 0 < value < math.inf:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be a number above 0")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be at least 1")
        return value

    def section(self, key: str) -> "Fields":
        """The object under this key, empty where there is none."""
        return Fields(self.path, self.get(key, dict, {}))

    def having(self, changes: dict[str, Any]) -> "Fields":
        """The same with other values for some keys."""
        return Fields(self.path, self.values | changes)

    def refuse(self, key: str, why: str) -> CheckpointError:
        """What to raise for a value that is not supported."""
        return CheckpointError(f"{self.path}: {key!r} is {self.values.get(key)!r}, {why}")


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is missing or holds no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is this a Hugging Face model directory?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values
