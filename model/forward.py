"""The contract of a forward pass: a batch of packed tokens in, logits out.

The runner makes a `ForwardBatch` for each step. Each layer and each product gets it beside its input. So anything that
depends on a token's row, its position or the step's outputs has one way in. One signature holds for a decoder, its
compiled program, its CUDA graphs and its rank group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from model.attention.backend import AttentionBackend
from model.logit_parts import LogitParts

CosSin = tuple[Tensor, Tensor]
"""Cosines and sines of rotary angles, each [tokens, 1, pairs]."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """One image for an encoder.

    Attributes:
        pixels: [frames, 3, height, width] uint8, on the device.
        grid: Shape of its features, as in `scheduler.request.PromptImage`.
    """

    pixels: Tensor
    grid: tuple[int, ...]


ImageEncoder = Callable[[Sequence[EncoderInput]], Sequence[Tensor]]
"""Makes the features of images: of each a tensor [depths, features, hidden] in the model's dtype.

Depth 0 stands in the place of token embeddings, each further one is added after one of `Decoder.deepstack`. Images of
one shape may be computed together, but an image's features have the same bits whatever is encoded beside it.
"""


class RotaryEmbedding(Protocol):
    """Rotary angles by position."""

    def at(self, positions: Tensor) -> CosSin:
        """Looks up the angles of tokens.

        Args:
            positions: [axes, tokens] int64, as `ForwardBatch.positions`.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ImageFeatures:
    """Features of the images in a step.

    Attributes:
        places: [n] int64. Packed offsets, each at most once.
        features: [depths, n, hidden] in the model's dtype. Depth 0 enters the first layer in the place of token
            embeddings. Each further one is added to the output of one of `Decoder.deepstack`.
    """

    places: Tensor
    features: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The packed tokens of one forward pass: no padding, no batch axis.

    Attributes:
        tokens: [tokens] int64. Token ids; any number where an image stands.
        positions: [axes, tokens] int64. Axis 0 is the position in the sequence, which attention and KV pages go by. A
            model whose rotary embedding turns by several axes has these behind it (`Vision.rotary_axes`).
        wanted: [n] int64. Packed offsets of the tokens whose logits are returned.
        attention: Back end that owns the KV pool.
        plan: Result of `attention.plan` for the step's shape. Opaque to layers.
        images: Features of the step's images, None without images.
        hidden: Whether hidden states are returned beside the logits.
        rows: [k] int64. Packed offset of each row of a product's input. None where the rows are all tokens in order.
        layer_inputs: [tokens, layers, width]. What `model.layer_inputs.LayerInputs` has made, None for a model without.
        parts: Tokens whose logits are read in parts, before those of `wanted` are computed. None for none.
    """

    tokens: Tensor
    positions: Tensor
    wanted: Tensor
    attention: AttentionBackend
    plan: Any
    images: ImageFeatures | None = None
    hidden: bool = False
    rows: Tensor | None = None
    layer_inputs: Tensor | None = None
    parts: LogitParts | None = None
    _angles: dict[int, CosSin] = field(default_factory=dict, init=False, repr=False)

    def cos_sin(self, rope: RotaryEmbedding) -> CosSin:
        """Returns the angles of the batch's tokens, looked up once for all layers that share `rope`."""
        if id(rope) not in self._angles:
            self._angles[id(rope)] = rope.at(self.positions)
        return self._angles[id(rope)]

    def select(self, rows: Tensor) -> "ForwardBatch":
        """Returns the batch for a product whose input is `x[rows]` of this batch's input.

        Args:
            rows: [k] int64. Indices into the rows that a product gets with this batch.
        """
        return replace(self, rows=rows if self.rows is None else self.rows[rows])

    def of_rows(self, values: Tensor) -> Tensor:
        """Returns values [..., tokens] for the rows of a product's input, [..., rows]."""
        return values if self.rows is None else values[..., self.rows]


Layer = Callable[[Tensor, ForwardBatch], Tensor]
"""A layer of a decoder: maps the residual stream [tokens, hidden] to the same shape."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """Results for the wanted tokens, in their order. They may hold until the next call alone.

    Attributes:
        logits: [n, vocabulary] float32.
        hidden: [n, width], the input of the output layer, in the model's dtype. None where the batch does not ask.
    """

    logits: Tensor
    hidden: Tensor | None = None


class Model(Protocol):
    """A model as the runner sees it.

    Attributes:
        vision: Makes features of images. None for a model of text alone.
    """

    @property
    def vision(self) -> ImageEncoder | None: ...

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        """Computes all tokens of the batch and writes their KV."""
