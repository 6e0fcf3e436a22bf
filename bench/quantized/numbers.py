"""Numbers of few bits in numpy: integers in words, and float8."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]


def pack_words(integers: Array, bits: int) -> Array:
    """integers: [n, count], from -2 ** (bits - 1). Returns int32 [n, words], the first in the lowest bits."""
    a_word = 32 // bits
    count = integers.shape[1]
    words = np.zeros((len(integers), -(-count // a_word)), dtype=np.uint32)
    for place in range(count):
        shifted = (integers[:, place] + 2 ** (bits - 1)).astype(np.uint32) << np.uint32(bits * (place % a_word))
        words[:, place // a_word] |= shifted
    return words.view(np.int32)


def decode_e4m3(byte: int) -> float:
    """A sign, 4 bits of exponent with a bias of 7, 3 of mantissa; no infinities (Micikevicius et al., 2022)."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


E4M3 = np.array([decode_e4m3(byte) for byte in range(256)])
_UP = np.array(sorted(range(0x7F), key=lambda byte: E4M3[byte]))  # bytes of the numbers from 0 to 448


def encode_e4m3(numbers: Array) -> Array:
    """The byte of the nearest number; of two, the one with an even mantissa. Beyond 448: 448."""
    wide = np.abs(numbers).astype(np.float64).clip(max=448.0)
    above = np.searchsorted(E4M3[_UP], wide).clip(max=len(_UP) - 1)
    below = (above - 1).clip(min=0)
    up, down = E4M3[_UP][above] - wide, wide - E4M3[_UP][below]
    nearest = np.where((up < down) | ((up == down) & (_UP[above] % 2 == 0)), above, below)
    return (_UP[nearest] | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)


def as_tensor(values: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def as_float8(values: Array) -> Tensor:
    return as_tensor(values).view(torch.float8_e4m3fn)


def blocks_of(shape: Sequence[int], rows: int, columns: int) -> list[tuple[int, int, tuple[slice, slice]]]:
    """The place of each block's scale, and the block. The last ones may be smaller."""
    return [
        (i, j, (slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)))
        for i in range(-(-shape[0] // rows))
        for j in range(-(-shape[1] // columns))
    ]
