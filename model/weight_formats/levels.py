"""The numbers that stored integers stand for, and how integers of 2 to 8 bits are packed into bytes."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Levels:
    """Numbers that stored integers stand for, before scales.

    Attributes:
        name: Name in the field, as int4 or e2m1.
        numbers: Number of each stored integer; 4, 8, 16, 32, 64 or 256 of them.
    """

    name: str
    numbers: tuple[float, ...]

    @property
    def bits(self) -> int:
        """Bits of a stored integer: 2, 3, 4, 5, 6 or 8."""
        return len(self.numbers).bit_length() - 1

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits of the parts that a stored integer is kept in, the lowest first: powers of two, which fill bytes."""
        return {3: (2, 1), 5: (4, 1), 6: (4, 2)}.get(self.bits, (self.bits,))

    @property
    def are_integers(self) -> bool:
        """Whether the levels are integers that follow each other."""
        return self.numbers == tuple(self.numbers[0] + i for i in range(len(self.numbers)))


def _float8() -> tuple[float, ...]:
    return tuple(torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().tolist())


def _integers(name: str, first: int, bits: int) -> Levels:
    return Levels(name, tuple(float(first + i) for i in range(1 << bits)))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UINT2 = _integers("uint2", 0, 2)
INT3 = _integers("int3", -4, 3)
INT4, UINT4 = _integers("int4", -8, 4), _integers("uint4", 0, 4)
INT5, UINT5 = _integers("int5", -16, 5), _integers("uint5", 0, 5)
INT6 = _integers("int6", -32, 6)
INT8 = _integers("int8", -128, 8)
E2M1 = Levels("e2m1", (*_E2M1, *(-number for number in _E2M1)))
E4M3 = Levels("e4m3", _float8())


def pack_values(values: Tensor, levels: Levels) -> Tensor:
    """Packs stored integers into bytes, the first in the lowest bits.

    Args:
        values: [out, in] uint8.
        levels: Levels of the integers, whose planes lie one behind the other.

    Returns:
        [out, bytes] uint8.
    """
    packed, shift = [], 0
    for bits in levels.planes:
        packed.append(_pack(values >> shift if shift else values, bits))
        shift += bits
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=1)


def unpack_values(packed: Tensor, levels: Levels, width: int) -> Tensor:
    """Undoes `pack_values`. Returns [out, width] uint8."""
    made, start, shift = torch.zeros((), dtype=torch.uint8, device=packed.device), 0, 0
    for bits in levels.planes:
        size = -(-width * bits // 8)
        plane = unpack_bits(packed[:, start : start + size], bits, width)
        made = plane << shift | made if shift else plane
        start, shift = start + size, shift + bits
    return made


def _pack(values: Tensor, bits: int) -> Tensor:
    """Packs the lowest bits of bytes: 8 / bits of them in each."""
    if bits == 8:
        return values
    each = 8 // bits
    parts = F.pad(values & (1 << bits) - 1, (0, -values.shape[1] % each)).unflatten(1, (-1, each))
    packed = parts[..., 0]
    for number in range(1, each):
        packed = packed | parts[..., number] << number * bits
    return packed


def unpack_bits(packed: Tensor, bits: int, width: int) -> Tensor:
    """Unpacks integers from bytes, those in the lowest bits first.

    Args:
        packed: [out, bytes] uint8.
        bits: 1, 2, 4 or 8.
        width: Integers of an output.

    Returns:
        [out, width] uint8.
    """
    if bits == 8:
        return packed
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=2).flatten(1)[:, :width]
