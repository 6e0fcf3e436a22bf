"""What ranks send each other over a socket: frames of one kind of message each, made of arrays or of JSON.

A frame is the number of its bytes (uint32), its kind (uint8), its bytes. Arrays in it: how many there are (uint8), for
each dtype and dimensions (uint8) and their sizes (uint32), then their bytes, each from a multiple of 8 on. All numbers
are little-endian. Nothing here makes an object of what it reads but numbers, arrays and text.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 1  # changes with any of this
MOST_BYTES = 2**30  # of a step: its features of images are the largest
MOST_WORDS = 2**16  # of what is said in JSON

DTYPES = tuple(np.dtype(name) for name in ("<i4", "<i8", "<f4"))
MOST_DIMENSIONS = 3
FRAME, COUNT, ARRAY, SIZE = struct.Struct("<IB"), struct.Struct("<B"), struct.Struct("<BB"), struct.Struct("<I")


class WireError(ValueError):
    """Bytes that no Quire of this version sends."""


class Kind(IntEnum):
    """HELLO: a rank's token and who it is. WELCOME, REFUSED: the answer. SAID: its part of what all tell each other;
    HEARD: everybody's. STEP, COPY, POISON, SAVE, LOAD: work for followers. LOST: pages that a LOAD did not find.
    FAILED: the last words of a rank.
    """

    HELLO, WELCOME, REFUSED, SAID, HEARD, STEP, COPY, POISON, SAVE, LOAD, LOST, FAILED = range(1, 13)


def send(to: socket.socket, kind: Kind, content: bytes = b"") -> None:
    """Raises OSError."""
    to.sendall(FRAME.pack(len(content), kind) + content)


def receive(source: socket.socket, most: int = MOST_BYTES) -> tuple[Kind, bytearray] | None:
    """The next frame; None where the other side has ended. Raises WireError for one of more than `most` bytes or of no
    kind, and for one that is cut off; OSError.
    """
    head = _exactly(source, FRAME.size)
    if not head:
        return None
    size, kind = FRAME.unpack(head)
    if size > most:
        raise WireError(f"a message has {size} bytes, at most {most} are due")
    try:
        known = Kind(kind)
    except ValueError:
        raise WireError(f"a message is of kind {kind}, which there is not") from None
    content = _exactly(source, size)
    if len(content) < size:
        raise WireError(f"a message of {size} bytes was cut off")
    return known, content


def _exactly(source: socket.socket, size: int) -> bytearray:
    """So many bytes; none where the other side ended before the first."""
    content = bytearray(size)
    view, have = memoryview(content), 0
    while have < size:
        got = source.recv_into(view[have:])
        if not got:
            if have:
                raise WireError(f"a message was cut off after {have} of {size} bytes")
            return bytearray()
        have += got
    return content


def pack_words(values: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps(values).encode()


def unpack_words(content: bytes | bytearray) -> Any:
    """Raises WireError."""
    try:
        return json.loads(content.decode())
    except ValueError:
        raise WireError("a message is no JSON") from None


def pack_arrays(*arrays: NDArray) -> bytes:
    """Of int32, int64 and float32, in up to three dimensions."""
    head, bodies = [COUNT.pack(len(arrays))], []
    for array in arrays:
        head.append(ARRAY.pack(DTYPES.index(array.dtype), array.ndim))
        head += [SIZE.pack(size) for size in array.shape]
        bodies.append(_padded(np.ascontiguousarray(array).tobytes()))
    return b"".join([_padded(b"".join(head)), *bodies])


def unpack_arrays(content: bytearray) -> list[NDArray]:
    """They lie in `content`. Raises WireError."""
    try:
        (count,), at, shapes = COUNT.unpack_from(content), COUNT.size, []
        for _ in range(count):
            code, dimensions = ARRAY.unpack_from(content, at)
            at += ARRAY.size
            if code >= len(DTYPES) or dimensions > MOST_DIMENSIONS:
                raise WireError(f"an array is of dtype {code} and has {dimensions} dimensions")
            sizes = [SIZE.unpack_from(content, at + SIZE.size * i)[0] for i in range(dimensions)]
            at += SIZE.size * dimensions
            shapes.append((DTYPES[code], sizes))
    except struct.error:
        raise WireError("the head of a message of arrays was cut off") from None
    arrays, at = [], _multiple(at)
    for dtype, sizes in shapes:
        numbers = 1
        for size in sizes:
            numbers *= size
        if at + numbers * dtype.itemsize > len(content):
            raise WireError(f"an array of {sizes} x {dtype} does not fit in a message of {len(content)} bytes")
        arrays.append(np.frombuffer(content, dtype, numbers, at).reshape(sizes))
        at = _multiple(at + numbers * dtype.itemsize)
    if at != len(content):
        raise WireError(f"a message has {len(content)} bytes, its arrays {at}")
    return arrays


def _multiple(size: int) -> int:
    return -(-size // 8) * 8


def _padded(content: bytes) -> bytes:
    return content.ljust(_multiple(len(content)), b"\0")
