"""Layout of weights in groups: panels of 32 outputs, a group's scales before its integers.

A run is the inputs of a group, or an equal part of a large one. A panel is its blocks, one behind the other. A block is
the numbers that its groups' scales and offsets are multiples of, where the format has those, then its runs; else it is
one run. A run is its scales of 32 outputs, their offsets where the format has them, then its steps, see
`model.cpu.kernels.group_words`.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import torch
from llvmlite import ir
from torch import Tensor

from model.cpu.kernels.code import Code
from model.cpu.kernels.element import Element
from model.cpu.kernels.group_words import GroupWords
from model.cpu.kernels.panels import PANEL
from model.cpu.kernels.values import FLOATS, INT8, INT16, INTS, LANES, Value
from model.weight_formats.groups import GroupWeights

MOST_INPUTS = 256  # of a run; a part of a panel that many rows go through has at least one run
LEAST_INPUTS = 8  # of a run
HALVES = ir.VectorType(ir.HalfType(), LANES)
DTYPES = {
    torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32", torch.int8: "i8", torch.int16: "i16",
}  # fmt: skip
"""Names of the dtypes of scales and offsets."""
WIDTHS = {torch.int8: INT8, torch.int16: INT16, torch.bfloat16: INT16}


@dataclass(frozen=True, slots=True)
class FactorTypes:
    """Dtypes of scales and offsets, of groups or of blocks.

    Attributes:
        scales: Dtype of scales.
        offsets: Dtype of offsets. None for none.
    """

    scales: torch.dtype
    offsets: torch.dtype | None

    @property
    def name(self) -> str:
        return "_".join(DTYPES[dtype] for dtype in (self.scales, self.offsets) if dtype is not None)

    @property
    def size(self) -> int:
        """Bytes of those of a panel's 32 outputs."""
        return PANEL * sum(dtype.itemsize for dtype in (self.scales, self.offsets) if dtype is not None)

    def load(self, code: Code, place: Value) -> "Factors":
        """Loads scales and offsets that lie one after the other, two vectors of 16 each."""
        scales = [_load(code, place, self.scales, half * LANES) for half in range(2)]
        if self.offsets is None:
            return Factors(scales, None)
        place = place + PANEL * self.scales.itemsize
        return Factors(scales, [_load(code, place, self.offsets, half * LANES) for half in range(2)])


@dataclass(frozen=True, slots=True)
class Factors:
    """Scales and offsets of 32 outputs in float32, two vectors of 16 each. Offsets are None for none."""

    scales: list[Value]
    offsets: list[Value] | None


