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
from model.cpu.kernels.panels import BYTES, PANEL
from model.cpu.kernels.values import FLOATS, INT16, INTS, LANES, Value
from model.weight_formats.groups import E4M3, INT4, INT8, GroupWeights, Levels

MOST_INPUTS = 256  # of a run; a part of a panel that many rows go through has at least one run
LEAST_INPUTS = 8  # of a run
WORDS = ir.VectorType(INT16, 2 * LANES)
HALVES = ir.VectorType(ir.HalfType(), LANES)
FLOAT16 = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
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
        offsets = "" if self.offsets is None else f"_{FLOAT16[self.offsets]}"
        return f"{self.levels.name}_{self.inputs}_{FLOAT16[self.scales]}{offsets}_{self.element.name}"

    @property
    def step(self) -> int:
        """Bytes of a step: one input of all outputs in float32, two in bfloat16."""
        return PANEL * self.element.packed * self.levels.bits // 8

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.inputs // self.element.packed

    @cached_property
    def head(self) -> int:
        """Bytes of a run before its steps."""
        return PANEL * sum(dtype.itemsize for dtype in (self.scales, self.offsets) if dtype is not None)

    @property
    def run(self) -> int:
        """Bytes of a run."""
        return self.head + self.steps * self.step

    def panel_bytes(self, steps: Value) -> Value:
        return steps // self.steps * self.run

    def factors(self, code: Code, run: Value) -> list[Value]:
        """Loads the scales of a run, two vectors of 16."""
        return [_load(code, run, self.scales, half * LANES) for half in range(2)]

    def additions(self, code: Code, run: Value) -> list[Value] | None:
        """Loads the offsets of a run, two vectors of 16. None where there are none."""
        if self.offsets is None:
            return None
        place = run + PANEL * self.scales.itemsize
        return [_load(code, place, self.offsets, half * LANES) for half in range(2)]

    def decoder(self, code: Code) -> Callable[[Value], list[Value]]:
        """Returns a function that loads the step at an address, as `Panels.halves`."""
        if self.levels.bits == 8:
            return lambda address: _bytes(code, address, self)
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
        inputs = values.transpose(1, 2)
        if self.element == FLOAT:
            return inputs[..., :LANES] | inputs[..., LANES:] << 4
        return inputs[:, ::2] | inputs[:, 1::2] << 4


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
    for inputs in range(min(together, MOST_INPUTS), LEAST_INPUTS - 1, -1):
        if together % inputs == 0 and inputs % element.packed == 0:
            return inputs
    return None


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


def _nibbles(code: Code, address: Value, panels: GroupPanels, table: Value | None) -> list[Value]:
    if panels.element == FLOAT:
        both = _unsigned(code, address)
        chosen = [both & 15, both >> 4]
        if table is None:
            return [code.cast(code.to_float(one - 8), INTS) for one in chosen]
        return [code.cast(code.looked_up(table, one), INTS) for one in chosen]
    made = []
    for half in range(2):
        both = _unsigned(code, address, half * LANES)
        if table is not None:
            made.append(code.cast(code.looked_up(table, code.cast((both | both << 12) & 0x000F000F, WORDS)), INTS))
            continue
        low, high = (code.cast(code.to_float(one - 8), INTS) for one in (both & 15, both >> 4))
        made.append(low >> 16 | high)
    return made


def _unsigned(code: Code, address: Value, offset: int = 0) -> Value:
    """Loads 16 bytes as integers of 32 bits without a sign."""
    return Value(code, code.builder.zext(code.load(address, BYTES, offset).ir, INTS))
