"""Falcon-H1 (TII, 2025): attention and a state-space mixer side by side in each layer, with factors of each part (muP).

Factors stand where they cost nothing: those of inputs in the weights of norms, that of keys in the scores, those of the
mixer's channels in the taps of its convolution.
"""

from dataclasses import replace

import torch

from model.architectures.llama import load_attention, load_decoder, load_rope, norm_eps
from model.architectures.mixers import load_state_space
from model.blocks import GatedMLP, TwoMixers
from model.config import ModelConfig
from model.decoder import Decoder
from model.fields import LEAST_FLOAT, MOST_FLOAT, Fields
from model.layers import OfMultiple, RMSNorm, read_activation
from model.recurrent import ScanShape
from model.state_space import GateOrder, StateSpace
from model.tensors import Tensors


def load_falcon_h1(config: ModelConfig, tensors: Tensors) -> Decoder:
    """FalconH1ForCausalLM."""
    c, fields, eps, rope = config, config.fields, norm_eps(config), load_rope(config, tensors)
    bias, factor = fields.flag("attention_bias"), fields.positive_float
    of_gates, of_mlp = _factors(fields, "mlp_multipliers", 2)

    def layer(number: int) -> TwoMixers:
        at, shape = tensors.under(f"model.layers.{number}."), c.recurrent[number]
        if not isinstance(shape, ScanShape):
            raise TypeError(f"layer {number} has no state-space mixer")
        norm = at("input_layernorm.weight", c.hidden).float()
        return TwoMixers(
            (
                (
                    RMSNorm(norm * factor("ssm_in_multiplier", 1.0), eps),
                    _mixer(c, at.under("mamba."), number, shape),
                    factor("ssm_out_multiplier", 1.0),
                ),
                (
                    RMSNorm(norm * factor("attention_in_multiplier", 1.0), eps),
                    load_attention(c, at, number, rope, bias, bias),
                    factor("attention_out_multiplier", 1.0),
                ),
            ),
            at.rms_norm("pre_ff_layernorm", c.hidden, eps),
            _mlp(c, at.under("feed_forward."), of_gates),
            of_mlp,
        )

    layers = [layer(number) for number in range(c.layers)]
    decoder = load_decoder(c, tensors, layers, norm="model.final_layernorm")
    return replace(
        decoder,
        embedding=replace(decoder.embedding, scale=factor("embedding_multiplier", 1.0)),
        logit_scale=factor("lm_head_multiplier", 1.0),
    )


def _factors(fields: Fields, key: str, count: int) -> list[float]:
    """Reads factors. Raises CheckpointError unless there are so many, all above 0."""
    factors = fields.numbers(key, LEAST_FLOAT, MOST_FLOAT, [1.0] * count)
    if len(factors) != count:
        raise fields.refuse(key, f"must be {count} numbers")
    return factors


def _mixer(config: ModelConfig, of: Tensors, number: int, s: ScanShape) -> StateSpace:
    """Loads a state-space mixer, and puts the factors of what enters it where they belong."""
    fields, order = config.fields, GateOrder.GATED
    if fields.flag("mamba_rms_norm"):
        first = fields.flag("mamba_norm_before_gate", True)
        order = GateOrder.NORMED_GATED if first else GateOrder.GATED_NORMED
    bias, of_output = fields.flag("mamba_proj_bias"), fields.flag("projectors_bias")
    made = load_state_space(config, of, number, s, norm_eps(config), bias, of_output, order)
    of_gates, of_values, of_keys, of_queries, of_steps = _factors(fields, "ssm_multipliers", 5)
    sizes = torch.tensor([made.shape.values, made.shape.keys, made.shape.keys])
    factors = torch.tensor([of_values, of_keys, of_queries]).repeat_interleave(sizes)
    return replace(
        made,
        taps=made.taps * factors.to(made.taps.device).unsqueeze(1),
        norm=replace(made.norm, factor=of_gates),
        steps=replace(made.steps, factor=of_steps),
    )


def _mlp(config: ModelConfig, at: Tensors, of_gates: float) -> GatedMLP:
    c, width, bias = config, config.fields.positive("intermediate_size"), config.fields.flag("mlp_bias")
    parts, activation = [("gate_proj", width), ("up_proj", width)], read_activation(c.fields, "hidden_act", "silu")
    return GatedMLP(
        at.linear(parts, c.hidden, bias=bias, gated=True, rows=at.shard.gated(width)),
        at.summed("down_proj", width, c.hidden, bias, at.shard.part(width)),
        activation if of_gates == 1.0 else OfMultiple(activation, of_gates),
    )
