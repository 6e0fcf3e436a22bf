"""Places of a product's rows and weights."""

from collections.abc import Callable
from dataclasses import dataclass

from model.cpu.kernels.code import Code
from model.cpu.kernels.values import Value

TILE = 8  # rows; 16 sums, which the registers of AVX-512 hold twice
MOST_ROWS = 64  # rows whose sums stay in the cache


@dataclass(frozen=True, slots=True)
class Sides:
    """Places of a product's inputs and outputs.

    Attributes:
        sums: Room for the sums of a panel, [MOST_ROWS, 32] float32.
        input_sums: Room for sums of inputs, [MOST_ROWS, MOST_RUNS] float32, where weights have offsets, see
            `model.cpu.kernels.group_sums`.
    """

    x: Value
    x_stride: Value
    y: Value
    y_stride: Value
    sums: Value
    input_sums: Value

    def inputs(self, row: Value, size: int) -> list[Value]:
        """Returns the addresses of `size` rows of the input."""
        return [self.x + (row + r) * self.x_stride for r in range(size)]

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


def each_tile(code: Code, start: Value, count: Value, tile: Callable[[Value, int], None]) -> None:
    """Calls `tile` with rows from `start` on, TILE at a time, then with the rest."""
    row = code.variable(start)
    with code.loop(0, count // TILE):
        tile(row.value, TILE)
        row.set(row.value + TILE)
    for size in range(1, TILE):
        with code.when((count % TILE).equals(size)):
            tile(row.value, size)
