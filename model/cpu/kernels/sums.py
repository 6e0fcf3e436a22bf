"""Sums of rows with a panel of weights, in a kernel of its own: products that end in different ways share it.

It is most of a product's code, since each number of rows up to TILE has its own. So it is compiled once for a layout.

Invariant: an output is one sum, in an order of the inputs that does not depend on the rows beside it. So its bits
depend on its own row alone.
"""

from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import BFLOAT
from model.cpu.kernels.group_panels import GroupPanels
from model.cpu.kernels.group_sums import MOST_RUNS, add_group_sums, sum_inputs
from model.cpu.kernels.panels import PANEL, Panels, PlainPanels
from model.cpu.kernels.program import Kernel
from model.cpu.kernels.rows import Writer
from model.cpu.kernels.sides import MOST_ROWS, TILE, PanelRows, Sides, WeightPanel, each_tile
from model.cpu.kernels.tiles import STEPS, add_tile_sums
from model.cpu.kernels.values import FLOATS, LANES, Value

PART = 128  # steps of a panel that all rows of a block go through before the next ones, 16 KiB of the element
LINE = 64  # bytes that a CPU fetches at once
NONE = 2**62  # no rows
AHEAD = (
    4096  # bytes; 1.3 to 1.8 times the speed of 8-bit weights with 4 and 8 rows, where the CPU alone fetches too late
)
ARGUMENTS = 6  # of the kernel of sums


def sums_kernel(weights: Panels | GroupPanels, steps: int, has_tiles: bool) -> Kernel:
    """Returns the kernel of sums, which the kernel of a product is passed.

    Args:
        weights: Layout of the weights.
        steps: Steps of a panel.
        has_tiles: Whether there are matrix registers. They are used for bfloat16, where the panels fill them.
    """
    if has_tiles and weights == PlainPanels(BFLOAT) and steps % STEPS == 0:
        return Kernel(f"sums_{weights.name}_tiles", write_sums(weights, tiles=True))
    return Kernel(f"sums_{weights.name}", write_sums(weights))


def write_sums(weights: Panels | GroupPanels, tiles: bool = False) -> Writer:
    """Writes the kernel that multiplies rows with one panel. The thread that calls it computes all of them.

    With `tiles` it uses matrix registers, see `sums_kernel`.

    Kernel arguments:
        places: See `PanelRows`.
        sums: Result, see `PanelRows`.
        input_sums: See `PanelRows`. Not read where weights have no offsets.
        steps: Steps of the panel.
        count: The number of rows, 1 to MOST_ROWS.
        panel: The panel.
    """

    def write(code: Code) -> None:
        places, sums, input_sums, steps, count, panel = code.arguments(ARGUMENTS)
        rows = PanelRows(places, sums, input_sums)
        if isinstance(weights, GroupPanels):
            add_group_sums(code, weights, rows, count, panel, steps)
        elif tiles:
            add_tile_sums(code, rows, count, panel, steps)
        else:
            _add_sums(code, weights, rows, count, panel, steps)

    return write


