"""Keys and values in 8 bits (see `model.kv_pool`): encoded when written, decoded for products."""

from dataclasses import dataclass

from llvmlite import ir

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.values import FLOATS, INT8, INTS, LANES, Value

BYTES = ir.VectorType(INT8, LANES)

FIRST_NORMAL = 2.0**-6  # smallest normal number of e4m3
STEP = 2.0**-9  # distance of the smaller numbers
BIAS = 127 - 7  # excess of float32's exponents over those of e4m3


@dataclass(frozen=True, slots=True)
class EightBit:
    """An 8-bit format of keys and values.

    Attributes:
        name: int8, or fp8 (e4m3).
        largest: Value that the largest number of a token and head is scaled to.
    """

    name: str
    largest: float

    def scale(self, code: Code, source: Value, dim: Value) -> Value:
        """Returns the scale of `dim` float32 numbers: 1 for zeros, NaN where one is not finite."""
        top, wrong = code.variable(code.floats(0.0)), code.variable(code.floats(0.0))
        with code.loop(0, dim, LANES) as i:
            x = FLOAT.load(code, source + i * 4)
            top.set(code.maximum(top.value, code.absolute(x)))
            wrong.set(code.fma(x, code.floats(0.0), wrong.value))
        scale = code.largest(top.value) / self.largest
        return code.select(scale.equals(0.0), code.number(1.0), scale) + code.summed(wrong.value)

    def encoded(self, code: Code, floats: Value, scale: Value) -> Value:
        """Encodes 16 float32 as bytes, rounded half to even.

        `scale` is in all lanes; where it is NaN, the bytes are arbitrary.
        """
        held = code.minimum(code.maximum(floats / scale, -self.largest), self.largest)
        if self.name == "int8":
            return code.narrowed(code.to_int(code.rounded(held)), BYTES)
        size, sign = code.absolute(held), code.cast(held, INTS) >> 24 & 0x80
        bits = code.cast(size, INTS)
        normal = ((bits + ((bits >> 20 & 1) + 0x7FFFF)) >> 20) - (BIAS << 3)
        small = code.to_int(code.rounded(size / STEP))
        return code.narrowed(code.select(size < FIRST_NORMAL, small, normal) | sign, BYTES)

    def decoded(self, code: Code, address: Value, offset: int = 0) -> Value:
        """Decodes 16 bytes to float32, exactly; the lower 16 bits are 0."""
        numbers = code.widened(code.load(address, BYTES, offset), INTS)
        if self.name == "int8":
            return code.to_float(numbers)
        bits = (numbers & 0x7F) << 20 | (numbers & 0x80) << 24
        return code.cast(bits, FLOATS) * 2.0**BIAS

    def words(self, code: Code, element: Element, address: Value, step: int, offset: int = 0) -> Value:
        """Decodes bytes to 32-bit words of the element, which products read.

        A word takes a lane of each of `element.packed` vectors of bytes, `step` bytes apart.
        """
        parts = [code.cast(self.decoded(code, address, offset + i * step), INTS) for i in range(element.packed)]
        return parts[0] if element.packed == 1 else parts[0] >> 16 | parts[1]


EIGHT_BITS = {kind.name: kind for kind in (EightBit("int8", 127.0), EightBit("fp8", 448.0))}
