"""The decoder that all families are: embedding, layers, norm, output layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model.blocks import Norm
from model.forward import ForwardBatch, ForwardOutput
from model.layers import Product, soft_capped
from model.vision.encoder import VisionEncoder

Layer = Callable[[Tensor, ForwardBatch], Tensor]


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

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Returns [tokens, hidden]. Features of images are not scaled: they come as they enter the first layer."""
        tokens, images = batch.tokens, batch.images
        if images is not None:
            tokens = tokens.index_fill(0, images.places, 0)
        x = F.embedding(tokens, self.tokens)
        if self.scale is not None:
            x = x * float(torch.tensor(self.scale, dtype=x.dtype))  # a number, as a graph can be made of it
        if self.projection is not None:
            x = self.projection(x, batch)
        if images is not None:
            x = x.index_copy(0, images.places, images.features)
        if self.positions is not None:
            x = x + F.embedding(batch.positions[0] + self.offset, self.positions)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A model, layer by layer. See `model.forward.Model`.

    Attributes:
        soft_cap: Bound of the logits (Gemma 2), None for none.
        vision: Makes features of images. None for a model of text alone.
    """

    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm
    head: Product
    soft_cap: float | None = None
    vision: VisionEncoder | None = None

    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        """Computes the batch.

        Args:
            batch: Tokens and where their KV goes.
            out: [n, vocabulary] float32 for the logits. None allocates it.
        """
        x = self.embedding(batch)
        for layer in self.layers:
            x = layer(x, batch)
        hidden = self.norm(x[batch.wanted])
        logits = self.head(hidden, batch.select(batch.wanted))
        if self.soft_cap is not None:
            logits = soft_capped(logits.float(), self.soft_cap)
        logits = logits.float() if out is None else out.copy_(logits)
        return ForwardOutput(logits, hidden if batch.hidden else None)
