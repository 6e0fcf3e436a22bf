"""Elements of activations and weights, as kernels read and write them."""

from dataclasses import dataclass

import torch
from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.values import BFLOAT16, FLOATS, INT16, INT32, INTS, LANES, Value

HALVES = ir.VectorType(INT16, LANES)
SHORT = ir.VectorType(BFLOAT16, LANES)


@dataclass(frozen=True, slots=True)
class Element:
    """A floating-point type of activations and weights.

    Attributes:
        size: Bytes.
        packed: Elements in 32 bits, which are multiplied at once.
    """

    name: str
    size: int
    dtype: torch.dtype

    @property
    def packed(self) -> int:
        return 4 // self.size

    def load(self, code: Code, address: Value, offset: int = 0) -> Value:
        """Loads 16 elements as float32."""
        if self.size == 4:
            return code.load(address, FLOATS, offset)
        bits = Value(code, code.builder.zext(code.load(address, HALVES, offset).ir, INTS))
        return code.cast(bits << 16, FLOATS)

    def short(self, code: Code, floats: Value) -> Value:
        """Rounds 16 float32 to this element, half to even: a vector of the stored type."""
        if self.size == 4:
            return floats
        if code.has_pairs:
            return code.cast(Value(code, code.builder.fptrunc(floats.ir, SHORT)), HALVES)
        # Without the instruction, LLVM would call a function for each number, from a library that is not linked.
        bits = code.cast(floats, INTS)
        rounded = (bits + ((bits >> 16 & 1) + 0x7FFF)) >> 16
        quiet = bits >> 16 | 0x40  # rounding could make an infinity of a NaN
        return code.narrowed(code.select(floats >= floats, rounded, quiet), HALVES)

    def store(self, code: Code, floats: Value, address: Value, offset: int = 0) -> None:
        """Rounds 16 float32 and stores them."""
        code.store(self.short(code, floats), address, offset)

    def dot(self, code: Code, total: Value, a: Value, b: Value) -> Value:
        """Returns total + a b, where a lane of a (weights) and of b (inputs) is 32 bits of elements."""
        if self.size == 4:
            return code.fma(code.cast(a, FLOATS), code.cast(b, FLOATS), total)
        if self.size == 1:
            return code.cast(code.dot_octets(code.cast(total, INTS), b, a), FLOATS)
        return code.dot_pairs(total, a, b)

    def everywhere(self, code: Code, address: Value, offset: int = 0) -> Value:
        """Loads 32 bits into all lanes."""
        return code.splat(code.load(address, INT32, offset))


FLOAT = Element("f32", 4, torch.float32)
BFLOAT = Element("bf16", 2, torch.bfloat16)
OCTET = Element("i8", 1, torch.int8)
"""Integers of 8 bits, which are multiplied alone: inputs from 0 to 255, weights from -128 to 127. Sums are the bits of
32-bit integers, in the type of float32."""

ELEMENTS = {element.dtype: element for element in (FLOAT, BFLOAT)}
