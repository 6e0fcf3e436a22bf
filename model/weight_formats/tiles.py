"""Inputs that stand head by head, in the order of llama.cpp and in that of the hub.

Several value heads of a gated delta rule share a key head. The hub has them beside each other. llama.cpp (Qwen 3.5) has
the first of each key head, then the second of each, and so on.
"""

from dataclasses import replace
from math import gcd
from typing import NamedTuple

from torch import Tensor

from model.errors import CheckpointError
from model.weight_formats.groups import GroupBlocks, GroupWeights


class HeadTiles(NamedTuple):
    """Heads of some inputs or outputs.

    Attributes:
        key_heads: The number of key heads.
        each: Value heads that share one.
        dim: Elements of a value head.
    """

    key_heads: int
    each: int
    dim: int

    @property
    def width(self) -> int:
        return self.key_heads * self.each * self.dim

    def together(self, tensor: Tensor, dimension: int) -> Tensor:
        """Puts the heads of a dimension that share a key head beside each other."""
        apart = tensor.unflatten(dimension, (self.each, self.key_heads, -1))
        return apart.transpose(dimension, dimension + 1).flatten(dimension, dimension + 2)


def inputs_together(groups: GroupWeights, tiles: HeadTiles, name: str) -> GroupWeights:
    """Puts the inputs of a linear in the hub's order. Blocks of several heads are cut, each part with its numbers.

    Raises:
        CheckpointError: A group has inputs of several heads, or only some of the inputs are here.
    """
    if groups.values.shape[1] != tiles.width or tiles.dim % groups.size:
        raise CheckpointError(
            f"{name}: its {groups.values.shape[1]} inputs in groups of {groups.size} are no {tiles.each} x "
            f"{tiles.key_heads} heads of {tiles.dim}, which must be put in another order"
        )

    def together(tensor: Tensor | None, times: int = 1) -> Tensor | None:
        return None if tensor is None else tiles.together(tensor.repeat_interleave(times, 1), 1)

    blocks = groups.blocks
    if blocks is not None:
        inputs = groups.size * blocks.groups
        part = gcd(inputs, tiles.dim)
        scales = tiles.together(blocks.scales.repeat_interleave(inputs // part, 1), 1)
        blocks = GroupBlocks(scales, together(blocks.offsets, inputs // part), part // groups.size)
    return replace(
        groups,
        values=tiles.together(groups.values, 1),
        scales=tiles.together(groups.scales, 1),
        offsets=together(groups.offsets),
        blocks=blocks,
    )
