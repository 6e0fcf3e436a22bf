"""Llama and Qwen 3 with a mixture of experts in place of the MLP: Mixtral (Jiang et al., 2024), Qwen 3 MoE."""

from collections.abc import Sequence

from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps, rms_norm_of_heads
from model.blocks import Experts, FeedForward, GatedMLP, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import CheckpointError
from model.fields import MOST
from model.layers import read_activation
from model.tensors import Tensors

MOST_EXPERTS = 2**15  # experts of all layers: each takes 0.1 ms before a weight is read


def load_mixtral(config: ModelConfig, tensors: Tensors) -> Decoder:
    """MixtralForCausalLM."""
    c, rope = config, load_rope(config, tensors, theta=1e6)
    experts = c.fields.positive("num_local_experts", 8)
    width = c.fields.positive("intermediate_size")

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        moe = at.under_any(("block_sparse_moe.", "mlp."), "gate.weight")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            _load_experts(c, moe, experts, width, ("w1", "w3", "w2"), used=2, normalised=True),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def load_qwen3_moe(config: ModelConfig, tensors: Tensors) -> Decoder:
    """Qwen3MoeForCausalLM. Some of its layers may have an MLP instead."""
    c, rope = config, load_rope(config, tensors)
    experts = c.fields.positive("num_experts" if "num_experts" in c.fields else "num_local_experts", 128)
    width = c.fields.positive("moe_intermediate_size", 768)
    bias, normalised = c.fields.flag("attention_bias"), c.fields.flag("norm_topk_prob")
    every, without = c.fields.positive("decoder_sparse_step", 1), set(c.fields.numbers("mlp_only_layers", 0, MOST, []))

    def layer(number: int) -> PreNorm:
        at = tensors.under(f"model.layers.{number}.")
        dense = number in without or (number + 1) % every != 0
        names = ("gate_proj", "up_proj", "down_proj")
        return PreNorm(
            at.rms_norm("input_layernorm", c.hidden, norm_eps(c)),
            load_attention(c, at, number, rope, bias, bias, rms_norm_of_heads(c)),
            at.rms_norm("post_attention_layernorm", c.hidden, norm_eps(c)),
            load_mlp(c, at) if dense else _load_experts(c, at.under("mlp."), experts, width, names, 8, normalised),
        )

    return load_decoder(config, tensors, [layer(number) for number in range(c.layers)])


def _load_experts(
    config: ModelConfig, at: Tensors, experts: int, width: int, names: Sequence[str], used: int, normalised: bool
) -> FeedForward:
    """Loads the experts of a layer.

    Args:
        config: Configuration of the model.
        at: Tensors of the layer's experts.
        experts: The number of experts.
        width: Width of one expert, of which each rank has a part.
        names: Names of its gate, up and down products.
        used: Experts a token, where config.json says nothing.
        normalised: Whether the weights of a token's experts are scaled to a sum of 1.
    """
    rows, columns = at.shard.gated(width), at.shard.part(width)
    if experts * config.layers > MOST_EXPERTS:
        raise CheckpointError(
            f"{config.fields.path}: {config.layers} layers of {experts} experts are {config.layers * experts} of them, "
            f"may be {MOST_EXPERTS}"
        )
    used = config.fields.positive("num_experts_per_tok", used)
    if used > experts:
        raise config.fields.refuse("num_experts_per_tok", f"there are {experts} experts")
    activation = read_activation(config.fields, "hidden_act", "silu")
    gate, up, down = names

    def expert(number: int) -> GatedMLP:
        one = at.under(f"experts.{number}.")
        gate_up = one.linear([(gate, width), (up, width)], config.hidden, gated=True, rows=rows)
        return GatedMLP(gate_up, one.linear(down, width, config.hidden, columns=columns), activation)

    router = at.unquantized().linear("gate", config.hidden, experts)
    gates = at.stacked("experts.gate_up_proj", experts, config.hidden, 2 * width, gated=True, rows=rows)
    downs = at.stacked("experts.down_proj", experts, width, config.hidden, columns=columns)
    if gates is not None and downs is not None:  # all in one, as transformers 5 has them in memory
        parts = [GatedMLP(gate_up, narrow, activation) for gate_up, narrow in zip(gates, downs, strict=True)]
    else:
        parts = [expert(number) for number in range(experts)]
    return at.ranks.summed(Experts(router, parts, used, normalised))
