"""The product of a linear whose weights are in groups: by a kernel for few rows, by torch in blocks for many."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from model.forward import ForwardBatch
from model.gpu.formats import NO_ASSEMBLY, capability_of, format_of
from model.gpu.group_product import E2M1_BITS, INTEGERS, TABLE, multiply_groups, unpack_groups
from model.gpu.line_product import LEAST_SCALED, conversion, join_sums, multiply_lines
from model.weight_formats.groups import (
    ROWS,
    GroupFormat,
    GroupWeights,
    NotGrouped,
    blocks_of,
    flattened,
)
from model.weight_formats.levels import E2M1, E4M3, Levels
from model.weight_formats.scratch import Scratch, multiply
from model.weight_formats.stored import StoredWeight

LINE = 64
"""Bytes of a line, which are as many as the inputs that are multiplied at once, see `model.gpu.line_product`.

Half as many where a linear's inputs would not fill the last step, and fewer where a group of integers has fewer inputs.
"""
MOST_ROWS = 64
"""Rows that the kernel multiplies. Each tile of rows reads the weights again, and computes each of them again.

On an H200 64 rows of integers take half as long as 256, whose weights are dequantized, and one row a third.
"""
TILE_ROWS, TILE_OUTPUTS, WARPS, STAGES = 16, 32, 4, 6
"""Sizes of a program. They never depend on the rows, see `GroupProduct`.

16 rows are the fewest of a matrix product. With 32 outputs, 4,096 of them are 128
programs, about one for each multiprocessor of a large GPU. Stages have 2 KB of weights each.
"""
LINE_OUTPUTS, LINE_WARPS, LINE_STAGES = 64, 4, 5
"""Sizes of a program that multiplies lines. Its rows are the fewest of 16, 32 and 64 that hold all."""
PROGRAMS, LEAST_STEPS = 512, 8
"""Programs that fill a GPU, about four for each multiprocessor of a large one, and the fewest steps of a program.

