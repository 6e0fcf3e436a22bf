"""Keys and values in 8 bits, see `model.kv_pool`: what is written, and what products read."""

from dataclasses import dataclass

from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.values import FLOATS, INT8, INTS, LANES, Value

BYTES = ir.VectorType(INT8, LANES)

FIRST_NORMAL = 2.0**-6  # of e4m3
STEP = 2.0**-9  # between the smaller ones
BIAS = 127 - 7  # of float32's exponents over those of e4m3


@dataclass(frozen=True, slots=True)
class EightBit:
    """name: int8, or fp8 (e4m3). largest: what the largest number of a token and head becomes."""

    name: str
    largest: float

    def scale(self, code: Code, source: Value, dim: Value) -> Value:
        """Of so many float32, one for all; 1 for zeros, NaN where one is not finite."""
        top, wrong = code.variable(code.floats(0.0)), code.variable(code.floats(0.0))
        with code.loop(0, dim, LANES) as i:
            x = FLOAT.load(code, source + i * 4)
            top.set(code.maximum(top.value, code.absolute(x)))
            wrong.set(code.fma(x, code.floats(0.0), wrong.value))
        scale = code.largest(top.value) / self.largest
        return code.select(scale.equals(0.0), code.number(1.0), scale) + code.summed(wrong.value)

    def encoded(self, code: Code, floats: Value, scale: Value) -> Value:
        """16 float32 as bytes, rounded half to even. scale: in all lanes; any bytes where it is NaN."""
        held = code.minimum(code.maximum(floats / scale, -self.largest), self.largest)
        if self.name == "int8":
            return code.narrowed(code.to_int(code.rounded(held)), BYTES)
        size, sign = code.absolute(held), code.cast(held, INTS) >> 24 & 0x80
        bits = code.cast(size, INTS)
        normal = ((bits + ((bits >> 20 & 1) + 0x7FFFF)) >> 20) - (BIAS << 3)
        small = code.to_int(code.rounded(size / STEP))
        return code.narrowed(code.select(size < FIRST_NORMAL, small, normal) | sign, BYTES)

    def decoded(self, code: Code, address: Value, offset: int = 0) -> Value:
        """16 bytes as float32, which they are exactly; its lower 16 bits are 0."""
        numbers = code.widened(code.load(address, BYTES, offset), INTS)
        if self.name == "int8":
            return code.to_float(numbers)
        bits = (numbers & 0x7F) << 20 | (numbers & 0x80) << 24
        return code.cast(bits, FLOATS) * 2.0**BIAS

    def words(self, code: Code, element: Element, address: Value, step: int, offset: int = 0) -> Value:
        """The 32 bits of the element that products read: from as many vectors of bytes as fill them, `step` apart."""
        parts = [code.cast(self.decoded(code, address, offset + i * step), INTS) for i in range(element.packed)]
        return parts[0] if element.packed == 1 else parts[0] >> 16 | parts[1]


EIGHT_BITS = {kind.name: kind for kind in (EightBit("int8", 127.0), EightBit("fp8", 448.0))}
