"""Kimi Linear (Kimi Team, 2025): Kimi Delta Attention in most layers, latent attention without positions in others."""

import torch
from torch import Tensor

from model.architectures.deepseek import load_latent_attention, read_sparse_layers
from model.architectures.experts import MIXTRAL_NAMES
from model.architectures.glm4_moe import ignore_predictors, load_deepseek_experts
from model.architectures.llama import load_decoder, load_mlp, norm_eps
from model.architectures.mixers import rows_of
from model.blocks import FeedForward, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.kimi_delta import KimiDelta
from model.latent_attention import LatentAttention
from model.recurrent import DeltaShape
from model.tensors import Tensors

PREFIXES = (
    "block_sparse_moe.",
    "mlp.",
)  # of experts in the Hub's checkpoints and in transformers 5; of MLPs, the other


def load_kimi_linear(config: ModelConfig, tensors: Tensors) -> Decoder:
    """KimiLinearForCausalLM."""
    c, eps = config, norm_eps(config)
    sparse = read_sparse_layers(c, c.fields.get("first_k_dense_replace", int, 1))
    ignore_predictors(c, tensors, default=0)

    def mlp(at: Tensors, number: int) -> FeedForward:
        if not sparse[number]:
            return load_mlp(c, at, prefixes=PREFIXES[::-1])
        mixture = at.under_any(PREFIXES, "gate.weight")
        return load_deepseek_experts(c, mixture, (256, 8), (1, 1), 1024, 2.446, MIXTRAL_NAMES)

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, eps),
            _mixer(c, at.under("self_attn."), number),
            at.rms_norm("post_attention_layernorm", c.hidden, eps),
            mlp(at, number),
        )

    return load_decoder(c, tensors, [layer(number) for number in range(c.layers)])


def _mixer(config: ModelConfig, of: Tensors, number: int) -> KimiDelta | LatentAttention:
    shape = config.recurrent[number]
    if not isinstance(shape, DeltaShape):
        return load_latent_attention(config, of, number, rope=None)
    gate = of.under_any(("", "forget_gate."), "A_log")  # the Hub's names, and those of transformers 5
    hidden, width, narrow, shard = config.hidden, shape.values, shape.value_dim, of.shard
    mine, three = shard.even(width), shard.even(width, width, width)
    rates = _rates(gate, shape.heads).repeat_interleave(shape.key_dim)
    return KimiDelta(
        number,
        shard.of_recurrence(shape),
        qkv=of.linear([("q_proj", width), ("k_proj", width), ("v_proj", width)], hidden, rows=three),
        write=of.linear("b_proj", hidden, shape.heads, rows=shard.even(shape.heads)),
        forget=(gate.linear("f_a_proj", hidden, narrow), gate.linear("f_b_proj", narrow, width, rows=mine)),
        gates=(of.linear("g_a_proj", hidden, narrow), of.linear("g_b_proj", narrow, width, rows=mine)),
        taps=rows_of(_taps(of, shape), three),
        decay=rows_of(rates, mine),
        bias=rows_of(gate.floats("dt_bias", width), mine),
        norm=of.floats("o_norm.weight", shape.value_dim),
        eps=norm_eps(config),
        output=of.summed("o_proj", width, hidden, False, mine[0]),
    )


def _rates(gate: Tensors, heads: int) -> Tensor:
    """Loads decay rates, [heads] float32. GGUF files store -exp(A_log), the Hub's checkpoints A_log."""
    return (
        -gate.floats("ssm_a", heads) if "ssm_a" in gate else torch.exp(gate.floats("A_log", 1, 1, heads, 1)).flatten()
    )


def _taps(of: Tensors, shape: DeltaShape) -> Tensor:
    """Loads the weights of the convolution, which the Hub's checkpoints have apart for queries, keys and values."""
    if "conv1d.weight" in of:
        return of.floats("conv1d.weight", shape.channels, 1, shape.taps)[:, 0]
    parts = [of.floats(f"{part}_conv1d.weight", shape.values, 1, shape.taps) for part in "qkv"]
    return torch.cat(parts)[:, 0]