Where a product has fewer programs, several divide the steps of an output. That does not depend on the rows.
"""
UNPACKED = 2**25
"""Weights that are dequantized at once for many rows, 64 MiB in 16 bits: 8,192 outputs of 4,096 inputs. Few blocks are
few launches, and products that fill a GPU. On an H200 that takes 0.2 ms for 117 million weights.
"""
JOINED = 512  # outputs whose sums a program joins
FIRST_OF_BYTES = -128  # first level of bytes that are converted to bfloat16 by their bits
KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True, eq=False)
class GroupNumbers:
    """A number of each group, scales or offsets.

    Attributes:
        stored: See `pack_pairs`.
        dtype: Dtype of the numbers: float16, bfloat16 or float32.
        groups: Groups of an output.
    """

    stored: Tensor
    dtype: torch.dtype
    groups: int

    @classmethod
    def empty(cls, like: Tensor, outputs: int, device: torch.device) -> "GroupNumbers":
        """Makes room for numbers as these, [out, groups]."""
        dtype = like.dtype if like.dtype in KINDS else torch.float32
        rows = pack_pairs(like[:1].to(dtype)).shape[0]
        kind = torch.float32 if dtype == torch.float32 else torch.int32
        return cls(torch.empty((rows, outputs), dtype=kind, device=device), dtype, like.shape[1])

    def put(self, numbers: Tensor, part: slice) -> None:
        self.stored[:, part] = pack_pairs(numbers.to(self.dtype)).to(self.stored.device)

    def unpacked(self, part: slice) -> Tensor:
        """Returns [out, groups]."""
        return self.stored[:, part].T.flatten().view(self.dtype).view(part.stop - part.start, -1)[:, : self.groups]


def pack_pairs(numbers: Tensor) -> Tensor:
    """Packs numbers so that neighbouring outputs are read together, and no less than 4 bytes of each.

    Args:
        numbers: [out, groups] float16, bfloat16 or float32.

    Returns:
        [groups / 2, out] int32, the number of the first group of each pair in the lower bits; [groups, out] if the
            numbers are float32.
    """
    if numbers.dtype == torch.float32:
        return numbers.T
    # Flat: torch takes any stride of a single output as contiguous, and views no other type through it.
    pairs = F.pad(numbers, (0, numbers.shape[1] % 2)).flatten().view(torch.int32)
    return pairs.view(len(numbers), -(-numbers.shape[1] // 2)).T


@dataclass(frozen=True, slots=True, eq=False)
class PackedGroups:
    """Outputs that one launch computes.

    Attributes:
        levels: Numbers of the stored integers.
        step: Inputs of a step.
        values: [steps, out, step * bits / 8] uint8. See `pack_steps`.
        scales: Scales.
        offsets: Offsets. None for zeros.
        size: Inputs of a group; the last may be smaller.
        index: [in] int32. Group of each input, where groups are not runs of inputs. None for runs.
    """

    levels: Levels
    step: int
    values: Tensor
    scales: GroupNumbers
    offsets: GroupNumbers | None
    size: int
    index: Tensor | None

    @classmethod
    def empty(cls, like: GroupWeights, outputs: int, inputs: int, device: torch.device) -> "PackedGroups":
        """Makes room for outputs in groups as these."""
        bits = like.levels.bits
        step = step_of(inputs, bits, _longest_line(like))
        return cls(
            like.levels,
            step,
            torch.empty((-(-inputs // step), outputs, step * bits // 8), dtype=torch.uint8, device=device),
            GroupNumbers.empty(like.scales, outputs, device),
            None if like.offsets is None else GroupNumbers.empty(like.offsets, outputs, device),
            like.size,
            None if like.index is None else like.index.to(device, torch.int32),
        )

    @property
    def outputs(self) -> int:
        return self.values.shape[1]

    @property
    def together(self) -> int:
        """Inputs that the kernel multiplies at once."""
        return self.values.shape[2]

    @property
    def run(self) -> int:
        """Neighbouring inputs that have one scale, as the kernel reads them: the largest power of two."""
        if self.index is not None:
            return 1
        return self.together if self.scales.groups == 1 else min(self.size & -self.size, self.together)

    @property
    def has_lines(self) -> bool:
        """Whether `multiply_lines` takes them: integers, of which all of a line have one scale."""
        if not self.levels.are_integers or self.index is not None:
            return False
        if self.scales.groups == 1:
            return self.offsets is None
        return self.run == self.together >= LEAST_SCALED

    @property
    def nbytes(self) -> int:
        offsets = None if self.offsets is None else self.offsets.stored
        kept = (self.values, self.scales.stored, offsets, self.index)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)

    def put(self, groups: GroupWeights, start: int) -> None:
        """Packs groups to the outputs from `start` on."""
        part = slice(start, start + len(groups.values))
        self.values[:, part] = pack_steps(groups.values, groups.levels.bits, self.step).to(self.values.device)
        self.scales.put(groups.scales, part)
        if self.offsets is not None and groups.offsets is not None:
            self.offsets.put(groups.offsets, part)

    def unpacked(self, part: slice, inputs: int) -> GroupWeights:
        """Returns these outputs in the common form."""
        return GroupWeights(
            self.levels,
            unpack_steps(self.values[:, part], self.levels.bits, inputs),
            self.scales.unpacked(part),
            None if self.offsets is None else self.offsets.unpacked(part),
            self.size,
            self.index,
        )


def _longest_line(like: GroupWeights) -> int:
    """Returns the most inputs of a line: those of one scale where that lets `multiply_lines` take them, else LINE."""
    run = like.size & -like.size
    one_scale = not like.levels.are_integers or like.index is not None or like.scales.shape[1] == 1
    return LINE if one_scale or run < LEAST_SCALED else min(run, LINE)


def step_of(inputs: int, bits: int, line: int = LINE) -> int:
    """Returns the inputs of a step. inputs: of the linear. bits: 4 or 8. line: most bytes of a line."""
    step = line * 8 // bits
    return step if inputs % step == 0 else step // 2


def pack_steps(values: Tensor, bits: int, step: int) -> Tensor:
    """Packs stored integers as `model.gpu.group_product` reads them.

    Args:
        values: [out, in] uint8.
        bits: 4 or 8.
        step: Inputs of a step.

    Returns:
        [steps, out, step * bits / 8] uint8. Inputs past the end are 0.
    """
    steps = F.pad(values, (0, -values.shape[1] % step)).unflatten(1, (-1, step)).transpose(0, 1)
    if bits == 8:
        return steps
    first, second = steps.chunk(2, dim=2)
    return first | second << 4


def unpack_steps(packed: Tensor, bits: int, width: int) -> Tensor:
    """Undoes `pack_steps`. Returns [out, width] uint8."""
    steps = packed if bits == 8 else torch.cat((packed & 15, packed >> 4), dim=2)
    return steps.transpose(0, 1).flatten(1)[:, :width]


class GroupProduct:
    """`model.weight_formats.groups.GroupLinear` whose products with few rows are a kernel's.

    Up to MOST_ROWS rows a row's bits do not depend on the number of rows, nor on what they are. With more rows, which
    torch multiplies, they agree within rounding, and may depend on that number. Weights are rounded once to the dtype
    of the product, but for few rows with lines, see `model.gpu.line_product`, where they are not rounded.

    Attributes:
        inputs: Inputs.
        outputs: Outputs of all parts.
        parts: The weights.
        bias: [outputs]. None without one.
        stored_format: Format of the stored integers, see `model.gpu.group_product`.
        table: Levels of the stored integers, float32. None where they are integers.
    """

    def __init__(
        self,
        form: GroupFormat,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """Unpacks the weights and packs them again, a block at a time.

        Args:
            form: Format of the weights.
            weights: See `WeightFormat.product`.
            bias: Bias of all outputs.
            dtype: Dtype of the product.
            scratch: Room that the products of a model share.
            device: Device of the product.

        Raises:
            NotGrouped: The weights are stored in several ways.
        """
        if len({_first(form, weight).levels for weight in weights}) > 1:
            raise NotGrouped("parts of a product are stored in several types")
        self.bias, self._dtype, self._scratch = bias, dtype, scratch
        self.outputs, self.inputs = sum(weight.outputs for weight in weights), weights[0].inputs
        self.parts = list(_packed_parts(form, weights, device))
        levels = self.parts[0].levels
        self.stored_format = _stored_format(levels, device)
        self.table = None if levels.are_integers else torch.tensor(levels.numbers, device=device)
        self._device, self._conversion = device, conversion_for(levels, dtype, device)
        self._unpacked = unpacked_outputs(self.inputs)
        scratch.reserve(min(self._unpacked, max(part.outputs for part in self.parts)) * self.inputs)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def kind(self) -> tuple[object, ...]:
        """All that its kernels are compiled for: products of one kind have the same kernels."""
        parts = tuple(
            (one.outputs, one.levels, one.step, one.size, one.scales.dtype, one.scales.groups, one.index is None,
             None if one.offsets is None else one.offsets.dtype)
            for one in self.parts
        )  # fmt: skip
        return self.inputs, self._dtype, self.bias is None, parts

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        y, start = x.new_empty(len(x), self.outputs), 0
        few = len(x) <= MOST_ROWS
        x = x.to(self._dtype if few else self._scratch.dtype).contiguous()
        for part in self.parts:
            place = slice(start, start + part.outputs)
            if few:
                self._launch(x, part, y[:, place], None if self.bias is None else self.bias[place])
            else:
                self._by_blocks(x, part, y[:, place])
            start = place.stop
        return y if few or self.bias is None else y.add_(self.bias)

    def _launch(self, x: Tensor, part: PackedGroups, y: Tensor, bias: Tensor | None) -> None:
        if part.has_lines:
            self._multiply_lines(x, part, y, bias)
            return
        scales, offsets, index = part.scales, part.offsets, part.index
        grid = (triton.cdiv(len(x), TILE_ROWS), triton.cdiv(part.outputs, TILE_OUTPUTS))
        multiply_groups[grid](
            y, x, part.values, scales.stored, (scales if offsets is None else offsets).stored,
            part.values if index is None else index, part.values if self.table is None else self.table,
            x if bias is None else bias, len(x), part.outputs, self.inputs, scales.groups, y.stride(0),
            FORMAT=self.stored_format, BITS=part.levels.bits, FIRST=part.levels.numbers[0],
            SIZE=0 if scales.groups == 1 else part.size, RUN=part.run, STEP=part.step, ROWS=TILE_ROWS,
            OUTS=TILE_OUTPUTS, SCALES=KINDS[scales.dtype], OFFSETS=None if offsets is None else KINDS[offsets.dtype],
            INDEXED=index is not None, BIAS=bias is not None, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip

    def _multiply_lines(self, x: Tensor, part: PackedGroups, y: Tensor, bias: Tensor | None) -> None:
        scales, offsets, first, steps = part.scales, part.offsets, int(part.levels.numbers[0]), len(part.values)
        rows = 16 if len(x) <= 16 else 32 if len(x) <= 32 else 64
        tiles = triton.cdiv(part.outputs, LINE_OUTPUTS)
        together = triton.cdiv(steps, max(1, min(PROGRAMS // tiles, steps // LEAST_STEPS)))
        parts = triton.cdiv(steps, together)
        sums = y if parts == 1 else x.new_empty((parts, len(x), part.outputs), dtype=torch.float32)
        multiply_lines[triton.cdiv(len(x), rows), tiles, parts](
            sums, x, part.values, scales.stored, (scales if offsets is None else offsets).stored,
            x if bias is None else bias, len(x), part.outputs, self.inputs, sums.stride(-2), BITS=part.levels.bits,
            FIRST=first, SIZE=0 if scales.groups == 1 else part.size,
            CONVERSION=self._conversion, STEPS=together, STEP=part.step, ROWS=rows,
            OUTS=LINE_OUTPUTS, SCALES=KINDS[scales.dtype], OFFSETS=None if offsets is None else KINDS[offsets.dtype],
            BIAS=bias is not None and parts == 1, num_warps=LINE_WARPS, num_stages=LINE_STAGES,
        )  # fmt: skip
        if parts > 1:
            join_sums[len(x), triton.cdiv(part.outputs, JOINED)](
                y, sums, x if bias is None else bias, len(x), part.outputs, y.stride(0), PARTS=parts, OUTS=JOINED,
                BIAS=bias is not None,
            )  # fmt: skip

    def run_all_rows(self, most: int) -> None:
        """Runs products with up to `most` rows so that all kernels are compiled."""
        for rows in (1, 17, 33, MOST_ROWS + 1):
            if rows <= most:
                self(torch.zeros((rows, self.inputs), dtype=self._dtype, device=self._device))

    def _by_blocks(self, x: Tensor, part: PackedGroups, y: Tensor) -> None:
        for start in range(0, part.outputs, self._unpacked):
            block = slice(start, min(start + self._unpacked, part.outputs))
            y[:, block] = multiply(x, self.unpack(part, block))

    def unpack(self, part: PackedGroups, block: slice) -> Tensor:
        """Returns weights as floats, in the scratch.

        Args:
            part: One of `parts`.
            block: Outputs of the part, no more than `unpacked_outputs`.
        """
        scales, offsets, index, count = part.scales, part.offsets, part.index, block.stop - block.start
        weights = self._scratch.shaped(torch.Size((count, self.inputs)))
        unpack_groups[triton.cdiv(count, TILE_OUTPUTS), len(part.values)](
            weights, part.values, scales.stored, (scales if offsets is None else offsets).stored,
            part.values if index is None else index, part.values if self.table is None else self.table, part.outputs,
            self.inputs, scales.groups, block.start, block.stop, FORMAT=self.stored_format, BITS=part.levels.bits,
            FIRST=part.levels.numbers[0], SIZE=0 if scales.groups == 1 else part.size, RUN=part.run, STEP=part.step,
            OUTS=TILE_OUTPUTS, SCALES=KINDS[scales.dtype], OFFSETS=None if offsets is None else KINDS[offsets.dtype],
            INDEXED=index is not None, num_warps=WARPS,
        )  # fmt: skip
        return weights


def conversion_for(levels: Levels, dtype: torch.dtype, device: torch.device) -> str:
    """Returns the instructions that convert levels to a dtype on a device, "" if there are none."""
    bits, half = levels.bits, dtype == torch.float16
    takes_them = device.type == "cuda" and torch.version.hip is None and capability_of(device) < NO_ASSEMBLY
    if not takes_them or not levels.are_integers or dtype == torch.float32:
        return ""
    first = int(levels.numbers[0])
    return conversion(bits, first, half) if bits == 4 or half or first == FIRST_OF_BYTES else ""


def unpacked_outputs(inputs: int) -> int:
    """Returns the outputs that are dequantized at once for many rows. inputs: of the linear."""
    return max(1, UNPACKED // (inputs * ROWS)) * ROWS


def _packed_parts(form: GroupFormat, weights: Sequence[StoredWeight], device: torch.device) -> Iterator[PackedGroups]:
    """Packs weights. Those that follow each other and have groups of one kind become one part."""

    def kind(numbered: tuple[int, StoredWeight]) -> tuple[object, ...]:
        """Returns what a launch has once. An index is a linear's own."""
        one = _first(form, numbered[1])
        offsets = None if one.offsets is None else one.offsets.dtype
        return one.size, one.scales.shape[1], one.scales.dtype, offsets, -1 if one.index is None else numbered[0]

    for _, same in groupby(enumerate(weights), kind):
        together = [weight for _, weight in same]
        outputs = sum(weight.outputs for weight in together)
        made = PackedGroups.empty(_first(form, together[0]), outputs, together[0].inputs, device)
        start = 0
        for block in (block for weight in together for block in blocks_of(weight)):
            made.put(flattened(form.groups(block)), start)
            start += block.outputs
        yield made


def _first(form: GroupFormat, weight: StoredWeight) -> GroupWeights:
    """Returns the first outputs, as the kernel takes them."""
    return flattened(form.groups(weight.rows(slice(0, min(ROWS, weight.outputs)))))


def _stored_format(levels: Levels, device: torch.device) -> int:
    """Returns the format of stored integers, see `model.gpu.group_product`."""
    if levels == E2M1:
        return int(E2M1_BITS.value)
    if levels == E4M3:
        return format_of(torch.float8_e4m3fn, capability_of(device))
    return int((INTEGERS if levels.are_integers else TABLE).value)
