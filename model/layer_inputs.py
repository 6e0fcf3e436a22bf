"""Inputs of each layer's own, beside the residual stream: per-layer embeddings (Gemma 3n, 2025; Gemma 4, 2026).

A token has a second embedding, with a part for each layer. A projection of its first embedding is added to it. Each
layer adds to the stream what it makes of its own part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from model.embedding_table import EmbeddingTable
from model.forward import ForwardBatch, Layer
from model.layers import Activation, Product, RMSNorm, activated


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """Makes the inputs of all layers.

    Attributes:
        tokens: Table of the tokens' second embeddings, [vocabulary, layers x width].
        scale: Factor of what is looked up.
        projection: Product from the first embeddings, hidden wide, to layers x width.
        projection_scale: Factor of its results.
        norm: Norm of the projection's part of one layer, [width].
        factor: Factor of the sum of both.
    """

    tokens: EmbeddingTable
    scale: float
    projection: Product
    projection_scale: float
    norm: RMSNorm
    factor: float = 2.0**-0.5

    @property
    def width(self) -> int:
        """Elements of one layer's input."""
        return len(self.norm.weight)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Makes the inputs.

        Args:
            x: First embeddings, [tokens, hidden], with features of images in their places.
            batch: The tokens. Where images stand, that of token 0 is the second embedding.

        Returns:
            [tokens, layers, width].
        """
        known = batch.tokens if batch.images is None else batch.tokens.index_fill(0, batch.images.places, 0)
        found = self.tokens.look_up(known)
        found = found * float(torch.tensor(self.scale, dtype=found.dtype))
        projected = (self.projection(x, batch) * self.projection_scale).unflatten(1, (-1, self.width))
        return (self.norm(projected) + found.view_as(projected)) * self.factor


@dataclass(frozen=True, slots=True, eq=False)
class InputGate:
    """Adds to the stream what a layer makes of its own input.

    Attributes:
        layer: Index of the layer.
        gate: Product from the stream to the width of the input.
        activation: Activation of the gates, which multiply the input.
        projection: Product back to the stream.
        norm: Norm of its result.
    """

    layer: int
    gate: Product
    activation: Activation
    projection: Product
    norm: RMSNorm

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Returns the stream x [tokens, hidden] with what is added. Raises ValueError for a batch without inputs."""
        if batch.layer_inputs is None:
            raise ValueError(f"layer {self.layer} has an input of its own, which the batch lacks")
        gates = activated(self.gate(x, batch), self.activation)
        return x + self.norm(self.projection(gates * batch.layer_inputs[:, self.layer], batch))


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """A layer, then what it makes of its own input, then a factor of the whole stream.

    Attributes:
        inner: The layer.
        gate: None where layers have no inputs.
        factor: [1]. Factor of the stream.
    """

    inner: Layer
    gate: InputGate | None
    factor: Tensor

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        x = self.inner(x, batch)
        if self.gate is not None:
            x = self.gate(x, batch)
        return x * self.factor
