"""The decoder that all families are: embedding, layers, norm, output layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from model.attention.backend import AttentionBackend
from model.blocks import Norm, Step
from model.layers import Product, soft_capped

Layer = Callable[[Tensor, Step], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """tokens: [vocabulary, width]. scale: of them. positions: [context + offset, hidden] learned ones, of which the
    first `offset` are not used. projection: from width to hidden.
    """

    tokens: Tensor
    scale: float | None = None
    positions: Tensor | None = None
    offset: int = 0
    projection: Product | None = None

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions: [tokens] -> [tokens, hidden]."""
        x = F.embedding(tokens, self.tokens)
        if self.scale is not None:
            x = x * x.new_tensor(self.scale)
        if self.projection is not None:
            x = self.projection(x)
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset, self.positions)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """soft_cap: of the logits. See `model.architectures.registry.Model`."""

    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm
    head: Callable[[Tensor], Tensor]
    soft_cap: float | None = None

    def forward(
        self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: AttentionBackend, plan: Any
    ) -> Tensor:
        """tokens, positions: [tokens]. wanted: [n] packed offsets. Returns float32 logits [n, vocabulary] of those."""
        step = Step(positions, attention, plan)
        x = self.embedding(tokens, positions)
        for layer in self.layers:
            x = layer(x, step)
        logits = self.head(self.norm(x[wanted])).float()
        return logits if self.soft_cap is None else soft_capped(logits, self.soft_cap)
