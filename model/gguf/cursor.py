"""Reads values of a GGUF file one after the other, none beyond the end of the file. Imports no torch."""

import struct
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path

from model.errors import CheckpointError, named

MOST_HEADER = 64 * 2**20  # bytes of metadata and tensor table; a vocabulary of 256,000 with its merges has 15 MiB
MOST_COUNT = 2**22  # elements of an array; no vocabulary has more
TEXT, ARRAY = 8, 9

SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"),
    4: struct.Struct("<I"), 5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"),
    10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d"),
}  # fmt: skip
"""Types of values of a fixed size, by their number in the file; 7 is a truth value."""

BOOL = 7
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Array:
    """An array of metadata, which stays in the file until it is asked for.

    Attributes:
        kind: Type of the elements, a key of `SCALARS` or `TEXT`.
        count: The number of elements.
        start: Place of the first element in the file.
    """

    kind: int
    count: int
    start: int


class Cursor:
    """A place in a mapped file. All methods raise CheckpointError for a value that reaches beyond the file."""

    def __init__(self, path: Path, data: mmap, place: int = 0) -> None:
        self.path, self.data, self.place = path, data, place
        self._end = min(len(data), MOST_HEADER)

    def number(self, form: struct.Struct, what: str) -> int | float:
        """Reads a number; `what` names it in errors."""
        start = self._pass(form.size, what)
        value: int | float = form.unpack_from(self.data, start)[0]
        return value

    def count(self, form: struct.Struct, what: str, most: int) -> int:
        """Reads a count of at most `most`."""
        value = int(self.number(form, what))
        if value > most:
            raise CheckpointError(f"{self.path}: {what} is {value}, may be at most {most}")
        return value

    def text(self, what: str, most: int = MOST_HEADER) -> str:
        """Reads a text of at most `most` bytes."""
        length = self.count(LENGTH, f"the length of {what}", most)
        start = self._pass(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is no text in UTF-8: {error}") from None

    def value(self, kind: int, key: str) -> bool | int | float | str | Array:
        """Reads a value of metadata. Arrays are passed."""
        if kind == TEXT:
            return self.text(named(repr(key)))
        if kind == ARRAY:
            return self._array(key)
        if kind not in SCALARS:
            raise CheckpointError(f"{self.path}: {named(repr(key))} has the value type {kind}, which no GGUF file has")
        if kind == BOOL and (raw := self.data[self.place : self.place + 1]) not in (b"", b"\0", b"\1"):
            raise CheckpointError(f"{self.path}: {named(repr(key))} is {raw[0]}, must be a truth value, 0 or 1")
        return self.number(SCALARS[kind], named(repr(key)))

    def _array(self, key: str) -> Array:
        what = named(repr(key))
        kind = int(self.number(SCALARS[4], f"the element type of {what}"))
        count = self.count(LENGTH, f"the number of elements of {what}", MOST_COUNT)
        start = self.place
        if kind == TEXT:
            self._pass_texts(count, what)
        elif kind in SCALARS:
            self._pass(count * SCALARS[kind].size, what)
        else:
            nested = "are arrays, which is not supported" if kind == ARRAY else f"have the unknown type {kind}"
            raise CheckpointError(f"{self.path}: the elements of {what} {nested}")
        return Array(kind, count, start)

    def _pass_texts(self, count: int, what: str) -> None:
        place, end, unpack, data = self.place, self._end, LENGTH.unpack_from, self.data
        for index in range(count):
            if place + 8 > end:
                raise self._beyond(f"element {index} of {what}")
            place += 8 + unpack(data, place)[0]
        if place > end:
            raise self._beyond(what)
        self.place = place

    def _pass(self, size: int, what: str) -> int:
        """Moves on by `size` bytes. Returns the place before."""
        start = self.place
        if size > self._end - start:
            raise self._beyond(what)
        self.place = start + size
        return start

    def _beyond(self, what: str) -> CheckpointError:
        if self._end < len(self.data):
            return CheckpointError(
                f"{self.path}: {what} lies beyond the first {MOST_HEADER} bytes, which is the most that metadata and "
                "tensor table may have"
            )
        return CheckpointError(
            f"{self.path} ends at byte {self._end}, inside {what}: was the download cut off, or is it damaged?"
        )
