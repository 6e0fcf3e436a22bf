"""Choice of the experts that each token of a mixture goes through."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from model.layers import sigmoid

LEAST = 1e-20


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Experts in groups of one size, of which a token uses a few (DeepSeek-V2, 2024).

    Attributes:
        count: The number of groups.
        used: Groups of a token.
        best: 1 or 2. A group's score is the sum of as many of its highest scores.
    """

    count: int
    used: int
    best: int


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Takes the `used` experts with the highest scores (Shazeer et al., 2017).

    A score is the softmax over all experts, or the sigmoid of one expert's logit (DeepSeek-V3, 2024).

    Attributes:
        used: Experts for each token.
        normalised: Whether the weights of a token's experts are scaled to a sum of 1.
        by_sigmoid: Whether scores are sigmoids.
        bias: [experts] float32, added to the scores by which experts are chosen, not to their weights. None without.
        groups: Groups that experts are chosen from. None: from all.
        factor: Factor of all weights.
        least: Weights are divided by no smaller sum (ERNIE 4.5).
        scales: [experts] float32. Factor of each expert's weight, after all else (Gemma 4). None without one.
    """

    used: int
    normalised: bool
    by_sigmoid: bool = False
    bias: Tensor | None = None
    groups: Groups | None = None
    factor: float = 1.0
    least: float = LEAST
    scales: Tensor | None = None

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts.

        Args:
            logits: [tokens, experts] float32.

        Returns:
            Weights [tokens, used] float32, and experts [tokens, used] int64, the highest scores first.
        """
        scores = sigmoid(logits) if self.by_sigmoid else torch.softmax(logits, -1)
        ranks = scores if self.bias is None else scores + self.bias
        if self.groups is not None:
            ranks = ranks.masked_fill(self._left_out(ranks, self.groups), -torch.inf)
        chosen = torch.topk(ranks, self.used, -1).indices
        weights = scores.gather(-1, chosen)
        if self.normalised:
            weights = weights / added(weights.unbind(-1)).clamp(min=self.least).unsqueeze(-1)
        weights = weights * self.factor
        return weights if self.scales is None else weights * self.scales[chosen], chosen

    @staticmethod
    def _left_out(ranks: Tensor, groups: Groups) -> Tensor:
        """Returns [tokens, experts] bool: True for experts of groups that a token does not use."""
        by_group = ranks.unflatten(-1, (groups.count, -1))
        totals = added(by_group.topk(groups.best, -1).values.unbind(-1))
        left_out = torch.ones_like(totals, dtype=torch.bool)
        left_out.scatter_(-1, torch.topk(totals, groups.used, -1).indices, False)
        return left_out.unsqueeze(-1).expand_as(by_group).flatten(-2)


@dataclass(frozen=True, slots=True, eq=False)
class SparseMixer:
    """Takes the best expert, then the best of the others, each with a weight of its own (Liu et al., GRIN, 2024).

    A weight is a softmax over those of the experts not yet taken that are near the best of them. Weights do not sum to
    1.

    Attributes:
        band: A logit is near a larger one if they differ by at most this share of the larger of its own size and that
            one.
    """

    used: ClassVar[int] = 2
    band: float

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts; arguments and results are those of `Routing`."""
        first, one = self._best(logits, logits)
        second, other = self._best(logits.scatter(-1, one, -torch.inf), logits)
        return torch.cat((first, second), -1), torch.cat((one, other), -1)

    def _best(self, left: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weight and the number of the best expert, [tokens, 1] each. `left` has -inf for those taken."""
        highest, best = left.max(-1, keepdim=True)
        far = (highest - logits) / logits.abs().clamp(min=highest) > self.band
        return torch.softmax(left.masked_fill(far, -torch.inf), -1).gather(-1, best), best


AnyRouting = Routing | SparseMixer


def added(parts: Sequence[Tensor]) -> Tensor:
    """Adds tensors from the first to the last, so that the bits do not depend on the number of rows."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
