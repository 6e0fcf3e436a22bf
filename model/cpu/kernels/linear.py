"""The product with a weight matrix, for any number of rows.

Weights lie in panels of 32 outputs. Each is a run of memory in the order in which it is read, so that the CPU can
prefetch. One pass over a panel serves up to TILE rows. Many rows go through a panel part by part, each part from the
cache. Weights of 8 bits become the element's in registers or, for many rows, once for all of them, in a room of a
part's size. `model.cpu.kernels.sums` computes the sums, this module what becomes of them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from model.cpu.kernels import math
from model.cpu.kernels.code import Code
from model.cpu.kernels.element import Element
from model.cpu.kernels.group_panels import GroupPanels
from model.cpu.kernels.panels import PANEL, Panels
from model.cpu.kernels.sides import MOST_ROWS, TILE, Sides, WeightPanel
from model.cpu.kernels.sums import PanelSums
from model.cpu.kernels.values import FLOAT32, FLOATS, INTS, LANES, Value

BLOCK_BYTES = 2**18  # bytes of rows that stay in the cache of a core while all panels pass

Activation = Callable[[Code, Value], Value]
ACTIVATIONS: dict[str, Activation] = {
    "silu": math.silu,
    "gelu": math.gelu,
    "gelu_tanh": math.gelu_tanh,
    "quick_gelu": math.quick_gelu,
    "relu": math.relu,
    "relu2": math.relu2,
}


OF = "_of_"


def multiple_of(activation: str, factor: float) -> str:
    """Returns the name of an activation of a multiple of its input. The factor is in it, as float32."""
    return f"{activation}{OF}{np.float32(factor).tobytes().hex()}"


def activation_of(name: str) -> Activation:
    """Returns the activation of a name."""
    base, _, factor = name.partition(OF)
    activation = ACTIVATIONS[base]
    if not factor:
        return activation
    number = float(np.frombuffer(bytes.fromhex(factor), np.float32)[0])
    return lambda code, x: activation(code, x * number)


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Steps that turn a product's sums into its outputs.

    Attributes:
        out: Type of the outputs.
        add: Whether the result is added to y.
        gated: Whether the first half of a panel is activated and multiplies the second, so that half as many outputs
            remain.
        activation: Name of the activation. None for none.
        scaled: Whether each output has a factor, which is applied first.
        rounded: Whether inputs and weights are octets. The scale of a row then follows its inputs.
        limit: Bound of gates and of what they multiply, see `model.layers.gated`. None for none.
    """

    out: Element
    bias: bool = False
    add: bool = False
    gated: bool = False
    activation: str | None = None
    scaled: bool = False
    rounded: bool = False
    limit: float | None = None

    @property
    def name(self) -> str:
        marks = (
            ("rounded", self.rounded),
            ("scaled", self.scaled),
            ("bias", self.bias),
            ("add", self.add),
            ("gated", self.gated),
            (f"within_{self.limit}", self.limit is not None),
        )
        flags = [word for word, there in marks if there]
        return "_".join([*flags, *([self.activation] if self.activation else []), "to", self.out.name])

    @property
    def panel(self) -> int:
        """Outputs of a panel."""
        return LANES if self.gated else PANEL


def pack(weight: Tensor, panels: Panels, gated: bool = False) -> Tensor:
    """Packs weights into panels.

    Args:
        weight: [out, in] of any dtype. With `gated` its first half are the gates.
        panels: Layout.
        gated: Whether 16 gates and the 16 outputs that they multiply share a panel.

    Returns:
        [panels, steps, weights of a step], with zeros for outputs past the last.
    """
    return panels.laid(in_panels(weight, gated).to(panels.dtype)).contiguous()


