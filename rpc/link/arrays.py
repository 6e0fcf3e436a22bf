"""Arrays in the link's messages: packed little-endian bytes."""

import numpy as np
from numpy.typing import DTypeLike, NDArray

UINT8, INT32, INT64, FLOAT32 = np.dtype("u1"), np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


class LinkError(ValueError):
    """A message that no Quire of this version sends."""


def packed(array: NDArray, dtype: DTypeLike) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def unpacked(data: bytes, dtype: np.dtype, count: int | None, name: str) -> NDArray:
    """Returns a read-only array over the bytes of a message.

    Args:
        data: Little-endian elements.
        dtype: Type of the elements.
        count: Count of elements that there have to be; None: any count.
        name: Name of the array, for the error.

    Raises:
        LinkError: The bytes are no such array.
    """
    if len(data) % dtype.itemsize or (count is not None and len(data) != count * dtype.itemsize):
        raise LinkError(f"{name} has {len(data)} bytes, {count if count is not None else 'n'} x {dtype} are due")
    return np.frombuffer(data, dtype)
