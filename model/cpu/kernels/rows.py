"""Kernels on single rows of activations: norms, choosing and rounding rows.

The residual stream of a forward pass is float32; inputs of products are of the model's element. Threads share the rows.
Widths are multiples of 16.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.values import FLOAT32, INT64, LANES, Value

Writer = Callable[[Code], None]


@contextmanager
def shared_rows(code: Code, count: Value) -> Iterator[Value]:
    """Loops over this thread's share of the rows; their number is in the cell `count`."""
    first, last = code.share(code.held(count))
    with code.loop(first, last) as row:
        yield row


@dataclass(frozen=True, slots=True)
class Norm:
    """Kind of a norm.

    Attributes:
        centred: Whether the mean is subtracted first (LayerNorm). If not, it is RMSNorm.
    """

    centred: bool = False
    bias: bool = False

    @property
    def name(self) -> str:
        return ("layer_norm" if self.centred else "rms_norm") + ("_bias" if self.bias else "")


@dataclass(frozen=True, slots=True)
class Normed:
    """A norm applied to one row.

    Attributes:
        weights: Address of float32.
        bias: Address of float32.
        mean: Mean of the row. None where it is not subtracted.
        factor: Factor of the row, in all lanes.
    """

    code: Code
    norm: Norm
    weights: Value
    bias: Value
    mean: Value | None
    factor: Value

    @staticmethod
    def of(code: Code, norm: Norm, source: Value, width: Value, eps: Value, weights: Value, bias: Value) -> "Normed":
        share, mean = 1.0 / code.to_float(width), None
        if norm.centred:
            total = code.variable(code.floats(0.0))
            with code.loop(0, width, LANES) as i:
                total.set(total.value + FLOAT.load(code, source + i * 4))
            mean = code.splat(code.summed(total.value) * share)
        squares = code.variable(code.floats(0.0))
        with code.loop(0, width, LANES) as i:
            value = FLOAT.load(code, source + i * 4)
            value = value if mean is None else value - mean
            squares.set(code.fma(value, value, squares.value))
        variance = code.summed(squares.value) * share
        return Normed(code, norm, weights, bias, mean, code.splat(1.0 / code.root(variance + eps)))

    def __call__(self, value: Value, i: Value) -> Value:
        """Normalises 16 elements from the i-th on."""
        value = (value if self.mean is None else value - self.mean) * self.factor
        value = value * FLOAT.load(self.code, self.weights + i * 4)
        return value + FLOAT.load(self.code, self.bias + i * 4) if self.norm.bias else value


def write_norm(norm: Norm, out: Element, add: bool = False, chosen: bool = False) -> Writer:
    """Writes the kernel that normalises rows.

    With `chosen`, the rows of x are chosen by index. With `add`, the result is added to y.

    Kernel arguments:
        count: Cell. The number of rows.
        which: Cell. Indices into x, int64; not read without `chosen`.
        x: Input, float32.
        x_stride: Bytes of a row of x.
        weights: Weights, float32.
        bias: Biases, float32.
        y: Result.
        y_stride: Bytes of a row of y.
        width: Columns.
        eps: Epsilon, a float.
    """

    def write(code: Code) -> None:
        count, which, x, x_stride, weights, bias, y, y_stride, width = code.arguments(9)
        which = code.held(which) if chosen else which
        with shared_rows(code, count) as row:
            source = x + (code.load(which + row * 8, INT64) if chosen else row) * x_stride
            normed = Normed.of(code, norm, source, width, code.real(9), weights, bias)
            with code.loop(0, width, LANES) as i:
                value = normed(FLOAT.load(code, source + i * 4), i)
                place = y + row * y_stride + i * out.size
                out.store(code, value + out.load(code, place) if add else value, place)

    return write


def write_rounded(out: Element, chosen: bool = False) -> Writer:
    """Writes the kernel that rounds rows; with `chosen`, the rows of x are chosen by index.

    Kernel arguments:
        count: Cell. The number of rows.
        which: Cell. Indices into x, int64; not read without `chosen`.
        x: Input, float32.
        x_stride: Bytes of a row of x.
        y: Result.
        y_stride: Bytes of a row of y.
        width: Columns.
    """

    def write(code: Code) -> None:
        count, which, x, x_stride, y, y_stride, width = code.arguments(7)
        which = code.held(which) if chosen else which
        with shared_rows(code, count) as row:
            source = x + (code.load(which + row * 8, INT64) if chosen else row) * x_stride
            with code.loop(0, width, LANES) as i:
                out.store(code, FLOAT.load(code, source + i * 4), y + row * y_stride + i * out.size)

    return write


def write_gated(activation: Callable[[Code, Value], Value] | None, out: Element) -> Writer:
    """Writes the kernel of a gated linear unit whose gates stand before what they multiply.

    Kernel arguments:
        count: Cell. The number of rows.
        x: Input, float32: [rows, 2 width].
        x_stride: Bytes of a row of x.
        width: Columns of the result.
        y: Result.
        y_stride: Bytes of a row of y.
    """

    def write(code: Code) -> None:
        count, x, x_stride, width, y, y_stride = code.arguments(6)
        with shared_rows(code, count) as row, code.loop(0, width, LANES) as i:
            gate = FLOAT.load(code, x + row * x_stride + i * 4)
            gate = gate if activation is None else activation(code, gate)
            other = FLOAT.load(code, x + row * x_stride + (width + i) * 4)
            out.store(code, gate * other, y + row * y_stride + i * out.size)

    return write


def write_add_gated() -> Writer:
    """Writes the kernel that adds rows to others, each times the sigmoid of a number of its own.

    Kernel arguments:
        count: Cell. The number of rows.
        gates: A number at the beginning of each row, float32.
        gates_stride: Bytes of a row of gates.
        x: Rows to add, float32.
        x_stride: Bytes of a row of x.
        y: Result, float32.
        y_stride: Bytes of a row of y.
        width: Columns.
    """

    def write(code: Code) -> None:
        count, gates, gates_stride, x, x_stride, y, y_stride, width = code.arguments(8)
        with shared_rows(code, count) as row:
            gate = math.sigmoid(code, code.splat(code.load(gates + row * gates_stride, FLOAT32)))
            with code.loop(0, width, LANES) as i:
                place = y + row * y_stride + i * 4
                added = FLOAT.load(code, x + row * x_stride + i * 4)
                FLOAT.store(code, code.fma(gate, added, FLOAT.load(code, place)), place)

    return write
