"""Weights as small integers with a scale, and an offset, for each group of inputs: most quantized checkpoints.

A format unpacks what its files hold to `GroupWeights`. The product of the reference back end is here; other back ends
read the same form.

    weight[o, i] = levels[values[o, i]] * scales[o, group of i] + offsets[o, group of i]

The levels of 4-bit integers are -8 .. 7. So a zero point z in 0 .. 15 is an offset of (8 - z) * scale, which float32
holds exactly where scales have 16 bits. A codebook, as FP4 or FP8 numbers, has other levels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from model.forward import ForwardBatch
from model.layers import FEWEST_ROWS
from model.weight_formats.format import WeightFormat
from model.weight_formats.scratch import BLOCK, Scratch, multiply
from model.weight_formats.stored import StoredWeight

ROWS = 128  # outputs that are unpacked at once are a multiple of it; a divisor is a block of outputs in every format


@dataclass(frozen=True, slots=True)
class Levels:
    """Numbers that stored integers stand for, before scales.

    Attributes:
        name: Name in the field, as int4 or e2m1.
        numbers: Number of each stored integer; 16 or 256 of them.
    """

    name: str
    numbers: tuple[float, ...]

    @property
    def bits(self) -> int:
        """Bits of a stored integer: 4 or 8."""
        return 4 if len(self.numbers) == 16 else 8

    @property
    def are_integers(self) -> bool:
        """Whether the levels are integers that follow each other."""
        return self.numbers == tuple(self.numbers[0] + i for i in range(len(self.numbers)))


def _float8() -> tuple[float, ...]:
    return tuple(torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float().tolist())


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INT4 = Levels("int4", tuple(float(i) for i in range(-8, 8)))
UINT4 = Levels("uint4", tuple(float(i) for i in range(16)))
INT8 = Levels("int8", tuple(float(i) for i in range(-128, 128)))
E2M1 = Levels("e2m1", (*_E2M1, *(-number for number in _E2M1)))
E4M3 = Levels("e4m3", _float8())


@dataclass(frozen=True, slots=True, eq=False)
class GroupWeights:
    """Some outputs of a linear.

    Attributes:
        levels: Numbers of the stored integers.
        values: [out, in] uint8. Stored integers.
        scales: [out, groups], floating point.
        offsets: [out, groups], floating point. None for zeros.
        size: Inputs of a group; the last may be smaller.
        index: [in] int64. Group of each input, where groups are not runs of inputs (GPTQ's desc_act). None for runs.
    """

    levels: Levels
    values: Tensor
    scales: Tensor
    offsets: Tensor | None
    size: int
    index: Tensor | None = None


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


def pack_values(values: Tensor, bits: int) -> Tensor:
    """Packs integers of 4 bits in pairs, the first in the lower half of a byte.

    Args:
        values: [out, in] uint8.
        bits: 4 or 8. Integers of 8 bits stay as they are.
    """
    if bits == 8:
        return values
    if values.shape[1] % 2:
        values = F.pad(values, (0, 1))
    return values[:, ::2] | values[:, 1::2] << 4


def unpack_values(packed: Tensor, bits: int, width: int) -> Tensor:
    """Undoes `pack_values`. Returns [out, width] uint8."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)[:, :width]


def in_8_bits(parts: Sequence[GroupWeights]) -> list[GroupWeights]:
    """Gives parts of one product the same levels, groups of the same size, and all of them offsets.

    Args:
        parts: Weights with the same inputs, whose levels are integers and whose groups are runs.

    Raises:
        NotGrouped: Some are not.
    """
    if any(part.index is not None or not part.levels.are_integers for part in parts):
        raise NotGrouped("parts of a product have codebooks or groups that are no runs, and are in several formats")
    size = gcd(*(part.size for part in parts))
    made = []
    for part in parts:
        values = part.values + int(part.levels.numbers[0] - INT8.numbers[0])
        groups, times = -(-values.shape[1] // size), part.size // size
        scales = part.scales.float().repeat_interleave(times, dim=1)[:, :groups]
        offsets = torch.zeros_like(scales)
        if part.offsets is not None:
            offsets = part.offsets.float().repeat_interleave(times, dim=1)[:, :groups]
        made.append(GroupWeights(INT8, values, scales, offsets, size))
    return made


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
    weights.mul_(_spread(groups.scales, groups))
    return weights if groups.offsets is None else weights.add_(_spread(groups.offsets, groups))


def _spread(of_groups: Tensor, groups: GroupWeights) -> Tensor:
    """Returns a value of each group, [out, groups], for each input: float32 [out, in]."""
    width, wide = groups.values.shape[1], of_groups.float()
    if groups.index is not None:
        return wide.index_select(1, groups.index)
    size = min(groups.size, width)  # config.json may say a size that the linear does not have
    return wide.repeat_interleave(size, dim=1)[:, :width]


class GroupLinear:
    """`model.layers.Linear` with weights in groups, which are brought back block by block for each product.

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
        """Returns groups as they stay in memory: integers of 4 bits in pairs."""
        to = self._device
        return GroupWeights(
            groups.levels,
            pack_values(groups.values, groups.levels.bits).to(to),
            groups.scales.contiguous().to(to),
            None if groups.offsets is None else groups.offsets.contiguous().to(to),
            groups.size,
            None if groups.index is None else groups.index.to(to),
        )

    @property
    def nbytes(self) -> int:
        kept = [(one.values, one.scales, one.offsets, one.index) for one in self._blocks]
        return sum(tensor.nbytes for tensors in kept for tensor in tensors if tensor is not None)

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
        values = unpack_values(block.values, block.levels.bits, self._inputs)
        unpacked = GroupWeights(block.levels, values, block.scales, block.offsets, block.size, block.index)
        return self._scratch.shaped(values.shape).copy_(bring_back(unpacked, self._tables.get(block.levels)))


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
