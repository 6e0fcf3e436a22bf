"""The product with a weight matrix, for any number of rows.

Weights lie in panels of 32 outputs, each a run of memory in the order in which it is read, so that the CPU can fetch
ahead; one pass over a panel serves up to TILE rows. An output is one sum in order of the inputs, whatever rows stand
beside it, so its bits depend on its own row alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from model.kernels import math
from model.kernels.code import Code
from model.kernels.element import Element
from model.kernels.values import FLOATS, INTS, LANES, Value

PANEL = 2 * LANES
TILE = 8  # rows; 16 sums, which the registers of AVX-512 hold twice
BLOCK_BYTES = 2**18  # of rows that stay in the cache of a core while all panels pass

Activation = Callable[[Code, Value], Value]
ACTIVATIONS: dict[str, Activation] = {
    "silu": math.silu,
    "gelu": math.gelu,
    "gelu_tanh": math.gelu_tanh,
    "quick_gelu": math.quick_gelu,
    "relu": math.relu,
}


@dataclass(frozen=True, slots=True)
class Ending:
    """What becomes of the sums. add: they are added to what stands there. gated: the first half of a panel is
    activated and multiplies the second, so that half as many come out. out: what is written.
    """

    out: Element
    bias: bool = False
    add: bool = False
    gated: bool = False
    activation: str | None = None

    @property
    def name(self) -> str:
        flags = [word for word, there in (("bias", self.bias), ("add", self.add), ("gated", self.gated)) if there]
        return "_".join([*flags, *([self.activation] if self.activation else []), "to", self.out.name])

    @property
    def panel(self) -> int:
        """Outputs that a panel makes."""
        return LANES if self.gated else PANEL


def pack(weight: Tensor, element: Element, gated: bool = False) -> Tensor:
    """weight: [out, in] of any float dtype; with `gated` its first half are the gates. Returns
    [panels, in / packed, 32, packed] of the element, with zeros for outputs and inputs that there are not.
    """
    out, width = weight.shape
    if gated:
        half, need = out // 2, -(-(out // 2) // LANES) * LANES
        rows = weight.new_zeros((2, need, width))
        rows[0, :half], rows[1, :half] = weight[:half], weight[half:]
        rows = rows.view(2, -1, LANES, width).transpose(0, 1).reshape(-1, PANEL, width)
    else:
        rows = weight.new_zeros((-(-out // PANEL) * PANEL, width))
        rows[:out] = weight
        rows = rows.view(-1, PANEL, width)
    rows = rows.to(element.dtype)
    return rows.view(len(rows), PANEL, width // element.packed, element.packed).transpose(1, 2).contiguous()


def write_linear(element: Element, ending: Ending) -> Callable[[Code], None]:
    """Arguments: rows, as the cell that holds it, x, its stride, panels of weights, how many, inputs / packed, y, its
    stride, bias (float32 [panels, 32]). Strides are in bytes.
    """

    def write(code: Code) -> None:
        count, x, x_stride, weights, panels, depth, y, y_stride, bias = code.arguments(9)
        rows, room = code.held(count), code.room(TILE * PANEL * 4)
        sides = _Sides(x, x_stride, y, y_stride, room)
        block = (code.integer(BLOCK_BYTES) // x_stride // TILE + 1) * TILE
        first, last = code.share((rows + block - 1) // block * panels)
        with code.loop(first, last) as item:
            number, start = item % panels, item // panels * block
            here = code.smaller(rows - start, block)
            panel = _Panel(number, weights + number * depth * (PANEL * 4), depth, bias + number * (PANEL * 4))
            row = code.variable(start)
            with code.loop(0, here // TILE):
                _tile(code, element, ending, TILE, row.value, sides, panel)
                row.set(row.value + TILE)
            for size in range(1, TILE):
                with code.when((here % TILE).equals(size)):
                    _tile(code, element, ending, size, row.value, sides, panel)

    return write


@dataclass(frozen=True, slots=True)
class _Sides:
    """Where rows come from and go to. room: for the sums of a tile."""

    x: Value
    x_stride: Value
    y: Value
    y_stride: Value
    room: Value


@dataclass(frozen=True, slots=True)
class _Panel:
    number: Value
    weights: Value
    depth: Value
    bias: Value


def _tile(code: Code, element: Element, ending: Ending, size: int, row: Value, sides: _Sides, panel: _Panel) -> None:
    """So many rows from `row` on, one panel."""
    zero = code.floats(0.0)
    sums = [[code.variable(zero) for _ in range(2)] for _ in range(size)]
    inputs = [sides.x + (row + r) * sides.x_stride for r in range(size)]
    with code.loop(0, panel.depth) as i:
        at = panel.weights + i * (PANEL * 4)
        halves = [code.load(at, INTS, LANES * 4 * half) for half in range(2)]
        for r in range(size):
            value = element.everywhere(code, inputs[r] + i * 4)
            for total, weights in zip(sums[r], halves, strict=True):
                total.set(element.dot(code, total.value, weights, value))
    for r in range(size):
        for half, total in enumerate(sums[r]):
            code.store(total.value, sides.room, (r * PANEL + half * LANES) * 4)
    column = panel.number * ending.panel * ending.out.size
    with code.loop(0, size) as number:
        made = [code.load(sides.room + number * (PANEL * 4), FLOATS, LANES * 4 * half) for half in range(2)]
        if ending.bias:
            made = [total + code.load(panel.bias, FLOATS, LANES * 4 * half) for half, total in enumerate(made)]
        _end(code, ending, made, sides.y + (row + number) * sides.y_stride + column)


def _end(code: Code, ending: Ending, made: list[Value], place: Value) -> None:
    activation = ACTIVATIONS.get(ending.activation or "")
    if ending.gated:
        gate = activation(code, made[0]) if activation else made[0]
        made = [gate * made[1]]
    elif activation is not None:
        made = [activation(code, total) for total in made]
    for half, total in enumerate(made):
        offset = half * LANES * ending.out.size
        if ending.add:
            total = total + ending.out.load(code, place, offset)
        ending.out.store(code, total, place, offset)
