"""Types, values and variables of kernels, see `model.cpu.kernels.code`."""

from typing import Protocol, Union

from llvmlite import ir

LANES = 16  # float32 in a register of 512 bits; where registers are smaller, LLVM takes two


class _BFloat(ir.Type):
    """LLVM's bfloat type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
FLOAT32, BFLOAT16 = ir.FloatType(), _BFloat()
POINTER = ir.PointerType()
FLOATS = ir.VectorType(FLOAT32, LANES)
INTS = ir.VectorType(INT32, LANES)
PAIRS = ir.VectorType(BFLOAT16, 2 * LANES)  # two bfloat16 in each lane


class CodeContext(Protocol):
    """The parts of a `model.cpu.kernels.code.Code` that values need."""

    builder: ir.IRBuilder

    def like(self, value: "Value", operand: "Operand") -> "Value":
        """Returns the operand in the type of the value."""


class Value:
    """A number or a vector that a kernel computes.

    Operators take values of the same type, or a Python number.
    """

    __slots__ = ("_code", "ir")

    def __init__(self, code: CodeContext, value: ir.Value) -> None:
        self._code, self.ir = code, value

    @property
    def is_float(self) -> bool:
        kind = self.ir.type
        return isinstance(kind.element if isinstance(kind, ir.VectorType) else kind, ir.FloatType)

    def _binary(self, other: "Operand", floats: str, integers: str, swapped: bool = False) -> "Value":
        left, right = self.ir, self._code.like(self, other).ir
        if swapped:
            left, right = right, left
        return Value(self._code, getattr(self._code.builder, floats if self.is_float else integers)(left, right))

    def __add__(self, other: "Operand") -> "Value":
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: "Operand") -> "Value":
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: "Operand") -> "Value":
        return self._binary(other, "fsub", "sub", swapped=True)

    def __mul__(self, other: "Operand") -> "Value":
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def __truediv__(self, other: "Operand") -> "Value":
        return self._binary(other, "fdiv", "fdiv")

    def __rtruediv__(self, other: "Operand") -> "Value":
        return self._binary(other, "fdiv", "fdiv", swapped=True)

    def __floordiv__(self, other: "Operand") -> "Value":
        """Divides integers, rounded towards zero."""
        return self._binary(other, "fdiv", "sdiv")

    def __mod__(self, other: "Operand") -> "Value":
        return self._binary(other, "frem", "srem")

    def __and__(self, other: "Operand") -> "Value":
        return self._binary(other, "and_", "and_")

    def __or__(self, other: "Operand") -> "Value":
        return self._binary(other, "or_", "or_")

    def __xor__(self, other: "Operand") -> "Value":
        return self._binary(other, "xor", "xor")

    def __lshift__(self, other: "Operand") -> "Value":
        return self._binary(other, "shl", "shl")

    def __rshift__(self, other: "Operand") -> "Value":
        """Shifts right logically: zeros enter from the left."""
        return self._binary(other, "lshr", "lshr")

    def _compared(self, other: "Operand", how: str) -> "Value":
        build = self._code.builder
        compare = build.fcmp_ordered if self.is_float else build.icmp_signed
        return Value(self._code, compare(how, self.ir, self._code.like(self, other).ir))

    def __lt__(self, other: "Operand") -> "Value":
        return self._compared(other, "<")

    def __le__(self, other: "Operand") -> "Value":
        return self._compared(other, "<=")

    def __gt__(self, other: "Operand") -> "Value":
        return self._compared(other, ">")

    def __ge__(self, other: "Operand") -> "Value":
        return self._compared(other, ">=")

    def equals(self, other: "Operand") -> "Value":
        return self._compared(other, "==")


Operand = Union[Value, int, float]  # noqa: UP007 - a Value's methods name it before it is there


class Variable:
    """A value that changes while a kernel runs. LLVM keeps it in a register."""

    __slots__ = ("_code", "_place", "_type")

    def __init__(self, code: CodeContext, first: Value) -> None:
        self._code, self._type = code, first.ir.type
        with code.builder.goto_entry_block():
            self._place = code.builder.alloca(self._type)
        self.set(first)

    @property
    def value(self) -> Value:
        return Value(self._code, self._code.builder.load(self._place, typ=self._type))

    def set(self, value: Value) -> None:
        self._code.builder.store(value.ir, self._place)
