"""The decoder that every architecture fills in: embedding, layers, norm, output layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from model.blocks import Norm
from model.embedding_table import EmbeddingTable
from model.forward import ForwardBatch, ForwardOutput, ImageEncoder, ImageFeatures, Layer
from model.layer_inputs import LayerInputs
from model.layers import Product, soft_capped


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Token and position embeddings.

    Attributes:
        tokens: Table of token embeddings.
        scale: Factor of token embeddings. None for none.
        positions: [context + offset, hidden]. Learned position embeddings; the first `offset` are not used.
        projection: Product from width to hidden. None where they are equal.
        norm: Norm of token embeddings (BLOOM). None without one.
    """

    tokens: EmbeddingTable
    scale: float | None = None
    positions: Tensor | None = None
    offset: int = 0
    projection: Product | None = None
    norm: Norm | None = None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Returns [tokens, hidden]. Features of images are not scaled: they are made as inputs of the first layer."""
        tokens, images = batch.tokens, batch.images
        if images is not None:
            # Any number may stand where an image does, so it is replaced by a valid id before the look-up.
            tokens = tokens.index_fill(0, images.places, 0)
        x = self.tokens.look_up(tokens)
        if self.scale is not None:
            # Rounded to the dtype as transformers does, yet a Python number, which a CUDA graph can capture.
            x = x * float(torch.tensor(self.scale, dtype=x.dtype))
        if self.projection is not None:
            x = self.projection(x, batch)
        if self.norm is not None:
            x = self.norm(x)
        if images is not None:
            x = x.index_copy(0, images.places, images.features[0])
        if self.positions is not None:
            x = x + F.embedding(batch.positions[0] + self.offset, self.positions)
        return x


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A model, run layer by layer. See `model.forward.Model`.

    Attributes:
        soft_cap: Bound of the logits (Gemma 2). None for none.
        logit_scale: Factor of the logits (Cohere, Granite), before their bound.
        vision: Makes features of images. None for a model of text alone.
        deepstack: Numbers of layers, from 0. After each, one more depth of the images' features is added (DeepStack,
            Meng et al., 2024).
        inputs: Makes inputs of each layer's own. None where layers have none.
    """

    embedding: Embedding
    layers: Sequence[Layer]
    norm: Norm
    head: Product
    soft_cap: float | None = None
    logit_scale: float = 1.0
    vision: ImageEncoder | None = None
    deepstack: tuple[int, ...] = ()
    inputs: LayerInputs | None = None

    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        """Computes the batch.

        Args:
            batch: Tokens and where their KV goes.
            out: [n, vocabulary] float32 for the logits. None allocates it.
        """
        return self.read_out(self.residual(batch), batch, out)

    def residual(self, batch: ForwardBatch) -> Tensor:
        """Returns the residual stream behind the last layer, [tokens, hidden] in the model's dtype."""
        x = self.embedding(batch)
        if self.inputs is not None:
            batch = replace(batch, layer_inputs=self.inputs(x, batch))
        for number, layer in enumerate(self.layers):
            x = layer(x, batch)
            if batch.images is not None and number in self.deepstack:
                x = _with_depth(x, batch.images, 1 + self.deepstack.index(number))
        return x

    def read_out(self, x: Tensor, batch: ForwardBatch, out: Tensor | None = None) -> ForwardOutput:
        """Computes the logits that a batch reads in parts, then those that it wants.

        Arguments are those of `residual` and `forward`.
        """
        if (parts := batch.parts) is not None:
            for rows in parts.split(self.embedding.tokens.vocabulary):
                parts.read(self._logits(self.norm(x[rows]), rows, batch).float())
        hidden = self.norm(x[batch.wanted])
        logits = self._logits(hidden, batch.wanted, batch)
        logits = logits.float() if out is None else out.copy_(logits)
        return ForwardOutput(logits, hidden if batch.hidden else None)

    def _logits(self, hidden: Tensor, rows: Tensor, batch: ForwardBatch) -> Tensor:
        """Returns the logits of tokens of a batch.

        Args:
            hidden: [n, width]. Inputs of the output layer.
            rows: [n] int64. Packed offsets of the tokens.
            batch: The batch.
        """
        logits = self.head(hidden, batch.select(rows))
        if self.logit_scale != 1.0:
            logits = logits.float() * self.logit_scale
        return logits if self.soft_cap is None else soft_capped(logits.float(), self.soft_cap)


def _with_depth(x: Tensor, images: ImageFeatures, depth: int) -> Tensor:
    """Returns x [tokens, hidden] with one depth of the features added in their places."""
    return x.index_copy(0, images.places, x[images.places] + images.features[depth])
