"""Writes metadata of some kinds of layers, as convert_hf_to_gguf.py of llama.cpp does."""

from typing import Any

import gguf
import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

Array = NDArray[Any]
Config = dict[str, Any]


def write_delta_net(c: Config, w: GGUFWriter) -> None:
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_ssm_state_size(c["linear_key_head_dim"])
    w.add_ssm_group_count(c["linear_num_key_heads"])
    w.add_ssm_time_step_rank(c["linear_num_value_heads"])
    w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
    if w.arch.startswith("qwen35"):
        pairs = int(c["head_dim"] * c["rope_parameters"]["partial_rotary_factor"]) // 2
        w.add_rope_dimension_sections([*((pairs + 2 - axis) // 3 for axis in range(3)), 0])
    recurrent = [kind == "linear_attention" for kind in c["layer_types"]]
    w.add_array(f"{w.arch}.attention.recurrent_layers", recurrent)
    w.add_full_attention_interval(4)


def write_latents(c: Config, w: GGUFWriter, rope: Config) -> None:
    w.add_head_count_kv(1)
    w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    w.add_value_length(c["kv_lora_rank"])
    w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length_mla(c["v_head_dim"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    if c["q_lora_rank"] is not None:
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    if rope.get("mscale_all_dim"):
        w.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    write_deepseek_experts(c, w)


def write_deepseek_experts(c: Config, w: GGUFWriter) -> None:
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_gating_func(gguf.ExpertGatingFuncType(1 if "V2" in c["architectures"][0] else 2))
    if c.get("n_group"):
        w.add_expert_group_count(c["n_group"])
        w.add_expert_group_used_count(c["topk_group"])


def write_layers_that_differ(c: Config, w: GGUFWriter) -> None:
    """Gemma 4's layers with a window, and those without one, which have other heads."""
    sliding = [kind == "sliding_attention" for kind in c["layer_types"]]
    full = next(iter(c["per_layer_config"].values()))
    wide = full.get("num_key_value_heads")
    shared, width = c["num_kv_shared_layers"], c["intermediate_size"]
    w.add_shared_kv_layers(shared)
    w.add_embedding_length_per_layer_input(c["hidden_size_per_layer_input"])
    w.add_sliding_window_pattern(sliding)
    w.add_key_length(full["head_dim"])
    w.add_value_length(full["head_dim"])
    w.add_key_length_swa(c["head_dim"])
    w.add_value_length_swa(c["head_dim"])
    w.add_rope_dimension_count(full["head_dim"])
    w.add_rope_dimension_count_swa(c["head_dim"])
    w.add_rope_freq_base_swa(c["rope_parameters"]["sliding_attention"]["rope_theta"])
    heads = c["num_key_value_heads"]
    w.add_head_count_kv(heads if wide is None else [heads if one else wide for one in sliding])
    first = len(sliding) - shared
    twice = c["use_double_wide_mlp"]
    w.add_feed_forward_length([width * (1 + (i >= first)) for i in range(len(sliding))] if twice else width)


def divisors_of_gemma4(c: Config) -> NDArray[np.float32]:
    """Returns divisors of the frequencies of layers without a window, a part of whose heads is rotated."""
    pairs = next(iter(c["per_layer_config"].values()))["head_dim"] // 2
    rotated = int(pairs * c["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return np.float32([1.0] * rotated + [1e30] * (pairs - rotated))


def write_state_space(c: Config, w: GGUFWriter) -> None:
    """Mamba-2's, and Granite 4's and Nemotron-H's, some of whose keys begin with "mamba"."""
    of = {key.removeprefix("mamba_"): value for key, value in c.items()}
    heads = of.get("num_heads") or of["n_heads"]
    w.add_ssm_conv_kernel(of.get("conv_kernel") or of["d_conv"])
    w.add_ssm_state_size(of.get("state_size") or of.get("ssm_state_size") or of["d_state"])
    w.add_ssm_group_count(of["n_groups"])
    w.add_ssm_inner_size(heads * (of.get("d_head") or c.get("mamba_head_dim") or of["head_dim"]))
    w.add_ssm_time_step_rank(heads)


def write_nemotron(c: Config, w: GGUFWriter, heads: int) -> None:
    """A layer is attention, which alone has KV heads, an MLP or experts, which alone have a width, or a mixer."""
    kinds = c["layers_block_type"]
    width = c["moe_intermediate_size"] if "moe" in kinds else c["intermediate_size"]
    w.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    w.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    write_state_space(c, w)
    if "moe" in kinds:
        w.add_expert_shared_feed_forward_length(c["moe_shared_expert_intermediate_size"])
        w.add_expert_shared_count(c["n_shared_experts"])
        w.add_expert_weights_norm(c["norm_topk_prob"])
        w.add_expert_weights_scale(c["routed_scaling_factor"])
        w.add_expert_group_count(c["n_group"])


def write_hybrid(c: Config, w: GGUFWriter, heads: int) -> None:
    """Layers with attention, which alone have KV heads, among others."""
    w.add_head_count_kv([heads if kind in ("attention", "full_attention") else 0 for kind in c["layer_types"]])
    if "conv_L_cache" in c:
        w.add_shortconv_l_cache(c["conv_L_cache"])
        w.add_layer_norm_rms_eps(c["norm_eps"])
    else:
        write_state_space(c, w)
        w.add_expert_shared_feed_forward_length(c["shared_intermediate_size"])
        w.add_rope_scaling_finetuned(c["position_embedding_type"] == "rope")
    if "num_dense_layers" in c:
        w.add_leading_dense_block_count(c["num_dense_layers"])
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def write_kimi(c: Config, w: GGUFWriter) -> None:
    """Kimi Linear, whose layers with latent attention alone have a KV head."""
    w.add_head_count_kv([int(kind == "full_attention") for kind in c["layer_types"]])
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_kda_head_dim(c["linear_head_dim"])
    w.add_key_length(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    w.add_key_length_mla(c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
    w.add_value_length_mla(c["v_head_dim"])
    w.add_kv_lora_rank(c["kv_lora_rank"])
    if c["q_lora_rank"] is not None:
        w.add_q_lora_rank(c["q_lora_rank"])
    w.add_rope_dimension_count(c["qk_rope_head_dim"])
    w.add_leading_dense_block_count(c["mlp_layer_types"].count("dense"))
    w.add_expert_shared_count(c["num_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_expert_group_count(c["num_expert_group"])
    w.add_expert_group_used_count(c["topk_group"])


FACTORS = {
    "down_proj": ("mlp_multipliers", 1),
    "gate_proj": ("mlp_multipliers", 0),
    "o_proj": ("attention_out_multiplier", None),
    "out_proj": ("ssm_out_multiplier", None),
    "lm_head": ("lm_head_multiplier", None),
    "embed_tokens": ("embedding_multiplier", None),
}
"""Factors of Falcon-H1 that are one number for a tensor, by parts of its name."""


def fold_factors(c: Config, tensors: dict[str, NDArray[Any]]) -> None:
    """Multiplies Falcon-H1's weights by its factors, and takes these out of the configuration."""
    states = c["mamba_n_groups"] * c["mamba_d_state"]
    for name, data in tensors.items():
        if name.endswith(".mamba.in_proj.weight"):
            inner = (len(data) - 2 * states - c["mamba_n_heads"]) // 2
            sizes = (inner, inner, states, states, c["mamba_n_heads"])
            data *= c["ssm_in_multiplier"] * np.repeat(np.float32(c["ssm_multipliers"]), sizes)[:, None]
        elif name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight")):
            data *= c["attention_in_multiplier"] * (c["key_multiplier"] if ".k_proj." in name else 1.0)
        elif name.endswith(".weight") and (found := FACTORS.get(name.split(".")[-2])):
            key, index = found
            data *= c[key] if index is None else c[key][index]
    for key in [key for key in c if "multiplier" in key]:
        del c[key]
