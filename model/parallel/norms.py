"""Norms over what several ranks have parts of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.layers import RMSNorm
from model.parallel.collective import Collective


@dataclass(frozen=True, slots=True, eq=False)
class SharedGroup:
    """A group of elements of a token, over which a norm is, and of which several ranks have parts.

    Attributes:
        number: Index of the group.
        groups: Groups of all ranks, at most 16.
        share: Factor of a rank's sum of squares, so that the sum over the ranks is the mean square of the group.
        collective: Adds up what the ranks have.
    """

    number: int
    groups: int
    share: float
    collective: Collective

    def mean_square(self, x: Tensor) -> Tensor:
        """Returns [tokens, 1] float32 the group's mean square; x [tokens, width] float32 is the rank's part of it."""
        parts = x.new_zeros(len(x), self.groups)
        parts[:, self.number] = x.square().sum(-1) * self.share
        return self.collective.sum(parts)[:, self.number : self.number + 1]


@dataclass(frozen=True, slots=True, eq=False)
class TogetherOnRanks:
    """RMSNorm over all heads of a token as one vector, of which each rank has some.

    Attributes:
        norm: The norm, with the weights of the rank's heads.
        part: What the rank has of the vector.
    """

    norm: RMSNorm
    part: SharedGroup

    @staticmethod
    def of(norm: RMSNorm, mine: slice, collective: Collective) -> "TogetherOnRanks":
        """Returns the rank's part of a norm; `mine` are its elements, which several ranks may have."""
        weight = norm.weight[mine]
        part = SharedGroup(0, 1, 1.0 / (collective.shard.size * len(weight)), collective)
        return TogetherOnRanks(RMSNorm(weight, norm.eps), part)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises [tokens, heads, head_dim], the rank's heads."""
        flat = x.flatten(1).float()
        made = flat * torch.rsqrt(self.part.mean_square(flat) + self.norm.eps) * self.norm.weight.float()
        return made.to(x.dtype).view(x.shape)
