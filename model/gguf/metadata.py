"""Typed access to the metadata of a GGUF file, with errors that name the file and the key. Imports no torch."""

from collections.abc import Mapping
from mmap import mmap
from pathlib import Path

import numpy as np

from model.errors import CheckpointError, named
from model.fields import Fields
from model.gguf.cursor import BOOL, LENGTH, SCALARS, TEXT, Array

FLOATS = (6, 12)


class Metadata:
    """The metadata of a file.

    Attributes:
        path: The file.
        fields: Values that are no arrays.
    """

    def __init__(self, path: Path, data: mmap, values: Mapping[str, bool | int | float | str | Array]) -> None:
        self.path, self._data = path, data
        self._arrays = {key: value for key, value in values.items() if isinstance(value, Array)}
        self.fields = Fields(path, {key: value for key, value in values.items() if key not in self._arrays})

    def __contains__(self, key: str) -> bool:
        return key in self._arrays or key in self.fields

    def texts(self, key: str) -> list[str]:
        """Returns an array of texts. Raises CheckpointError."""
        array = self._array(key, "texts")
        if array.kind != TEXT:
            raise self._refuse(key, "texts")
        made, place, unpack, data = [], array.start, LENGTH.unpack_from, self._data
        for index in range(array.count):
            start, length = place + 8, unpack(data, place)[0]
            place = start + length
            try:
                made.append(data[start:place].decode())
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{self.path}: element {index} of {key!r} is no UTF-8: {error}") from None
        return made

    def floats(self, key: str) -> list[float]:
        """Returns an array of finite numbers. Raises CheckpointError."""
        array = self._array(key, "numbers")
        if array.kind not in FLOATS:
            raise self._refuse(key, "numbers")
        values = np.frombuffer(self._data, np.dtype(SCALARS[array.kind].format), array.count, array.start)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{self.path}: {key!r} has a number that is infinite or no number")
        made: list[float] = values.tolist()
        return made

    def integers(self, key: str) -> list[int]:
        """Returns an array of integers. Raises CheckpointError."""
        array = self._array(key, "integers")
        if array.kind in (TEXT, BOOL, *FLOATS):
            raise self._refuse(key, "integers")
        made: list[int] = np.frombuffer(
            self._data, np.dtype(SCALARS[array.kind].format), array.count, array.start
        ).tolist()
        return made

    def flags(self, key: str) -> list[bool]:
        """Returns an array of truth values. Raises CheckpointError."""
        array = self._array(key, "truth values")
        if array.kind != BOOL:
            raise self._refuse(key, "truth values")
        return [byte != 0 for byte in self._data[array.start : array.start + array.count]]

    def count(self, key: str, default: int | None = None) -> int:
        """Returns a count. An array, which has one for each layer, must have the same in all layers."""
        if key not in self._arrays:
            return self.fields.positive(key, default)
        values = set(self.integers(key))
        if len(values) != 1:
            raise CheckpointError(f"{self.path}: {key!r} differs between layers, which is not supported")
        return Fields(self.path, {key: values.pop()}).positive(key)

    def _array(self, key: str, what: str) -> Array:
        if key not in self:
            raise CheckpointError(f"{self.path}: {key!r} is missing")
        if key not in self._arrays:
            raise self._refuse(key, what)
        return self._arrays[key]

    def _refuse(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {named(repr(key))} must be an array of {what}")
