"""Short causal convolutions of single channels: a part of recurrent layers, and all of LFM2's."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.backend import AttentionBackend, StateBackend
from model.forward import ForwardBatch
from model.layers import Product
from model.recurrent import ConvolutionShape


def states_of(attention: AttentionBackend) -> StateBackend:
    """Returns the back end as one with states. Raises TypeError where it has none."""
    if not isinstance(attention, StateBackend):
        raise TypeError(f"the back end {attention.name} has no states of recurrent layers")
    return attention


def convolved(x: Tensor, window: Tensor, taps: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convolves the tokens of a sequence, from the oldest tap to the newest, so that bits do not depend on the cut.

    Args:
        x: [tokens, channels].
        window: [taps - 1, channels], the inputs before them.
        taps: [channels, taps], the oldest token first.
        bias: [channels], None without one.

    Returns:
        [tokens, channels], and the window after them.
    """
    whole = torch.cat((window, x))
    total = whole[: len(x)] * taps[:, 0]
    for tap in range(1, taps.shape[1]):
        total = total + whole[tap : tap + len(x)] * taps[:, tap]
    return total if bias is None else total + bias, whole[len(whole) - taps.shape[1] + 1 :]


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
        gated, made = before * values, torch.empty_like(values)

        def advance(state: Sequence[Tensor] | None, here: slice) -> list[Tensor]:
            """Computes some tokens of one sequence. Returns the state after them."""
            window = gated.new_zeros(self.shape.taps - 1, self.shape.channels) if state is None else state[0]
            made[here], window = convolved(gated[here], window.view(-1, self.shape.channels), self.taps, self.bias)
            return [window.flatten()]

        states_of(batch.attention).recur(self.number, batch.plan, advance)
        return self.output((after * made).to(x.dtype), batch)
