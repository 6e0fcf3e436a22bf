"""What llama.cpp calls the parts of a checkpoint, and how it lays them out: one class an architecture."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gguf import GGUFWriter

Config = dict[str, Any]
Named = Iterator[tuple[str, np.ndarray]]

COMMON = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


class Parts(Protocol):
    """An architecture of llama.cpp.

    Attributes:
        name: Its name there.
    """

    @property
    def name(self) -> str: ...

    def write_config(self, writer: GGUFWriter, config: Config) -> None:
        """Writes the metadata that not every architecture has."""

    def named(self, part: str, values: np.ndarray, config: Config) -> Named:
        """Yields name and values of what a layer's part becomes; `part` is its name within the layer."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention with heads of one size.

    Attributes:
        halves: Whether llama.cpp rotates neighbours, so that rows of queries and keys are interleaved.
    """

    name: str
    halves: bool

    def write_config(self, writer: GGUFWriter, config: Config) -> None:
        _write_heads(writer, config["num_key_value_heads"], config["head_dim"], config["head_dim"], config["head_dim"])

    def named(self, part: str, values: np.ndarray, config: Config) -> Named:
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        name = part.removesuffix(".weight")
        turned = heads.get(name.split(".")[-1]) if self.halves else None
        yield f"{COMMON[name]}.weight", values if turned is None else interleaved(values, turned)


@dataclass(frozen=True, slots=True)
class Latent:
    """DeepSeek's attention. Each head's parts of the product that expands latents are tensors of their own."""

    name: str = "deepseek2"

    def write_config(self, writer: GGUFWriter, config: Config) -> None:
        rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
        _write_heads(writer, 1, rank + rotated, rank, rotated)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotated)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_kv_lora_rank(rank)
        writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        for add in (writer.add_expert_feed_forward_length, writer.add_expert_shared_count):
            add(0)  # it asks for these where no layer has experts, too

    def named(self, part: str, values: np.ndarray, config: Config) -> Named:
        names = COMMON | {
            "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        }  # fmt: skip
        name = part.removesuffix(".weight")
        if name != "self_attn.kv_b_proj":
            yield f"{names[name]}.weight", values
            return
        plain = config["qk_nope_head_dim"]
        heads = values.reshape(config["num_attention_heads"], -1, values.shape[1])
        yield "attn_k_b.weight", heads[:, :plain].swapaxes(1, 2)
        yield "attn_v_b.weight", heads[:, plain:]


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Qwen 3.5: three layers of the gated delta rule, then one of gated attention. Norms are stored less 1."""

    name: str = "qwen35"

    def write_config(self, writer: GGUFWriter, config: Config) -> None:
        dim = config["head_dim"]
        _write_heads(writer, config["num_key_value_heads"], dim, dim, dim // 4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        values = config["linear_num_value_heads"]
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_inner_size(values * config["linear_value_head_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_time_step_rank(values)
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_full_attention_interval(4)

    def named(self, part: str, values: np.ndarray, config: Config) -> Named:  # noqa: ARG002
        names = COMMON | {
            "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
            "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
            "linear_attn.out_proj": "ssm_out",
        }  # fmt: skip
        name = part.removesuffix(".weight")
        if name == "linear_attn.A_log":
            yield "ssm_a", -np.exp(values)
        elif name == "linear_attn.dt_bias":
            yield "ssm_dt.bias", values
        elif name == "linear_attn.conv1d":
            yield "ssm_conv1d.weight", values[:, 0]
        else:
            yield f"{names[name]}.weight", values + 1 if name.endswith(("layernorm", "_norm")) else values


@dataclass(frozen=True, slots=True)
class StateSpaceHybrid:
    """Granite 4 hybrid: state-space mixers, attention in some layers, one MLP of all tokens."""

    name: str = "granitehybrid"

    def write_config(self, writer: GGUFWriter, config: Config) -> None:
        dim, kinds = config["head_dim"], config["layer_types"]
        _write_heads(
            writer, [config["num_key_value_heads"] if kind == "attention" else 0 for kind in kinds], dim, dim, dim
        )
        heads = config["mamba_n_heads"]
        writer.add_ssm_conv_kernel(config["mamba_d_conv"])
        writer.add_ssm_inner_size(heads * config["mamba_d_head"])
        writer.add_ssm_state_size(config["mamba_d_state"])
        writer.add_ssm_time_step_rank(heads)
        writer.add_ssm_group_count(config["mamba_n_groups"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] != "nope")
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])

    def named(self, part: str, values: np.ndarray, config: Config) -> Named:
        names = COMMON | {
            "mamba.in_proj": "ssm_in", "mamba.out_proj": "ssm_out", "shared_mlp.output_linear": "ffn_down",
        }  # fmt: skip
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        name = part.removesuffix(".weight")
        if name == "shared_mlp.input_linear":
            for own, half in zip(("ffn_gate", "ffn_up"), np.split(values, 2), strict=True):
                yield f"{own}.weight", half
        elif name in ("mamba.A_log", "mamba.D"):
            yield ("ssm_d", values[:, None]) if name.endswith("D") else ("ssm_a", -np.exp(values)[:, None])
        elif name in ("mamba.dt_bias", "mamba.conv1d.bias"):
            yield "ssm_dt.bias" if name.endswith("dt_bias") else "ssm_conv1d.bias", values
        elif name == "mamba.conv1d":
            yield "ssm_conv1d.weight", values[:, 0]
        elif name == "mamba.norm":
            yield "ssm_norm.weight", values.reshape(config["mamba_n_groups"], -1)
        else:
            turned = heads.get(name.split(".")[-1])
            yield f"{names[name]}.weight", values if turned is None else interleaved(values, turned)


PARTS: dict[str, Parts] = {
    "LlamaForCausalLM": Heads("llama", halves=True),
    "Qwen3ForCausalLM": Heads("qwen3", halves=False),
    "DeepseekV3ForCausalLM": Latent(),
    "Qwen3_5ForCausalLM": Hybrid(),
    "GraniteMoeHybridForCausalLM": StateSpaceHybrid(),
}


def _write_heads(writer: GGUFWriter, kv_heads: int | list[int], key: int, value: int, rotated: int) -> None:
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(key)
    writer.add_value_length(value)
    writer.add_rope_dimension_count(rotated)


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the rows of each head: llama.cpp's rope rotates neighbours, the checkpoint's rotates halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)
