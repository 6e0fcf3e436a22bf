"""Frames that ranks send over sockets, made of arrays or of JSON.

A frame is the number of its bytes (uint32), its kind (uint8), its bytes. Arrays in it begin with their number (uint8).
For each follow its dtype and dimensions (uint8) and its sizes (uint32). Then come their bytes, each array at a multiple
of 8. All numbers are little-endian. Reading makes numbers, arrays and text, and no other objects.
"""

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMAT = 4  # changes with any of these formats
MOST_BYTES = 2**30  # bytes of a step's frame: its features of images are the largest
MOST_WORDS = 2**16  # bytes of JSON

DTYPES = tuple(np.dtype(name) for name in ("<i4", "<i8", "<f4", "<i2"))
MOST_DIMENSIONS = 3
FRAME, COUNT, ARRAY, SIZE = struct.Struct("<IB"), struct.Struct("<B"), struct.Struct("<BB"), struct.Struct("<I")


class WireError(ValueError):
    """Bytes that no Quire of this version sends."""


class FrameKind(IntEnum):
    """Kinds of frames."""

    HELLO = 1  # follower: the group's token, its rank and the facts that must agree
    WELCOME = 2  # rank 0: the collective to join
    REFUSED = 3  # rank 0: why the follower is refused
    SAID = 4  # follower: its part of an exchange
    HEARD = 5  # rank 0: all parts of an exchange
    STEP = 6  # rank 0: a forward pass, no answer
    COPY = 7  # rank 0: pages to copy, answered by LOST
    POISON = 8  # rank 0: pages to fill with NaN, no answer
    SAVE = 9  # rank 0: pages to save in the host tier, no answer
    LOAD = 10  # rank 0: pages to load, answered by LOST
    LOST = 11  # follower: pages that a COPY or a LOAD did not fill
    FAILED = 12  # follower: why it ends


def send(to: socket.socket, kind: FrameKind, content: bytes = b"") -> None:
    """Sends a frame. Raises OSError."""
    to.sendall(FRAME.pack(len(content), kind) + content)


def receive(source: socket.socket, most: int = MOST_BYTES) -> tuple[FrameKind, bytearray] | None:
    """Receives the next frame. None where the other side has closed the connection.

    Raises:
        WireError: The frame has more than `most` bytes, an unknown kind, or is cut off.
        OSError: The connection failed.
    """
    head = _exactly(source, FRAME.size)
    if not head:
        return None
    size, kind = FRAME.unpack(head)
    if size > most:
        raise WireError(f"a message has {size} bytes, at most {most} are due")
    try:
        known = FrameKind(kind)
    except ValueError:
        raise WireError(f"a message is of kind {kind}, which there is not") from None
    content = _exactly(source, size)
    if len(content) < size:
        raise WireError(f"a message of {size} bytes was cut off")
    return known, content


def _exactly(source: socket.socket, size: int) -> bytearray:
    """Receives `size` bytes; none where the other side closed the connection before the first."""
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
    """Parses JSON. Raises WireError."""
    try:
        return json.loads(content.decode())
    except ValueError:
        raise WireError("a message is no JSON") from None


def pack_arrays(*arrays: NDArray) -> bytes:
    """Packs arrays of int16, int32, int64 and float32, in up to three dimensions."""
    head, bodies = [COUNT.pack(len(arrays))], []
    for array in arrays:
        head.append(ARRAY.pack(DTYPES.index(array.dtype), array.ndim))
        head += [SIZE.pack(size) for size in array.shape]
        bodies.append(_padded(np.ascontiguousarray(array).tobytes()))
    return b"".join([_padded(b"".join(head)), *bodies])


def unpack_arrays(content: bytearray) -> list[NDArray]:
    """Unpacks arrays, without copying: they refer to `content`. Raises WireError."""
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
