"""Reads state-space mixers and short convolutions, which several families share."""

import torch

from model.config import ModelConfig
from model.hybrids import read_step_limits
from model.recurrent import ConvolutionShape, ScanShape
from model.short_convolution import ShortConvolution
from model.state_space import GatedNorm, GateOrder, StateSpace, StepSizes
from model.tensors import Tensors


def load_state_space(
    config: ModelConfig,
    of: Tensors,
    number: int,
    shape: ScanShape,
    eps: float,
    bias: bool,
    output_bias: bool,
    order: GateOrder = GateOrder.GATED_NORMED,
) -> StateSpace:
    """Loads the state-space mixer of a layer. In the checkpoint, gates stand before the convolution's channels.

    Args:
        config: Configuration of the model.
        of: Tensors of the mixer.
        number: Index of the layer.
        shape: Its heads.
        eps: Epsilon of its norm.
        bias: Whether its inputs have biases.
        output_bias: Whether its output has one.
        order: What gates and norm do. `GateOrder.GATED` has no norm in the checkpoint.
    """
    s, convolution = shape, config.fields.flag("mamba_conv_bias", config.fields.flag("use_conv_bias", True))
    gates, heads = slice(0, s.values), slice(s.values + s.channels, s.values + s.channels + s.heads)
    normed = order is not GateOrder.GATED
    return StateSpace(
        number,
        s,
        of.linear("in_proj", config.hidden, heads.stop, bias, rows=[slice(s.values, heads.start), gates, heads]),
        of.floats("conv1d.weight", s.channels, 1, s.taps)[:, 0].contiguous(),
        of.floats("conv1d.bias", s.channels) if convolution else torch.zeros(s.channels, device=of.device),
        StepSizes(
            torch.exp(of.floats("A_log", s.heads)), of.floats("dt_bias", s.heads), *read_step_limits(config.fields)
        ),
        of.floats("D", s.heads),
        GatedNorm(order, of.floats("norm.weight", s.values) if normed else torch.ones(s.values, device=of.device), eps),
        of.linear("out_proj", s.values, config.hidden, output_bias),
    )


def load_short_convolution(config: ModelConfig, of: Tensors, number: int, shape: ConvolutionShape) -> ShortConvolution:
    """Loads the mixer of a layer of LFM2."""
    c, bias = config, config.fields.flag("conv_bias")
    return ShortConvolution(
        number,
        shape,
        of.linear("in_proj", c.hidden, 3 * shape.channels, bias),
        of.floats("conv.weight", shape.channels, 1, shape.taps)[:, 0].contiguous(),
        of.floats("conv.bias", shape.channels) if bias else None,
        of.linear("out_proj", shape.channels, c.hidden, bias),
    )
