"""Layout of weights in groups: panels of 32 outputs, a group's scales before its integers.

A run is the inputs of a group, or an equal part of a large one. A panel is its runs, one behind the other. A run is its
scales of 32 outputs, their offsets where the format has them, then its steps: 4 bits or 8 for each weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from llvmlite import ir
from torch import Tensor

from model.cpu.kernels.code import Code
from model.cpu.kernels.eight_bit import EIGHT_BITS
from model.cpu.kernels.element import FLOAT, Element
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.values import FLOATS, INT16, INTS, LANES, Value
from model.weight_formats.groups import E4M3, INT4, INT8, GroupWeights, Levels

MOST_INPUTS = 256  # of a run; a part of a panel that many rows go through has at least one run
LEAST_INPUTS = 8  # of a run
WORDS = ir.VectorType(INT16, 2 * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
EACH, EVEN_THEN_ODD = list(range(8)), [0, 2, 4, 6, 1, 3, 5, 7]
"""Inputs in the nibbles of a word, from the lowest on: as float32 takes them, and as pairs of bfloat16 do."""

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
"""Names of the dtypes of scales and offsets."""


@dataclass(frozen=True)
class GroupPanels:
    """Panels of weights in groups.

    Attributes:
        element: Type that activations have; a stored integer's number is exact in it.
        levels: Numbers of the stored integers.
        inputs: Inputs of a run.
        scales: Dtype of scales.
        offsets: Dtype of offsets. None for none.
    """

    element: Element
    levels: Levels
    inputs: int
    scales: torch.dtype
    offsets: torch.dtype | None

    @property
    def name(self) -> str:
        offsets = "" if self.offsets is None else f"_{DTYPES[self.offsets]}"
        return f"{self.levels.name}_{self.inputs}_{DTYPES[self.scales]}{offsets}_{self.element.name}"

    @property
    def together(self) -> int:
        """Inputs of a step, which is decoded at once."""
        return inputs_of_step(self.levels, self.element)

    @property
    def step(self) -> int:
        """Bytes of a step."""
        return PANEL * self.together * self.levels.bits // 8

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.inputs // self.together

    @property
    def words(self) -> int:
        """Words of 32 bits that a step has of an output, as the element."""
        return self.together // self.element.packed

    @cached_property
    def head(self) -> int:
        """Bytes of a run before its steps."""
        return PANEL * sum(dtype.itemsize for dtype in (self.scales, self.offsets) if dtype is not None)

    @property
    def run(self) -> int:
        """Bytes of a run."""
        return self.head + self.steps * self.step

    def runs(self, steps: Value) -> Value:
        """Returns the runs of a panel.

        Args:
            steps: Words of the element that a row of inputs has.
        """
        return steps // (self.inputs // self.element.packed)

    def panel_bytes(self, steps: Value) -> Value:
        return self.runs(steps) * self.run

    def factors(self, code: Code, run: Value) -> list[Value]:
        """Loads the scales of a run, two vectors of 16."""
        return [_load(code, run, self.scales, half * LANES) for half in range(2)]

    def additions(self, code: Code, run: Value) -> list[Value] | None:
        """Loads the offsets of a run, two vectors of 16. None where there are none."""
        if self.offsets is None:
            return None
        place = run + PANEL * self.scales.itemsize
        return [_load(code, place, self.offsets, half * LANES) for half in range(2)]

    def decoder(self, code: Code) -> Callable[[Value], list[list[Value]]]:
        """Returns a function that loads the step at an address: two vectors of 16 outputs for each of its words."""
        if self.levels.bits == 8:
            return lambda address: [_bytes(code, address, self)]
        table = _table(code, self)
        return lambda address: _nibbles(code, address, self, table)

    def laid(self, groups: "PanelGroups") -> Tensor:
        """Lays weights out. Returns [panels, bytes] uint8."""
        panels, _, width = groups.values.shape
        runs = width // self.inputs
        steps = self._steps_of(groups.values).reshape(panels, runs, -1)
        heads = [self._heads(groups.scales, self.scales, groups.size, runs)]
        if groups.offsets is not None and self.offsets is not None:
            heads.append(self._heads(groups.offsets, self.offsets, groups.size, runs))
        return torch.cat((*heads, steps), dim=2).flatten(1)

    def _heads(self, of_groups: Tensor, dtype: torch.dtype, size: int, runs: int) -> Tensor:
        """Returns the values of each run's group, [panels, runs, bytes]. of_groups: [panels, 32, groups]."""
        which = torch.arange(runs) * self.inputs // size
        return of_groups.to(dtype).transpose(1, 2)[:, which].contiguous().view(torch.uint8)

    def _steps_of(self, values: Tensor) -> Tensor:
        """Returns bytes in the order in which they are read. values: [panels, 32, in] uint8."""
        if self.levels.bits == 8:
            return (values ^ 128 if self.levels == INT8 else values).transpose(1, 2)
        order = EACH if self.element == FLOAT else EVEN_THEN_ODD
        eight = values.unflatten(2, (-1, 8))[..., order]
        return (eight[..., ::2] | eight[..., 1::2] << 4).transpose(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class PanelGroups:
    """`GroupWeights` whose outputs are in panels.

    Attributes:
        values: [panels, 32, in] uint8.
        scales: [panels, 32, groups].
        offsets: Likewise, or None.
        size: Inputs of a group.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    size: int


def run_inputs(groups: GroupWeights, element: Element) -> int | None:
    """Returns the inputs of a run, None where kernels cannot multiply such groups."""
    width = groups.values.shape[1]
    together = gcd(min(groups.size, width), width)
    if groups.index is not None or (groups.size < width and width % groups.size):
        return None
    step = inputs_of_step(groups.levels, element)
    for inputs in range(min(together, MOST_INPUTS), LEAST_INPUTS - 1, -1):
        if together % inputs == 0 and inputs % step == 0:
            return inputs
    return None


def inputs_of_step(levels: Levels, element: Element) -> int:
    """Returns the inputs that are decoded at once: in 4 bits eight, a word of each output."""
    return 8 if levels.bits == 4 else element.packed


def can_decode(levels: Levels, has_pairs: bool) -> bool:
    """Whether this CPU has kernels for these levels. The registers of AVX-512 hold a table of 16 numbers."""
    return levels in (INT4, INT8, E4M3) or (levels.bits == 4 and has_pairs)


def _load(code: Code, address: Value, dtype: torch.dtype, first: int) -> Value:
    """Loads 16 numbers as float32."""
    offset = first * dtype.itemsize
    if dtype == torch.float32:
        return code.load(address, FLOATS, offset)
    if dtype == torch.float16:
        return Value(code, code.builder.fpext(code.load(address, HALVES, offset).ir, FLOATS))
    return code.cast(code.widened(code.load(address, ir.VectorType(INT16, LANES), offset), INTS) << 16, FLOATS)


def _bytes(code: Code, address: Value, panels: GroupPanels) -> list[Value]:
    kind = EIGHT_BITS["int8" if panels.levels == INT8 else "fp8"]
    return [kind.words(code, panels.element, address, PANEL, half * LANES) for half in range(2)]


def _table(code: Code, panels: GroupPanels) -> Value | None:
    """Returns the numbers of 4-bit integers in a register. None where they are computed."""
    if not code.has_pairs:
        return None
    numbers = torch.tensor(panels.levels.numbers)
    if panels.element == FLOAT:
        return Value(code, ir.Constant(FLOATS, numbers.tolist()))
    bits = numbers.bfloat16().view(torch.int16).tolist()
    return Value(code, ir.Constant(WORDS, bits * 2))


def _nibbles(code: Code, address: Value, panels: GroupPanels, table: Value | None) -> list[list[Value]]:
    """Decodes a word of 8 nibbles of each output.

    A look-up takes the lowest bits of a lane alone, so that a shift brings each nibble, or pair, to its place.
    """
    words = [code.load(address, INTS, half * LANES * 4) for half in range(2)]
    made = []
    for number in range(panels.words):
        moved = [word >> 4 * number if number else word for word in words]
        if table is None:
            made.append([_computed(code, word, panels.element) for word in moved])
        elif panels.element == FLOAT:
            made.append([code.cast(code.looked_up(table, word), INTS) for word in moved])
        else:
            made.append([code.cast(code.looked_up(table, code.cast(word, WORDS)), INTS) for word in moved])
    return made


def _computed(code: Code, word: Value, element: Element) -> Value:
    """Converts the lowest nibble, or of bfloat16 those of both halves, without a table."""
    low = code.cast(code.to_float((word & 15) - 8), INTS)
    if element == FLOAT:
        return low
    return low >> 16 | code.cast(code.to_float((word >> 16 & 15) - 8), INTS)
