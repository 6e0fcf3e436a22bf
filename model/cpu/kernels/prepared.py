"""Inputs of a product as its weights need them: in another order, or rounded to 8 bits row by row."""

from dataclasses import dataclass
from typing import Protocol

from llvmlite import ir
from torch import Tensor

from model.cpu.kernels.buffer import Buffer
from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import BYTES, EIGHT_BITS, EightBit
from model.cpu.kernels.element import OCTET, Element
from model.cpu.kernels.program import Call
from model.cpu.kernels.rows import Writer, shared_rows
from model.cpu.kernels.values import INT16, INT32, INT64, LANES

ZERO = 128  # octet of an input that is 0
NONE = -1
"""Place of an input that is 0 in every row: it fills a group up."""


class Preparation(Protocol):
    """Makes the rows that a product reads of those that it is given.

    Attributes:
        element: Element of the rows that it makes.
        width: Inputs of a row that it makes.
    """

    @property
    def element(self) -> Element: ...

    @property
    def width(self) -> int: ...

    def call(self, rows: int, x: Buffer, y: Buffer) -> Call:
        """Makes the call.

        Args:
            rows: Address of the cell with the number of rows.
            x: Rows that the product is given.
            y: Buffer of the rows that it reads.
        """


@dataclass(frozen=True, slots=True, eq=False)
class OrderedInputs:
    """`Preparation` that puts the inputs of each row into another order (GPTQ's desc_act).

    Attributes:
        order: [width] int32. Place of each input in the row that is given, or NONE.
    """

    element: Element
    order: Tensor

    @property
    def width(self) -> int:
        return len(self.order)

    def call(self, rows: int, x: Buffer, y: Buffer) -> Call:
        name = f"ordered_{self.element.name}"
        arguments = rows, x.tensor, x.stride, self.order, self.width, y.tensor, y.stride
        return Call(name, write_ordered(self.element), arguments)


def write_ordered(element: Element) -> Writer:
    """Writes the kernel that puts inputs into another order.

    Kernel arguments:
        count: Cell. The number of rows.
        x: Input, of the element.
        x_stride: Bytes of a row of x.
        order: Places in a row of x, int32.
        width: Inputs of a row of y.
        y: Result, of the element.
        y_stride: Bytes of a row of y.
    """
    kind: ir.Type = INT16 if element.size == 2 else INT32

    def write(code: Code) -> None:
        count, x, x_stride, order, width, y, y_stride = code.arguments(7)
        zero = code.narrowed(code.integer(0), kind)
        with shared_rows(code, count) as row, code.loop(0, width) as i:
            place = code.widened(code.load(order + i * 4, INT32), INT64)
            known = code.larger(place, code.integer(0))
            value = code.load(x + row * x_stride + known * element.size, kind)
            code.store(code.select(place < 0, zero, value), y + row * y_stride + i * element.size)

    return write


@dataclass(frozen=True, slots=True)
class RoundedInputs:
    """`Preparation` that rounds rows to 8 bits (W8A8, FP8), with a scale that depends on the row alone, or on none.

    Rows of octets are followed by their scale, and multiplied as they are. Others are scaled back, see
    `model.weight_formats.activations`, which has the rule.

    Attributes:
        given: Element of the rows that the product is given.
        inputs: Inputs of a row, a multiple of 16.
        floating: Whether the 8 bits are float8 e4m3 instead of int8.
        scale: Scale of all rows. None for one of each row.
        octets: Whether rows stay in 8 bits, those of integers alone.
    """

    given: Element
    inputs: int
    floating: bool
    scale: float | None
    octets: bool

    @property
    def element(self) -> Element:
        return OCTET if self.octets else self.given

    @property
    def width(self) -> int:
        return self.inputs + 4 if self.octets else self.inputs

    def call(self, rows: int, x: Buffer, y: Buffer) -> Call:
        kind = EIGHT_BITS["fp8" if self.floating else "int8"]
        static = self.scale is not None
        name = f"rounded_rows_{kind.name}_{self.given.name}_{self.element.name}{'_static' if static else ''}"
        arguments = rows, x.tensor, x.stride, self.inputs, y.tensor, y.stride, self.scale or 0.0
        return Call(name, write_rounded_rows(self.given, kind, static, self.octets), arguments)


def write_rounded_rows(element: Element, kind: EightBit, static: bool, octets: bool) -> Writer:
    """Writes the kernel that rounds rows to 8 bits.

    A row with a number that is not finite has a scale that is none.

    Kernel arguments:
        count: Cell. The number of rows.
        x: Input, of the element.
        x_stride: Bytes of a row of x.
        width: Inputs of a row.
        y: Result: octets and a float32, or numbers of the element.
        y_stride: Bytes of a row of y.
        scale: Scale of all rows, a float; not read where rows have their own.
    """

    def write(code: Code) -> None:
        count, x, x_stride, width, y, y_stride = code.arguments(6)
        octet = code.room(LANES)
        with shared_rows(code, count) as row:
            source, to = x + row * x_stride, y + row * y_stride
            top, wrong = code.variable(code.floats(0.0)), code.variable(code.floats(0.0))
            with code.loop(0, width, LANES) as i:
                value = element.load(code, source + i * element.size)
                top.set(code.maximum(top.value, code.absolute(value)))
                wrong.set(code.fma(value, code.floats(0.0), wrong.value))
            own = code.largest(top.value) / kind.largest
            own = code.real(6) if static else code.select(own.equals(0.0), code.number(1.0), own)
            scale = code.splat(own + code.summed(wrong.value))
            with code.loop(0, width, LANES) as i:
                value = element.load(code, source + i * element.size)
                if kind.name == "int8":
                    held = code.rounded(value / scale)
                    held = code.minimum(code.maximum(held, -128.0), 127.0)
                    if octets:
                        code.store(code.narrowed(code.to_int(held) + ZERO, BYTES), to + i)
                    else:
                        element.store(code, held * scale, to + i * element.size)
                else:
                    code.store(kind.encoded(code, value, scale), octet)
                    element.store(code, kind.decoded(code, octet) * scale, to + i * element.size)
            if octets:
                code.store(code.lane(scale, 0), to + width)

    return write