def in_panels(outputs: Tensor, gated: bool) -> Tensor:
    """Puts outputs into panels.

    Args:
        outputs: [out, n].
        gated: See `pack`.

    Returns:
        [panels, 32, n], with zeros for outputs past the last.
    """
    out, width = outputs.shape
    if gated:
        half, need = out // 2, -(-(out // 2) // LANES) * LANES
        rows = outputs.new_zeros((2, need, width))
        rows[0, :half], rows[1, :half] = outputs[:half], outputs[half:]
        return rows.view(2, -1, LANES, width).transpose(0, 1).reshape(-1, PANEL, width)
    if out % PANEL == 0:
        return outputs.reshape(-1, PANEL, width)  # of a large output layer a copy would be the peak of loading
    rows = outputs.new_zeros((-(-out // PANEL) * PANEL, width))
    rows[:out] = outputs
    return rows.view(-1, PANEL, width)


def write_linear(weights: Panels | GroupPanels, ending: Epilogue) -> Callable[[Code], None]:
    """Writes the kernel of a product.

    Kernel arguments:
        count: Cell. The number of rows.
        x: Input, of the element.
        x_stride: Bytes of a row of x.
        places: Panels of weights.
        panels: The number of panels.
        steps: Steps of a panel.
        y: Result.
        y_stride: Bytes of a row of y.
        bias: [panels, 32] float32.
        scales: [panels, 32] float32.
        zeros: [panels, 32] int32, see `WeightPanel`.
        kernel: See `sums_kernel`.
    """

    def write(code: Code) -> None:
        count, x, x_stride, places, panels, steps, y, y_stride, bias, scales, zeros, kernel = code.arguments(12)
        rows, sides, sums = code.held(count), Sides(x, x_stride, y, y_stride), PanelSums(code, weights, kernel, steps)
        block = (code.integer(BLOCK_BYTES) // x_stride // TILE + 1) * TILE
        block = code.smaller(block, code.integer(MOST_ROWS))
        first, last = code.share((rows + block - 1) // block * panels)
        with code.loop(first, last) as item:
            number, start = item % panels, item // panels * block
            here, outputs = code.smaller(rows - start, block), number * (PANEL * 4)
            sums.take(start, sides, start, here)
            own = places + number * weights.panel_bytes(steps)
            panel = WeightPanel(number, own, steps, bias + outputs, scales + outputs, zeros + outputs)
            multiply(code, sums, ending, start, here, sides, panel)

    return write


def multiply(
    code: Code, sums: PanelSums, ending: Epilogue, start: Value, count: Value, sides: Sides, panel: WeightPanel
) -> None:
    """Multiplies the rows that were taken, `count` from `start` on, with one panel, and writes their outputs."""
    sums.add(count, panel)
    column = panel.number * ending.panel * ending.out.size
    with code.loop(0, count) as number:
        made = [code.load(sums.room + number * (PANEL * 4), FLOATS, LANES * 4 * half) for half in range(2)]
        if ending.rounded:
            made = _of_octets(code, made, sides.input(start + number), panel)
        if ending.scaled:
            made = [total * code.load(panel.scales, FLOATS, LANES * 4 * half) for half, total in enumerate(made)]
        if ending.bias:
            made = [total + code.load(panel.bias, FLOATS, LANES * 4 * half) for half, total in enumerate(made)]
        _end(code, ending, made, sides.output(start + number) + column)


def _of_octets(code: Code, sums: list[Value], inputs: Value, panel: WeightPanel) -> list[Value]:
    """Returns the sums of a row of octets in float32, with the row's scale."""
    scale = code.splat(code.load(inputs + panel.steps * 4, FLOAT32))
    zeros = [code.load(panel.zeros, INTS, LANES * 4 * half) for half in range(2)]
    return [code.to_float(code.cast(total, INTS) - zero) * scale for total, zero in zip(sums, zeros, strict=True)]


def _end(code: Code, ending: Epilogue, made: list[Value], place: Value) -> None:
    activation = None if ending.activation is None else activation_of(ending.activation)
    if ending.gated:
        gate, up = made
        if ending.limit is not None:
            gate = code.minimum(gate, ending.limit)
            up = code.maximum(code.minimum(up, ending.limit), -ending.limit) + 1.0
        made = [(activation(code, gate) if activation else gate) * up]
    elif activation is not None:
        made = [activation(code, total) for total in made]
    for half, total in enumerate(made):
        offset = half * LANES * ending.out.size
        if ending.add:
            total = total + ending.out.load(code, place, offset)
        ending.out.store(code, total, place, offset)
