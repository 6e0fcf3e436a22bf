"""Integers in int32 words, with a scale and a zero point for each group of inputs: what GPTQ and AWQ share.

    weight[o, i] = (values[o, i] - zeros[o, group of i]) * scales[o, group of i]

Both store zero points and scales as [groups, out], zero points packed along the outputs. They differ in how the values
are packed, and in the order of integers in a word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from model.errors import CheckpointError
from model.fields import Fields
from model.weight_formats.levels import INT4, INT8, Levels, unpack_bits
from model.weight_formats.scales import kept_scales
from model.weight_formats.stored import Axis, StoredTensor, StoredWeight

WORD = 32  # bits


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Unpacks integers, those in the lowest bits of a word first.

    Args:
        words: [rows, n] int32.
        bits: 4 or 8.

    Returns:
        [rows, n * 32 / bits] uint8.
    """
    # A clone: `contiguous` leaves the strides of a single column as they are, which `view` does not take.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return unpack_bits(octets, bits, words.shape[1] * WORD // bits)


def zero_offsets(offsets: Tensor, bits: int) -> Tensor:
    """Returns offsets that are multiples of scales in the smallest integers that hold those of so many bits."""
    return offsets.to(torch.int8 if bits <= 4 else torch.int16)


def read_group_size(options: Fields) -> int | None:
    """Returns the inputs of a group, None where all inputs of a linear are one (-1). Raises CheckpointError."""
    return None if options.get("group_size", int) == -1 else options.positive("group_size")


@dataclass(frozen=True, slots=True)
class Packing:
    """Sizes of the packed tensors, as config.json says.

    Attributes:
        path: config.json, for errors.
        bits: Bits of an integer: 4 or 8.
        group: Inputs of a group; the last may be smaller. None where all inputs of a linear are one.
        middle: Option which says that all zero points are the middle of the range, as "'sym' is true". They are not
            kept then. Empty where they may be any.
    """

    LEVELS: ClassVar[dict[int, Levels]] = {4: INT4, 8: INT8}

    path: Path
    bits: int
    group: int | None
    middle: str

    @property
    def word(self) -> int:
        """Integers in a word."""
        return WORD // self.bits

    @property
    def levels(self) -> Levels:
        return self.LEVELS[self.bits]

    def groups(self, width: int) -> int:
        """Returns the number of groups of this many inputs."""
        return 1 if self.group is None else -(-width // self.group)

    def check(self, size: int, what: str) -> None:
        """Raises CheckpointError where these outputs or inputs do not fill words."""
        if size % self.word:
            raise CheckpointError(
                f"{self.path}: a linear has {size} {what}, must be a multiple of {self.word}: so many integers of "
                f"{self.bits} bits are packed together"
            )

    def of_groups(self, out: int, width: int, divided: bool) -> tuple[StoredTensor, StoredTensor]:
        """Describes zero points and scales.

        Args:
            out: Outputs of the linear.
            width: Its inputs.
            divided: Whether a cut of the inputs leaves groups out. Else all stay with each part.
        """
        groups = self.groups(width)
        columns = Axis(0, self.group) if divided and self.group is not None else None
        return (
            StoredTensor("qzeros", (groups, out // self.word), torch.int32, Axis(1, self.word), columns),
            StoredTensor("scales", (groups, out), rows=Axis(1), columns=columns),
        )

    def scales_and_offsets(self, weight: StoredWeight, zeros: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the scales and offsets of `GroupWeights`. Offsets are integers: multiples of the scales.

        Products of 16-bit scales with differences of integers are exact in float32. So levels * scales + offsets is
        what (values - zeros) * scales is, bit for bit. With scales in float32 it may differ in the last bits.

        Args:
            weight: The linear, or a part of it.
            zeros: [groups, out] uint8. Zero points.

        Raises:
            CheckpointError: A scale is not finite, or a zero point is not what config.json says.
        """
        scales, middle = kept_scales(weight["scales"].T), -int(self.levels.numbers[0])
        if not scales.is_meta and not torch.isfinite(scales).all():
            raise CheckpointError(f"{weight.name}.scales holds a value that is infinite or not a number")
        if not self.middle:
            return scales, zero_offsets(middle - zeros.T.to(torch.int16), self.bits)
        if not zeros.is_meta and (other := zeros != middle).any():
            raise CheckpointError(
                f"{weight.name}.qzeros holds the zero point {int(zeros[other][0])}; {self.middle} in {self.path}, so "
                f"that all must be {middle}. Does 'quantization_config' belong to these weights? The other value of "
                "this option permits any zero point"
            )
        return scales, None
