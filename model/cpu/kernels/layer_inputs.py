"""Inputs of each layer's own, see `model.layer_inputs`."""

from collections.abc import Callable

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.rows import Norm, Normed, Writer, shared_rows
from model.cpu.kernels.values import LANES, Value


def write_layer_inputs(code: Code) -> None:
    """Writes the kernel that makes the inputs of all layers, in the place of the tokens' second embeddings.

    Kernel arguments:
        count: Cell. The number of rows.
        projected: Projections of the tokens' first embeddings, float32, [rows, layers x width]. Scaled in place.
        stride: Bytes of a row of it.
        inputs: The second embeddings, float32, then the result.
        inputs_stride: Bytes of a row of it.
        layers: The number of layers.
        width: Elements of one layer's input.
        weights: Weights of the norm, float32.
        scale: Factor of projections, a float.
        eps: Epsilon of the norm, a float.
        factor: Factor of the sum, a float.
    """
    count, projected, stride, inputs, inputs_stride, layers, width, weights = code.arguments(8)
    scale, factor = code.splat(code.real(8)), code.splat(code.real(10))
    with shared_rows(code, count) as row, code.loop(0, layers) as layer:
        source = projected + row * stride + layer * width * 4
        with code.loop(0, width, LANES) as i:
            FLOAT.store(code, FLOAT.load(code, source + i * 4) * scale, source + i * 4)
        normed = Normed.of(code, Norm(), source, width, code.real(9), weights, weights)
        with code.loop(0, width, LANES) as i:
            place = inputs + row * inputs_stride + (layer * width + i) * 4
            value = normed(FLOAT.load(code, source + i * 4), i) + FLOAT.load(code, place)
            FLOAT.store(code, value * factor, place)


def write_input_gates(activation: Callable[[Code, Value], Value], out: Element) -> Writer:
    """Writes the kernel that multiplies a layer's input by its gates.

    Kernel arguments:
        count: Cell. The number of rows.
        gates: Gates before their activation, float32.
        gates_stride: Bytes of a row of gates.
        inputs: The layer's input in the first row, float32.
        inputs_stride: Bytes of a row of inputs.
        y: Result.
        y_stride: Bytes of a row of y.
        width: Columns.
    """

    def write(code: Code) -> None:
        count, gates, gates_stride, inputs, inputs_stride, y, y_stride, width = code.arguments(8)
        with shared_rows(code, count) as row, code.loop(0, width, LANES) as i:
            gate = activation(code, FLOAT.load(code, gates + row * gates_stride + i * 4))
            given = FLOAT.load(code, inputs + row * inputs_stride + i * 4)
            out.store(code, gate * given, y + row * y_stride + i * out.size)

    return write
