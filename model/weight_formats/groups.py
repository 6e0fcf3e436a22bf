"""Weights as small integers with a scale, and an offset, for each group of inputs: most quantized checkpoints.

A format unpacks what its files hold to `GroupWeights`. The product of the reference back end is here; other back ends
read the same form.

    weight[o, i] = levels[values[o, i]] * scales[o, group of i] + offsets[o, group of i]

The levels of 4-bit integers are -8 .. 7. So a zero point z in 0 .. 15 is an offset of (8 - z) * scale, which float32
holds exactly where scales have 16 bits. A codebook, as FP4 or FP8 numbers, has other levels. Scales and offsets of K
types (GGUF) are themselves small integers, multiples of a number of a block of groups.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from model.embedding_table import EightBitRows
from model.forward import ForwardBatch
from model.layers import FEWEST_ROWS
from model.weight_formats.format import WeightFormat
from model.weight_formats.levels import INT4, INT8, Levels, pack_values, unpack_values
from model.weight_formats.scratch import BLOCK, Scratch, multiply
from model.weight_formats.stored import StoredWeight, joined

ROWS = 128  # outputs that are unpacked at once are a multiple of it; a divisor is a block of outputs in every format


@dataclass(frozen=True, slots=True, eq=False)
class GroupBlocks:
    """Numbers that the scales and offsets of some groups are multiples of (K types of GGUF).

    Attributes:
        scales: [out, blocks], floating point.
        offsets: Likewise. None where the groups have no offsets.
        groups: Groups of a block.
    """

    scales: Tensor
    offsets: Tensor | None
    groups: int


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeights:
    """Some outputs of a linear.

    Attributes:
        levels: Numbers of the stored integers.
        values: [out, in] uint8. Stored integers.
        scales: [out, groups], floating point. Signed integers where there are `blocks`: multiples of the block's.
        offsets: [out, groups], floating point. Signed integers are multiples of the block's offset or, without
            `blocks`, of the group's scale, as zero points are. None for zeros.
        size: Inputs of a group; the last may be smaller.
        index: [in] int64. Group of each input, where groups are not runs of inputs (GPTQ's desc_act). None for runs.
        blocks: Numbers of blocks of groups. None where groups are in none.
    """

    levels: Levels
    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    size: int
    index: Tensor | None = None
    blocks: GroupBlocks | None = None

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """All tensors, for their bytes and their finiteness."""
        blocks = () if self.blocks is None else (self.blocks.scales, self.blocks.offsets)
        return tuple(one for one in (self.values, self.scales, self.offsets, self.index, *blocks) if one is not None)


def wide_scales(groups: GroupWeights) -> Tensor:
    """Returns the scale of each group, [out, groups] float32: exact where integers multiply numbers of 16 bits."""
    return _times(groups.scales, None if groups.blocks is None else groups.blocks.scales, groups)


def wide_offsets(groups: GroupWeights) -> Tensor | None:
    """Returns the offset of each group, [out, groups] float32, as `wide_scales`. None for zeros."""
    if groups.offsets is None:
        return None
    if groups.blocks is not None:
        return _times(groups.offsets, groups.blocks.offsets, groups)
    wide = groups.offsets.float()
    return wide if groups.offsets.is_floating_point() else wide * groups.scales.float()


def _times(of_groups: Tensor, of_blocks: Tensor | None, groups: GroupWeights) -> Tensor:
    """Multiplies a number of each group with that of its block."""
    wide = of_groups.float()
    if of_blocks is None or groups.blocks is None:
        return wide
    return wide * of_blocks.float().repeat_interleave(groups.blocks.groups, dim=1)[:, : wide.shape[1]]


def flattened(groups: GroupWeights) -> GroupWeights:
    """Returns the same weights with integers of 4 or 8 bits, float scales and offsets, and no blocks."""
    levels, values = groups.levels, groups.values
    if levels.bits not in (4, 8):
        wide = INT4 if levels.bits < 4 else INT8
        levels, values = wide, values + int(levels.numbers[0] - wide.numbers[0])
    scales = groups.scales if groups.blocks is None else wide_scales(groups)
    offsets = groups.offsets
    if offsets is not None and not offsets.is_floating_point():
        offsets = wide_offsets(groups)
    return GroupWeights(levels, values, scales, offsets, groups.size, groups.index)


def form_of(groups: GroupWeights) -> tuple[object, ...]:
    """Returns what two parts of a product must have alike to be one: all but their numbers."""
    blocks = groups.blocks
    of_blocks = (None, None, 0) if blocks is None else (blocks.scales, blocks.offsets, blocks.groups)
    dtypes = [None if one is None else one.dtype for one in (groups.scales, groups.offsets, *of_blocks[:2])]
    return groups.levels, groups.size, groups.index is None, of_blocks[2], *dtypes


def joined_groups(parts: Sequence[GroupWeights]) -> GroupWeights:
    """Puts outputs of one `form_of`, in runs, one below the other."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def all_of(tensors: Sequence[Tensor | None]) -> Tensor | None:
        there = [one for one in tensors if one is not None]
        return joined(there) if there else None

    blocks = first.blocks
    if blocks is not None:
        every = [part.blocks for part in parts if part.blocks is not None]
        scales, offsets = joined([one.scales for one in every]), all_of([one.offsets for one in every])
        blocks = GroupBlocks(scales, offsets, blocks.groups)
    return replace(
        first,
        values=joined([part.values for part in parts]),
        scales=joined([part.scales for part in parts]),
        offsets=all_of([part.offsets for part in parts]),
        blocks=blocks,
    )


class NotGrouped(ValueError):
    """Some linear of a product is not stored in groups. Says which."""


@runtime_checkable
class GroupFormat(WeightFormat, Protocol):
    """A weight format of groups."""

    def groups(self, weight: StoredWeight) -> GroupWeights:
        """Unpacks a linear, or some of its outputs and inputs. On any device, `meta` too.

        Raises:
            CheckpointError: The tensors hold what the format does not allow.
            NotGrouped: It is stored in another way, as a part of a product may be.
        """


def block_outputs(inputs: int) -> int:
    """Returns the outputs of a block: unpacked, it has about `BLOCK` weights."""
    return max(1, BLOCK // (inputs * ROWS)) * ROWS


def blocks_of(weight: StoredWeight) -> Iterator[StoredWeight]:
    """Cuts a linear by outputs, see `block_outputs`."""
    count = block_outputs(weight.inputs)
    for start in range(0, weight.outputs, count):
        yield weight.rows(slice(start, min(start + count, weight.outputs)))


def bring_back(groups: GroupWeights, table: Tensor | None = None) -> Tensor:
    """Computes the weights that groups stand for, [out, in] float32.

    Args:
        groups: Groups.
        table: The levels' numbers as float32 on the device, for levels that are not integers. None to make it.
    """
    if groups.levels.are_integers:
        weights = groups.values.float().add_(groups.levels.numbers[0])
    else:
        table = torch.tensor(groups.levels.numbers, device=groups.values.device) if table is None else table
        weights = table.index_select(0, groups.values.flatten().int()).view(groups.values.shape)
    weights.mul_(_spread(wide_scales(groups), groups))
    offsets = wide_offsets(groups)
    return weights if offsets is None else weights.add_(_spread(offsets, groups))


def _spread(of_groups: Tensor, groups: GroupWeights) -> Tensor:
    """Returns a number of each group, [out, groups], for each input: [out, in]."""
    width = groups.values.shape[1]
    if groups.index is not None:
        return of_groups.index_select(1, groups.index)
    size = min(groups.size, width)  # config.json may say a size that the linear does not have
    return of_groups.repeat_interleave(size, dim=1)[:, :width]


def eight_bit_rows(blocks: Iterable[GroupWeights], rows: int, device: torch.device) -> EightBitRows:
    """Makes rows of an embedding, with the numbers that groups stand for.

    Args:
        blocks: Runs of groups of one size, one below the other. Their levels are integers from -128 to 127.
        rows: Rows of all blocks.
        device: Device of the result.
    """
    made, start = list[Tensor](), 0
    for block in blocks:
        numbers = torch.tensor(block.levels.numbers, device=block.values.device).to(torch.int8)
        values = numbers.index_select(0, block.values.flatten().int()).view(block.values.shape)
        parts = values, wide_scales(block), *([] if (offsets := wide_offsets(block)) is None else [offsets])
        made = made or [torch.empty((rows, part.shape[1]), dtype=part.dtype, device=device) for part in parts]
        for whole, part in zip(made, parts, strict=True):
            whole[start : start + len(part)] = part
        start += len(values)
    return EightBitRows(*made)


class GroupLinear:
    """`model.layers.Linear` with weights in groups, which are dequantized block by block for each product.

    A weight is computed in float32 and rounded once, to the dtype of the product.
    """

    def __init__(
        self,
        form: GroupFormat,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        scratch: Scratch,
        device: torch.device,
    ) -> None:
        """Unpacks the weights and packs them again in one form, a block at a time.

        Args:
            form: Format of the weights.
            weights: See `WeightFormat.product`.
            bias: Bias of all outputs.
            scratch: Room that the products of a model share.
            device: Device of the product.
        """
        self._bias, self._scratch, self._device = bias, scratch, device
        self._on_cpu = device.type == "cpu"
        self.outputs = sum(weight.outputs for weight in weights)
        self._inputs = weights[0].inputs
        self._blocks = [self._kept(form.groups(block)) for weight in weights for block in blocks_of(weight)]
        codebooks = {block.levels for block in self._blocks if not block.levels.are_integers}
        self._tables = {levels: torch.tensor(levels.numbers, device=device) for levels in codebooks}
        scratch.reserve(max(len(block.values) for block in self._blocks) * self._inputs)

    def _kept(self, groups: GroupWeights) -> GroupWeights:
        """Returns groups as they stay in memory: integers packed, see `pack_values`."""
        device, blocks = self._device, groups.blocks
        if blocks is not None:
            blocks = replace(blocks, scales=_put(blocks.scales, device), offsets=_put_some(blocks.offsets, device))
        return replace(
            groups,
            values=pack_values(groups.values, groups.levels).to(device),
            scales=_put(groups.scales, device),
            offsets=_put_some(groups.offsets, device),
            index=_put_some(groups.index, device),
            blocks=blocks,
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for block in self._blocks for tensor in block.kept)

    def __call__(self, x: Tensor, _: ForwardBatch | None = None) -> Tensor:
        """Multiplies x [rows, in]. Returns [rows, out] in x's dtype."""
        rows = len(x)
        if self._on_cpu and rows < FEWEST_ROWS:
            x = F.pad(x, (0, 0, 0, FEWEST_ROWS - rows))
        y = x.new_empty(len(x), self.outputs)
        x, start = x.to(self._scratch.dtype).contiguous(), 0
        for block in self._blocks:
            part = slice(start, start + len(block.values))
            y[:, part] = multiply(x, self._brought_back(block))
            start = part.stop
        if self._bias is not None:
            y += self._bias
        return y[:rows]

    def _brought_back(self, block: GroupWeights) -> Tensor:
        values = unpack_values(block.values, block.levels, self._inputs)
        unpacked = replace(block, values=values)
        return self._scratch.shaped(values.shape).copy_(bring_back(unpacked, self._tables.get(block.levels)))


def _put(numbers: Tensor, device: torch.device) -> Tensor:
    return numbers.contiguous().to(device)


def _put_some(numbers: Tensor | None, device: torch.device) -> Tensor | None:
    return None if numbers is None else _put(numbers, device)


class GroupProducts:
    """Makes the products of one model, which share a `Scratch`. A format of groups has one."""

    def __init__(self) -> None:
        self._scratch: Scratch | None = None

    def product(
        self,
        form: GroupFormat,
        weights: Sequence[StoredWeight],
        bias: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> GroupLinear:
        """Makes a product, see `WeightFormat.product`."""
        if self._scratch is None:
            self._scratch = Scratch(dtype, device)
        return GroupLinear(form, weights, bias, self._scratch, device)
