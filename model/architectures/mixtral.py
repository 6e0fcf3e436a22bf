"""Llama and Qwen 3 with a mixture of experts in place of the MLP: Mixtral (Jiang et al., 2024), Qwen 3 MoE."""

from collections.abc import Sequence

from model.architectures.llama import load_attention, load_decoder, load_mlp, load_rope, norm_eps, rms_norm_of_heads
from model.blocks import Experts, GatedMLP, Part, PreNorm
from model.config import ModelConfig
from model.decoder import Decoder
from model.errors import CheckpointError
from model.fields import MOST
from model.layers import read_activation
from model.tensors import Tensors

MOST_EXPERTS = 2**15  # of all layers: each takes a tenth of a millisecond before a weight is looked at


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
) -> Part:
    """width: of one expert, of which each rank has a part. names: of its gate, up and down products. used: where
    config.json says nothing.
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
        weight = one.stored(f"{down}.weight", config.hidden, width)
        return GatedMLP(gate_up, one.product([weight[:, columns]]), activation)

    router = at.unquantized().linear("gate", config.hidden, experts)
    if "experts.gate_up_proj" in at:  # all in one, as transformers 5 has them in memory
        gates = at.stored("experts.gate_up_proj", experts, 2 * width, config.hidden)
        downs = at.stored("experts.down_proj", experts, config.hidden, width)
        parts = [
            GatedMLP(at.product([g[run] for run in rows], gated=True), at.product([d[:, columns]]), activation)
            for g, d in zip(gates, downs, strict=True)
        ]
    else:
        parts = [expert(number) for number in range(experts)]
    return at.ranks.summed(Experts(router, parts, used, normalised))
