"""Parses a GGUF file: metadata and tensor table, each count, length and offset checked. Imports no torch.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md: a magic number and a version, metadata
as typed values by key, a table of tensors, then their data from an aligned place on. Files are mapped, not read.
"""

import math
from dataclasses import dataclass
from mmap import ACCESS_COPY, mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.errors import CheckpointError, named, shown
from model.files import open_regular
from model.gguf.cursor import LENGTH, SCALARS, Array, Cursor
from model.gguf.metadata import Metadata
from model.gguf.types import OTHERS, TYPES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS, LONGEST_KEY = 65_536, 65_535
MOST_TENSORS, LONGEST_NAME = 100_000, 256  # as `model.weights.MOST_TENSORS`; ggml's own names have 63 bytes
MOST_DIMENSIONS, MOST_ELEMENTS = 4, 2**42
ALIGNMENT, MOST_ALIGNMENT = 32, 2**16
U32 = SCALARS[4]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file.

    Attributes:
        name: Name in the file.
        type: Type of its elements.
        shape: Shape, outputs first; the file has it the other way round.
        start: Place of its data in the file.
        file: The file.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    start: int
    file: "GGUFFile"

    @property
    def row_bytes(self) -> int:
        """Bytes of a run of elements in the last dimension."""
        return self.shape[-1] // self.type.block * self.type.size

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def bytes(self) -> NDArray[np.uint8]:
        """Returns a view of the data, [..., bytes of a row] uint8. A write to it does not reach the file."""
        flat = np.frombuffer(self.file.data, np.uint8, self.nbytes, self.start)
        return flat.reshape(*self.shape[:-1], self.row_bytes)


class GGUFFile:
    """One mapped file.

    Attributes:
        path: The file.
        data: Its bytes.
        metadata: Its metadata.
        tensors: Its tensors by name.
        header: Bytes of metadata and tensor table.
    """

    def __init__(self, path: Path) -> None:
        """Maps and parses a file. Raises CheckpointError."""
        self.path, self.data = path, _mapped(path)
        cursor = Cursor(path, self.data)
        _check_version(cursor)
        tensors = cursor.count(LENGTH, "the number of tensors", MOST_TENSORS)
        keys = cursor.count(LENGTH, "the number of metadata values", MOST_KEYS)
        self.metadata = Metadata(path, self.data, _read_values(cursor, keys))
        self.tensors = _read_tensors(cursor, tensors, self)
        self.header = cursor.place


def _mapped(path: Path) -> mmap:
    try:
        with open_regular(path) as file:
            # Copies of pages that are written to: torch has no tensors that cannot be written to.
            return mmap(file.fileno(), 0, access=ACCESS_COPY)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be mapped: {error}") from None


def _check_version(cursor: Cursor) -> None:
    path, magic = cursor.path, cursor.data[:4]
    if magic != MAGIC:
        raise CheckpointError(f"{path} begins with {shown(magic)}, not with {MAGIC!r}: it is no GGUF file")
    cursor.place = len(MAGIC)
    version = int(cursor.number(U32, "the version"))
    if version in VERSIONS:
        return
    if version == 1:
        raise CheckpointError(f"{path} is GGUF version 1, served are 2 and 3: convert it with a newer llama.cpp")
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise CheckpointError(f"{path} is a big-endian GGUF file, served are little-endian ones: convert it")
    raise CheckpointError(f"{path} is GGUF version {version}, served are 2 and 3")


def _read_values(cursor: Cursor, count: int) -> dict[str, bool | int | float | str | Array]:
    values: dict[str, bool | int | float | str | Array] = {}
    for index in range(count):
        key = cursor.text(f"key {index} of the metadata", LONGEST_KEY)
        if key in values:
            raise CheckpointError(f"{cursor.path}: {named(repr(key))} stands twice in the metadata")
        kind = int(cursor.number(U32, f"the type of {named(repr(key))}"))
        values[key] = cursor.value(kind, key)
    return values


def _read_tensors(cursor: Cursor, count: int, file: GGUFFile) -> dict[str, TensorInfo]:
    described = [_read_tensor(cursor, index) for index in range(count)]
    alignment = file.metadata.fields.get("general.alignment", int, ALIGNMENT)
    if not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
        raise file.metadata.fields.refuse("general.alignment", f"must be a power of two in [8, {MOST_ALIGNMENT}]")
    first, tensors = -(-cursor.place // alignment) * alignment, {}
    for name, kind, shape, offset in described:
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: the tensor {named(name)} stands twice in the table")
        if offset % alignment:
            raise CheckpointError(
                f"{cursor.path}: the tensor {named(name)} is at {offset}, must be at a multiple of {alignment}"
            )
        tensors[name] = TensorInfo(name, kind, shape, first + offset, file)
    _check_places(cursor, tensors)
    return tensors


def _read_tensor(cursor: Cursor, index: int) -> tuple[str, TensorType, tuple[int, ...], int]:
    """Reads name, type, shape and offset of a tensor."""
    name = cursor.text(f"the name of tensor {index}", LONGEST_NAME)
    what = f"tensor {named(name)}"
    dimensions = cursor.count(U32, f"the number of dimensions of {what}", MOST_DIMENSIONS)
    sizes = [int(cursor.number(LENGTH, f"a dimension of {what}")) for _ in range(dimensions)]
    kind, offset = int(cursor.number(U32, f"the type of {what}")), int(cursor.number(LENGTH, f"the offset of {what}"))
    if not sizes or min(sizes) < 1 or math.prod(sizes) > MOST_ELEMENTS:
        raise CheckpointError(
            f"{cursor.path}: {what} has the shape {sizes}, must have 1 to {MOST_DIMENSIONS} dimensions above 0 and at "
            f"most {MOST_ELEMENTS} elements"
        )
    if kind not in TYPES:
        served = ", ".join(one.name for one in TYPES.values())
        said = OTHERS.get(kind, f"number {kind}")
        raise CheckpointError(f"{cursor.path}: {what} is of type {said}, which is not served; served are {served}")
    form = TYPES[kind]
    if sizes[0] % form.block:
        raise CheckpointError(
            f"{cursor.path}: {what} has rows of {sizes[0]} elements, {form.name} stores blocks of {form.block}"
        )
    return name, form, tuple(reversed(sizes)), offset


def _check_places(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    """Raises CheckpointError where a tensor reaches beyond the file, or into another one."""
    end, before = 0, ""
    for one in sorted(tensors.values(), key=lambda one: one.start):
        if one.start + one.nbytes > len(cursor.data):
            raise CheckpointError(
                f"{cursor.path}: tensor {named(one.name)} ends at byte {one.start + one.nbytes}, the file at "
                f"{len(cursor.data)}: was the download cut off?"
            )
        if one.start < end:
            raise CheckpointError(
                f"{cursor.path}: tensor {named(one.name)} begins at byte {one.start}, inside {named(before)}, which "
                f"ends at {end}"
            )
        end, before = one.start + one.nbytes, one.name
