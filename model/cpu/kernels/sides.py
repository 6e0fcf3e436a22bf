"""Places of a product's rows and weights."""

from collections.abc import Callable
from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.values import INT64, Value

TILE = 8  # rows; 16 sums, which the registers of AVX-512 hold twice
MOST_ROWS = 64  # rows whose sums stay in the cache


@dataclass(frozen=True, slots=True)
class Sides:
    """Places of a product's inputs and outputs."""

    x: Value
    x_stride: Value
    y: Value
    y_stride: Value

    def input(self, row: Value) -> Value:
        """Returns the address of a row of the input."""
        return self.x + row * self.x_stride

    def output(self, row: Value) -> Value:
        """Returns the address of a row of the output."""
        return self.y + row * self.y_stride


@dataclass(frozen=True, slots=True)
class WeightPanel:
    """A panel of weights.

    Attributes:
        number: Index of the panel.
        weights: Address of its first step.
        steps: The number of steps.
        bias: Address of its biases.
        scales: Address of its scales.
        zeros: Address of the sums that inputs of 0 have, int32, where inputs and weights are octets.
    """

    number: Value
    weights: Value
    steps: Value
    bias: Value
    scales: Value
    zeros: Value


@dataclass(frozen=True, slots=True)
class PanelRows:
    """Rows that are multiplied with a panel, at most MOST_ROWS, and the rooms for their sums.

    Attributes:
        places: Address of each row's inputs, int64.
        sums: [MOST_ROWS, 32] float32.
        input_sums: Sums of the inputs of each run, [MOST_ROWS, MOST_RUNS] float32, where weights have offsets, see
            `model.cpu.kernels.group_sums`.
    """

    places: Value
    sums: Value
    input_sums: Value

    def inputs(self, code: Code, row: Value, size: int) -> list[Value]:
        """Returns the addresses of the inputs of `size` rows."""
        return [code.load(self.places + row * 8, INT64, 8 * r) for r in range(size)]


def each_tile(code: Code, count: Value, tile: Callable[[Value, int], None]) -> None:
    """Calls `tile` with the first of `count` rows, TILE at a time, then with the rest."""
    row = code.variable(code.integer(0))
    with code.loop(0, count // TILE):
        tile(row.value, TILE)
        row.set(row.value + TILE)
    for size in range(1, TILE):
        with code.when((count % TILE).equals(size)):
            tile(row.value, size)