@dataclass(frozen=True)
class GroupPanels:
    """Panels of weights in groups.

    Attributes:
        words: The stored integers.
        inputs: Inputs of a run.
        types: Dtypes of scales and offsets.
        blocks: Dtypes of those of blocks. None where there are no blocks.
        together: Runs of a block. 1 where there are no blocks.
    """

    words: GroupWords
    inputs: int
    types: FactorTypes
    blocks: FactorTypes | None = None
    together: int = 1

    @property
    def element(self) -> Element:
        return self.words.element

    @property
    def name(self) -> str:
        blocks = "" if self.blocks is None else f"_{self.together}_{self.blocks.name}"
        return f"{self.words.levels.name}_{self.inputs}_{self.types.name}{blocks}_{self.element.name}"

    @property
    def has_offsets(self) -> bool:
        return self.types.offsets is not None

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.inputs // self.words.inputs

    @cached_property
    def run(self) -> int:
        """Bytes of a run."""
        return self.types.size + self.steps * self.words.step

    @cached_property
    def block_head(self) -> int:
        """Bytes of a block before its runs."""
        return 0 if self.blocks is None else self.blocks.size

    @cached_property
    def block(self) -> int:
        """Bytes of a block."""
        return self.block_head + self.together * self.run

    def block_count(self, steps: Value) -> Value:
        """Returns the blocks of a panel.

        Args:
            steps: Words of the element that a row of inputs has.
        """
        return steps // (self.together * self.inputs // self.element.packed)

    def panel_bytes(self, steps: Value) -> Value:
        return self.block_count(steps) * self.block

    def of_block(self, code: Code, block: Value) -> Factors | None:
        """Loads the numbers of a block. None where there are no blocks."""
        return None if self.blocks is None else self.blocks.load(code, block)

    def of_run(self, code: Code, run: Value, block: Factors | None) -> Factors:
        """Loads the scales and offsets of a run, whose block's are given."""
        own = self.types.load(code, run)
        scales = own.scales if block is None else _product(own.scales, block.scales)
        offsets = own.offsets
        if offsets is not None and self.types.offsets is not None and not self.types.offsets.is_floating_point:
            of = scales if block is None else block.offsets
            offsets = offsets if of is None else _product(offsets, of)
        return Factors(scales, offsets)

    def laid(self, groups: "PanelGroups") -> Tensor:
        """Lays weights out. Returns [panels, bytes] uint8."""
        panels, _, width = groups.values.shape
        runs = width // self.inputs
        # Groups of runs: a large group has several.
        of_run = torch.arange(runs) * self.inputs // groups.size
        heads = [_beside(one[:, :, of_run]) for one in (groups.scales, groups.offsets) if one is not None]
        steps = self.words.laid(groups.values).reshape(panels, runs, -1)
        made = torch.cat((*heads, steps), dim=2).view(panels, -1, self.together * self.run)
        blocks = [_beside(one) for one in (groups.block_scales, groups.block_offsets) if one is not None]
        return torch.cat((*blocks, made), dim=2).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class PanelGroups:
    """`GroupWeights` whose outputs are in panels.

    Attributes:
        values: [panels, 32, in] uint8.
        scales: [panels, 32, groups].
        offsets: Likewise, or None.
        block_scales: [panels, 32, blocks], or None.
        block_offsets: Likewise, or None.
        size: Inputs of a group.
    """

    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    block_scales: Tensor | None
    block_offsets: Tensor | None
    size: int


def panels_of(groups: GroupWeights, element: Element) -> GroupPanels | None:
    """Returns the layout of such groups, None where kernels cannot multiply them."""
    words = GroupWords(element, groups.levels)
    inputs = run_inputs(groups, words)
    if inputs is None:
        return None
    types = FactorTypes(groups.scales.dtype, None if groups.offsets is None else groups.offsets.dtype)
    if groups.blocks is None:
        return GroupPanels(words, inputs, types)
    together, offsets = groups.blocks.groups, groups.blocks.offsets
    if inputs != groups.size or groups.values.shape[1] % (inputs * together):
        return None
    blocks = FactorTypes(groups.blocks.scales.dtype, None if offsets is None else offsets.dtype)
    return GroupPanels(words, inputs, types, blocks, together)


def run_inputs(groups: GroupWeights, words: GroupWords) -> int | None:
    """Returns the inputs of a run, None where kernels cannot multiply such groups."""
    width = groups.values.shape[1]
    together = gcd(min(groups.size, width), width)
    if groups.index is not None or (groups.size < width and width % groups.size):
        return None
    for inputs in range(min(together, MOST_INPUTS), LEAST_INPUTS - 1, -1):
        if together % inputs == 0 and inputs % words.inputs == 0:
            return inputs
    return None


def _load(code: Code, address: Value, dtype: torch.dtype, first: int) -> Value:
    """Loads 16 numbers as float32."""
    offset = first * dtype.itemsize
    if dtype == torch.float32:
        return code.load(address, FLOATS, offset)
    if dtype == torch.float16:
        return Value(code, code.builder.fpext(code.load(address, HALVES, offset).ir, FLOATS))
    numbers = code.widened(code.load(address, ir.VectorType(WIDTHS[dtype], LANES), offset), INTS)
    return code.cast(numbers << 16, FLOATS) if dtype == torch.bfloat16 else code.to_float(numbers)


def _product(integers: list[Value], numbers: list[Value]) -> list[Value]:
    return [one * other for one, other in zip(integers, numbers, strict=True)]


def _beside(numbers: Tensor) -> Tensor:
    """Returns the numbers of 32 outputs one after the other: [panels, 32, n] as bytes [panels, n, bytes]."""
    return numbers.transpose(1, 2).contiguous().view(torch.uint8)
