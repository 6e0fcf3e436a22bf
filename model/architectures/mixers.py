"""Reads state-space mixers and short convolutions, which several families share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.config import ModelConfig
from model.hybrids import read_step_limits
from model.parallel.collective import Ranks
from model.parallel.norms import SharedGroup
from model.parallel.shard import Shard, moved
from model.recurrent import ConvolutionShape, ScanShape
from model.short_convolution import ShortConvolution
from model.state_space import GatedNorm, GateOrder, StateSpace, TimeSteps
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
    normed, mine, channels = order is not GateOrder.GATED, of.shard.of_recurrence(s), _channels(of.shard, s)
    heads, values = of.shard.even(s.heads), of.shard.even(s.values)
    rows = [*(moved(one, s.values) for one in channels), values[0], moved(heads[0], s.values + s.channels)]

    def by_head(name: str) -> Tensor:
        return rows_of(of.floats(name, s.heads), heads)

    return StateSpace(
        number,
        mine,
        of.linear("in_proj", config.hidden, s.values + s.channels + s.heads, bias, rows=rows),
        rows_of(of.floats("conv1d.weight", s.channels, 1, s.taps)[:, 0], channels),
        rows_of(of.floats("conv1d.bias", s.channels), channels)
        if convolution
        else torch.zeros(mine.channels, device=of.device),
        TimeSteps(rows_of(decay_rates(of, s.heads), heads), by_head("dt_bias"), *read_step_limits(config.fields)),
        by_head("D"),
        GatedNorm(
            order,
            rows_of(of.floats("norm.weight", s.values), values)
            if normed
            else torch.ones(mine.values, device=of.device),
            eps,
            shared=_shared(of.ranks, s),
        ),
        of.summed("out_proj", s.values, config.hidden, output_bias, values[0]),
    )


def decay_rates(of: Tensors, heads: int) -> Tensor:
    """Loads how fast the heads' states fade. llama.cpp saves them themselves, with a minus."""
    return -of.floats("ssm_a", heads) if "ssm_a" in of else torch.exp(of.floats("A_log", heads))


def _channels(shard: Shard, shape: ScanShape) -> list[slice]:
    """Returns the rank's channels of a convolution: inputs of its heads, then what writes and reads of its groups."""
    own = max(1, shape.groups // shard.size) * shape.state_dim
    first = shard.rank * shape.groups // shard.size * shape.state_dim  # ranks that share a group have the same
    keys = slice(shape.values + first, shape.values + first + own)
    return [*shard.even(shape.values), keys, moved(keys, shape.keys)]


def _shared(ranks: Ranks, shape: ScanShape) -> SharedGroup | None:
    """Returns the group of heads that the rank shares with others; None where it has whole ones."""
    shard, collective = ranks.shard, ranks.collective
    if collective is None or shape.groups % shard.size == 0:
        return None
    number = shard.rank * shape.groups // shard.size
    return SharedGroup(number, shape.groups, shape.groups / shape.values, collective)


def rows_of(tensor: Tensor, parts: Sequence[slice]) -> Tensor:
    """Returns these rows of a tensor, one after the other."""
    return torch.cat([tensor[part] for part in parts])


def load_short_convolution(config: ModelConfig, of: Tensors, number: int, shape: ConvolutionShape) -> ShortConvolution:
    """Loads the mixer of a layer of LFM2."""
    c, s, bias, mine = config, shape, config.fields.flag("conv_bias"), of.shard.even(shape.channels)
    return ShortConvolution(
        number,
        of.shard.of_recurrence(s),
        of.linear("in_proj", c.hidden, 3 * s.channels, bias, rows=of.shard.even(*[s.channels] * 3)),
        rows_of(of.floats("conv.weight", s.channels, 1, s.taps)[:, 0], mine),
        rows_of(of.floats("conv.bias", s.channels), mine) if bias else None,
        of.summed("out_proj", s.channels, c.hidden, bias, mine[0]),
    )
