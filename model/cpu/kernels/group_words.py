"""Stored integers of weights in groups, as the kernels read them: packed words, and their decoding in registers.

A step has the inputs that fill whole words of all planes (`Levels.planes`). Of each plane it has the words of 32
outputs one after the other, a word of 32 bits for each. A word of w-bit integers has 32 / w inputs of an output: as
float32 takes them, in order; as pairs of bfloat16 do, the first inputs of pairs in the lower half, the second ones in
the upper. So one shift brings an input, or a pair, to the lowest bits, where a look-up in a register finds its number.

Integers of 3 bits have steps of 16 inputs, as large as the groups of Q3_K: a word of 2 bits, and half a word of single
bits. So outputs 16 apart share a word of those. Four bits of it belong to two neighbouring places of the words of 2
bits, two to each of the outputs, so that few operations join both planes to words of 4 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from llvmlite import ir
from torch import Tensor

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import EIGHT_BITS
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.values import FLOATS, INT16, INTS, LANES, Value
from model.weight_formats.levels import E4M3, INT8, Levels

WORD = 32  # bits
LOWER_PLANE = 0x33333333  # two bits of each four
WORDS = ir.VectorType(INT16, 2 * LANES)
SHIFTS_UP = 4  # bits of the first plane of 5 and 6 bits, above which the bits of the second go


@dataclass(frozen=True, slots=True)
class GroupWords:
    """Steps of stored integers.

    Attributes:
        element: Type that activations have; a stored integer's number is exact in it.
        levels: Numbers of the stored integers.
    """

    element: Element
    levels: Levels

    @property
    def inputs(self) -> int:
        """Inputs of a step, which is decoded at once."""
        if self.levels.bits == 8:
            return self.element.packed
        return WORD // 2 if self.levels.bits == 3 else WORD // min(self.levels.planes)

    @property
    def step(self) -> int:
        """Bytes of a step."""
        return PANEL * self.inputs * self.levels.bits // 8

    @property
    def words(self) -> int:
        """Words of 32 bits that a step has of an output, as the element."""
        return self.inputs // self.element.packed

    def laid(self, values: Tensor) -> Tensor:
        """Returns bytes in the order in which they are read.

        Args:
            values: [panels, 32, in] uint8.

        Returns:
            [panels, steps, bytes of a step].
        """
        steps = values.unflatten(2, (-1, self.inputs)).transpose(1, 2)  # [panels, steps, 32, inputs]
        if self.levels.bits == 8:
            return (steps ^ 128 if self.levels == INT8 else steps).transpose(2, 3).flatten(2)
        if self.levels.bits == 3:
            return torch.cat((self._plane(steps, 2), self._shared_plane(steps >> 2)), dim=2)
        planes, shift = [], 0
        for bits in self.levels.planes:
            planes.append(self._plane(steps >> shift if shift else steps, bits))
            shift += bits
        return torch.cat(planes, dim=2)

    def _plane(self, steps: Tensor, bits: int) -> Tensor:
        """Packs the lowest bits of integers. Returns [panels, steps, bytes]."""
        in_byte, each = 8 // bits, WORD // bits
        words = (steps & (1 << bits) - 1).unflatten(3, (-1, each))[..., self._order(each)].unflatten(4, (4, in_byte))
        packed = words[..., 0]
        for number in range(1, in_byte):
            packed = packed | words[..., number] << number * bits
        return packed.transpose(2, 3).flatten(2)  # a word of all outputs after the other

    def _shared_plane(self, steps: Tensor) -> Tensor:
        """Packs the lowest bits of 16 inputs, two outputs a word. Returns [panels, steps, bytes]."""
        bits = (steps & 1)[..., self._order(self.inputs)].unflatten(3, (-1, 2)).unflatten(2, (2, LANES))
        first, second = bits[:, :, 0], bits[:, :, 1]  # [panels, steps, 16, 8, 2]
        four = first[..., 0] | first[..., 1] << 1 | second[..., 0] << 2 | second[..., 1] << 3
        return (four[..., ::2] | four[..., 1::2] << 4).flatten(2)

    def _order(self, count: int) -> list[int]:
        """Returns the inputs of a word in the order of their bits."""
        return list(range(count)) if self.element == FLOAT else [*range(0, count, 2), *range(1, count, 2)]

    def decode(self, code: Code, address: Value, halves: Sequence[int]) -> list[list[Value]]:
        """Loads the step at an address: for each of its words a vector of the 16 outputs of each of these halves."""
        if self.levels.bits == 8:
            kind = EIGHT_BITS["int8" if self.levels == INT8 else "fp8"]
            return [[kind.words(code, self.element, address, PANEL, half * LANES) for half in halves]]
        if self.levels.bits == 3:
            joined = [_joined_planes(code, address, half) for half in halves]
            return [[self._of_places(code, _place(words, number)) for words in joined] for number in range(self.words)]
        loaded = [self._loaded(code, address + half * LANES * 4) for half in halves]
        return [[self._number(code, planes, number) for planes in loaded] for number in range(self.words)]

    def _loaded(self, code: Code, address: Value) -> list[list[Value]]:
        """Loads the words of 16 outputs, by plane."""
        planes, offset = [], 0
        for bits in self.levels.planes:
            count = self.inputs * bits // WORD
            planes.append([code.load(address, INTS, offset + word * PANEL * 4) for word in range(count)])
            offset += count * PANEL * 4
        return planes

    def _number(self, code: Code, planes: list[list[Value]], number: int) -> Value:
        """Decodes an input of 16 outputs, or a pair of them."""
        first, *others = self.levels.planes
        places = _moved(planes[0], first, number, self.element.packed, 0)
        if others:
            upper = _moved(planes[1], others[0], number, self.element.packed, SHIFTS_UP)
            low = self._everywhere((1 << first) - 1)
            places = places & low | upper & ~low
        return self._of_places(code, places)

    def _of_places(self, code: Code, places: Value) -> Value:
        """Returns the numbers of stored integers in the lowest bits of lanes; other bits are arbitrary."""
        if not code.has_pairs or self._is_computed:
            return self._computed(code, places)
        return self._looked_up(code, places)

    @property
    def _is_computed(self) -> bool:
        """Whether the numbers are computed on every CPU: a register has no table of so many float32."""
        return self.element == FLOAT and self.levels.bits > 4

    def _everywhere(self, bits: int) -> int:
        return bits if self.element == FLOAT else bits << 16 | bits

    def _looked_up(self, code: Code, places: Value) -> Value:
        """Looks numbers up. The higher bits of a lane do not count, so a table of few numbers is repeated."""
        numbers = torch.tensor(self.levels.numbers)
        if self.element == FLOAT:
            table = numbers.repeat(LANES // len(numbers)).tolist()
            return code.cast(code.looked_up(Value(code, ir.Constant(FLOATS, table)), places), INTS)
        bits, lanes = numbers.bfloat16().view(torch.int16), 2 * LANES
        whole = bits.repeat(max(1, lanes // len(bits))).tolist()
        tables = [Value(code, ir.Constant(WORDS, whole[i : i + lanes])) for i in range(0, len(whole), lanes)]
        places = code.cast(places, WORDS)
        if len(tables) == 1:
            return code.cast(code.looked_up(tables[0], places), INTS)
        return code.cast(code.looked_up_in_two(tables[0], tables[1], places), INTS)

    def _computed(self, code: Code, places: Value) -> Value:
        """Converts integers without a table."""
        mask, first = (1 << self.levels.bits) - 1, int(self.levels.numbers[0])
        low = code.cast(code.to_float((places & mask) + first), INTS)
        if self.element == FLOAT:
            return low
        return low >> 16 | code.cast(code.to_float((places >> 16 & mask) + first), INTS)


def can_decode(levels: Levels, has_pairs: bool) -> bool:
    """Whether this CPU has kernels for these levels. The registers of AVX-512 hold tables of few numbers."""
    if levels.bits == 8:
        return levels in (INT8, E4M3)
    return levels.are_integers or (levels.bits == 4 and has_pairs)


def _joined_planes(code: Code, address: Value, half: int) -> tuple[Value, Value]:
    """Joins both planes of integers of 3 bits, those of a half's 16 outputs.

    Returns:
        Words of 4 bits a place, of even places and of odd ones. The highest of the 4 bits is arbitrary.
    """
    low, upper = code.load(address, INTS, half * LANES * 4), code.load(address, INTS, PANEL * 4)
    even, odd = (upper << 2, upper << 1) if half == 0 else (upper, upper >> 1)
    return low & LOWER_PLANE | even & ~LOWER_PLANE, low >> 2 & LOWER_PLANE | odd & ~LOWER_PLANE


def _place(words: tuple[Value, Value], number: int) -> Value:
    """Brings an input of 3 bits, or a pair of inputs, to the lowest bits of `_joined_planes`."""
    word, shift = words[number % 2], number // 2 * 4
    return word >> shift if shift else word


def _moved(words: list[Value], bits: int, number: int, packed: int, to: int) -> Value:
    """Brings an input, or a pair of inputs, to the bits from `to` on; other bits are arbitrary."""
    each = WORD // bits // packed
    word, shift = words[number // each], number % each * bits - to
    if shift < 0:
        return word << -shift
    return word >> shift if shift else word
