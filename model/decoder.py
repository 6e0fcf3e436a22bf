"""The decoder that all families are: embedding, layers, norm, output layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model.attention.backend import AttentionBackend
from model.blocks import Norm, Step
from model.layers import Product, soft_capped
from model.vision.encoder import VisionEncoder

Layer = Callable[[Tensor, Step], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Those of a step. places: int64 [n] packed offsets, each once. features: [n, hidden], what a `VisionEncoder` has
    made for them, in the model's dtype.
    """

    places: Tensor
    features: Tensor


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

    def __call__(self, tokens: Tensor, positions: Tensor, images: ImageFeatures | None = None) -> Tensor:
        """tokens, positions: [tokens] -> [tokens, hidden]. Tokens in places of images may be any number, and are not
        scaled: features come as they enter the first layer.
        """
        if images is not None:
            tokens = tokens.index_fill(0, images.places, 0)
        x = F.embedding(tokens, self.tokens)
        if self.scale is not None:
            x = x * float(torch.tensor(self.scale, dtype=x.dtype))  # a number, as a graph can be made of it
        if self.projection is not None:
            x = self.projection(x)
        if images is not None:
            x = x.index_copy(0, images.places, images.features)
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset, self.positions)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """soft_cap: of the logits. vision: makes features of images, None for a model of text alone. See
    `model.architectures.registry.Model`.
    """

    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm
    head: Callable[[Tensor], Tensor]
    soft_cap: float | None = None
    vision: VisionEncoder | None = None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        wanted: Tensor,
        attention: AttentionBackend,
        plan: Any,
        images: ImageFeatures | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """tokens, positions: [tokens]. wanted: [n] packed offsets. images: what stands in their places instead of
        tokens. Returns float32 logits [n, vocabulary] of the wanted ones, in `out` where it is given.
        """
        step = Step(positions, attention, plan)
        x = self.embedding(tokens, positions, images)
        for layer in self.layers:
            x = layer(x, step)
        logits = self.head(self.norm(x[wanted]))
        if self.soft_cap is not None:
            logits = soft_capped(logits.float(), self.soft_cap)
        return logits.float() if out is None else out.copy_(logits)
