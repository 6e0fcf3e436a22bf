"""Norms over the heads of all ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.layers import RMSNorm
from model.parallel.collective import Collective


@dataclass(frozen=True, slots=True, eq=False)
class TogetherOnRanks:
    """RMSNorm over all heads of a token as one vector, of which each rank has some.

    Attributes:
        norm: The norm, with the weights of the rank's heads.
        collective: Adds up the squares of all ranks.
    """

    norm: RMSNorm
    collective: Collective

    @property
    def share(self) -> float:
        """Factor of a rank's sum of squares. It is right too where several ranks have the same heads."""
        return 1.0 / (self.collective.shard.size * len(self.norm.weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalises [tokens, heads, head_dim], the rank's heads."""
        flat = x.flatten(1).float()
        variance = self.collective.sum(flat.square().sum(-1, keepdim=True) * self.share)
        made = flat * torch.rsqrt(variance + self.norm.eps) * self.norm.weight.float()
        return made.to(x.dtype).view(x.shape)