class PanelSums:
    """Rows of a thread and their sums with one panel after the other.

    Attributes:
        room: [MOST_ROWS, 32] float32. The sums.
    """

    def __init__(self, code: Code, weights: Panels | GroupPanels, kernel: Value, steps: Value) -> None:
        """Allocates the rooms.

        Args:
            code: The kernel of a product.
            weights: Layout of its weights.
            kernel: Address of its `sums_kernel`.
            steps: Steps of a panel.
        """
        self._code, self._weights, self._kernel, self._steps = code, weights, kernel, steps
        self.room = code.room(MOST_ROWS * PANEL * 4)
        has_offsets = isinstance(weights, GroupPanels) and weights.has_offsets
        input_sums = code.room(MOST_ROWS * MOST_RUNS * 4) if has_offsets else self.room
        self._rows = PanelRows(code.room(MOST_ROWS * 8), self.room, input_sums)
        self._taken = code.variable(code.integer(NONE))
        self._arguments = code.room(ARGUMENTS * 8)
        for i, argument in enumerate((self._rows.places, self.room, input_sums, steps)):
            code.store(argument, self._arguments, 8 * i)

    def take(self, number: Value, sides: Sides, start: Value, count: Value) -> None:
        """Takes `count` rows from `start` on, unless they are those that were taken last.

        Args:
            number: Number that these rows alone have.
            sides: Places of rows.
            start: First row.
            count: The number of rows.
        """
        code, weights = self._code, self._weights
        with code.when((number ^ self._taken.value) > 0):
            with code.loop(0, count) as row:
                code.store(sides.input(start + row), self._rows.places + row * 8)
            if isinstance(weights, GroupPanels) and weights.has_offsets:
                sum_inputs(code, weights, self._rows, count, self._steps)
            self._taken.set(number)

    def add(self, count: Value, panel: WeightPanel) -> None:
        """Leaves the sums of the taken rows with a panel in their room."""
        code = self._code
        for i, argument in enumerate((count, panel.weights), start=ARGUMENTS - 2):
            code.store(argument, self._arguments, 8 * i)
        code.call(self._kernel, self._arguments, code.thread, code.threads)


def _add_sums(code: Code, weights: Panels, rows: PanelRows, count: Value, panel: Value, steps: Value) -> None:
    for size in range(1, TILE + 1):
        with code.when(count.equals(size)):
            part = _Part(weights, panel, steps, panel + AHEAD, weights.step)
            _add(code, part, size, rows.inputs(code, code.integer(0), size), rows.sums, fresh=True)
    with code.when(count > TILE):
        _by_parts(code, weights, rows, count, panel, steps)


@dataclass(frozen=True, slots=True)
class _Part:
    """Steps of a panel.

    Attributes:
        ahead: Address to prefetch from.
        ahead_step: Bytes to prefetch for each step.
    """

    panels: Panels
    weights: Value
    steps: Value
    ahead: Value
    ahead_step: int


def _add(code: Code, part: _Part, size: int, inputs: list[Value], sums: Value, fresh: bool) -> None:
    """Adds the products of `size` rows with a part to the sums in their room, or with `fresh` to zeros."""
    places = [[(r * PANEL + half * LANES) * 4 for half in range(2)] for r in range(size)]
    totals = [
        [code.variable(code.floats(0.0) if fresh else code.load(sums, FLOATS, place)) for place in row]
        for row in places
    ]
    element = part.panels.element
    with code.loop(0, part.steps) as i:
        halves = part.panels.halves(code, part.weights + i * part.panels.step)
        for line in range(0, part.ahead_step, LINE):
            code.prefetch(part.ahead + i * part.ahead_step, line)
        for r in range(size):
            value = element.everywhere(code, inputs[r] + i * 4)
            for total, half in zip(totals[r], halves, strict=True):
                total.set(element.dot(code, total.value, half, value))
    for row, made in zip(places, totals, strict=True):
        for place, total in zip(row, made, strict=True):
            code.store(total.value, sums, place)


def _by_parts(code: Code, weights: Panels, rows: PanelRows, count: Value, panel: Value, steps: Value) -> None:
    """Computes the sums of many rows. While they go through a part of the panel, the next part is prefetched."""
    with code.loop(0, count * 2) as vector:
        code.store(code.floats(0.0), rows.sums + vector * (LANES * 4))
    plain = PlainPanels(weights.element)
    room = code.room(PART * plain.step)
    with code.loop(0, steps, PART) as first:
        number, here = code.smaller(steps - first, code.integer(PART)), panel + first * weights.step
        if weights != plain:
            with code.loop(0, number) as i:
                for half, values in enumerate(weights.halves(code, here + i * weights.step)):
                    code.store(values, room + i * plain.step, half * LANES * 4)
        part = _Part(plain, here if weights == plain else room, number, here + PART * weights.step, weights.step)

        def tile(row: Value, size: int, part: _Part = part, first: Value = first) -> None:
            inputs = [place + first * 4 for place in rows.inputs(code, row, size)]
            _add(code, part, size, inputs, rows.sums + row * (PANEL * 4), fresh=False)

        each_tile(code, count, tile)
