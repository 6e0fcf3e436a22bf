"""Arrays in the link's messages: packed little-endian bytes."""

import numpy as np
from numpy.typing import DTypeLike, NDArray

UINT8, INT32, INT64, FLOAT32 = np.dtype("u1"), np.dtype("<i4"), np.dtype("<i8"), np.dtype("<f4")


class LinkError(ValueError):
    """A message that no Quire of this version sends."""


def packed(array: NDArray, dtype: DTypeLike) -> bytes:
    return np.ascontiguousarray(array, dtype).tobytes()


def unpacked(data: bytes, dtype: np.dtype, count: int | None, name: str) -> NDArray:
    """count: how many elements there must be, if that is known. The array is read-only."""
    if len(data) % dtype.itemsize or (count is not None and len(data) != count * dtype.itemsize):
        raise LinkError(f"{name} has {len(data)} bytes, {count if count is not None else 'n'} x {dtype} are due")
    return np.frombuffer(data, dtype)
