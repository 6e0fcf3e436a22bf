"""A layer that mixes tokens by a short causal convolution of each channel alone: LFM2's."""

from dataclasses import dataclass

from torch import Tensor

from model.attention.recurrence import states_of
from model.forward import ForwardBatch
from model.layers import Product
from model.recurrent import ConvolutionShape


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution:
    """A layer's mixer that sees a few tokens: two gates around a convolution (Liquid AI, LFM2, 2025).

    Attributes:
        number: Index of the layer in the model.
        shape: Its channels, as many as the residual stream has.
        inputs: One product for the gates of the input, those of the output and the input, in this order.
        taps: [channels, taps] float32. Weights of the convolution, the oldest token first.
        bias: [channels] float32. None without one.
        output: Product after it.
    """

    number: int
    shape: ConvolutionShape
    inputs: Product
    taps: Tensor
    bias: Tensor | None
    output: Product

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Maps x [tokens, hidden] to the same shape. Writes the states of the step's sequences."""
        before, after, values = self.inputs(x, batch).float().split(self.shape.channels, 1)
        states = states_of(batch.attention)
        made = states.convolve(self.number, before * values, self.taps, self.bias, False, batch.plan)
        return self.output((after * made).to(x.dtype), batch)
