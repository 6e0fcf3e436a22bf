"""Writes the metadata of GGUF files from config.json, as convert_hf_to_gguf.py of llama.cpp does."""

import math
from collections.abc import Mapping
from typing import Any

import gguf
from gguf import GGUFWriter

from tests.model.gguf.keys import (
    Array,
    Config,
    write_deepseek_experts,
    write_delta_net,
    write_hybrid,
    write_kimi,
    write_latents,
    write_layers_that_differ,
    write_nemotron,
    write_state_space,
)

SLIDING = ("gemma4", "gemma2", "gemma3", "phi3", "cohere2", "exaone4", "gpt-oss", "phimoe")
HYBRIDS = ("granitehybrid", "lfm2", "lfm2moe")
UNLIKE = ("qwen35moe", "nemotron_h", "nemotron_h_moe")  # whose layers have no MLPs, or are MLPs


def first_of(config: Config, *keys: str) -> Any:
    """Returns the first of these values that is there."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def heads_of(config: Config, architecture: str) -> tuple[int, int]:
    """Returns the number of heads and of KV heads."""
    if architecture == "mamba2":
        return 0, 0
    heads = first_of(config, "num_attention_heads", "n_head", "n_heads")
    if architecture == "falcon":
        if config["new_decoder_architecture"]:
            return heads, config["num_kv_heads"]
        return heads, 1 if config["multi_query"] else heads
    return heads, first_of(config, "num_key_value_heads") or heads


def write_config(c: Config, w: GGUFWriter, layers: int, tensors: Mapping[str, Array]) -> None:
    """Writes all but the tokenizer. Some widths are read from the tensors."""
    arch = w.arch
    heads, kv_heads = heads_of(c, arch)
    hidden = first_of(c, "hidden_size", "n_embd", "d_model")
    rope = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    w.add_context_length(first_of(c, "max_position_embeddings", "n_positions") or 2048)
    w.add_vocab_size(c["vocab_size"])
    w.add_embedding_length(hidden)
    w.add_block_count(layers)
    if arch == "gemma4":
        write_layers_that_differ(c, w)
    elif arch == "mamba2":
        w.add_feed_forward_length(0)
        write_state_space(c, w)
    elif arch == "lfm2":  # after what its config.json makes of it
        w.add_feed_forward_length(len(tensors["model.layers.0.feed_forward.w1.weight"]))
    elif arch not in UNLIKE:
        w.add_feed_forward_length(
            first_of(c, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * hidden
        )
    w.add_head_count(heads)
    if arch.startswith("nemotron_h"):
        write_nemotron(c, w, kv_heads)
    elif arch == "kimi-linear":
        write_kimi(c, w)
    elif arch in HYBRIDS:
        write_hybrid(c, w, kv_heads)
    elif arch not in ("deepseek2", "gemma4", "mamba2"):
        w.add_head_count_kv(kv_heads)
        w.add_key_length(c.get("head_dim") or hidden // heads)
        w.add_value_length(c.get("head_dim") or hidden // heads)
    if arch == "deepseek2":
        write_latents(c, w, rope)
    if arch == "falcon-h1":
        write_state_space(c, w)
    if arch == "mpt":
        w.add_max_alibi_bias(c["attn_config"]["alibi_bias_max"])
    if arch == "llama4":
        w.add_interleave_moe_layer_step(c["interleave_moe_layer_step"])
    if arch == "glm4moe":
        write_deepseek_experts(c, w)
    w.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if "conv_kernel" in c:
        w.add_layer_norm_rms_eps(c["layer_norm_epsilon"])
        w.add_layer_norm_eps(c["layer_norm_epsilon"])
    elif "rms_norm_eps" in c:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    elif "norm_eps" not in c:
        w.add_layer_norm_eps(first_of(c, "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"))
    if rope.get("rope_type") in ("linear", "yarn"):
        w.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        w.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "beta_fast" in rope:
            w.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            w.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope.get("rope_type") == "longrope":
        original = {**c, **rope}["original_max_position_embeddings"]
        stretched = c["max_position_embeddings"] / original
        w.add_rope_scaling_orig_ctx_len(original)
        if arch == "phimoe":
            w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretched) / math.log(original)))
    if c.get("sliding_window_pattern"):
        w.add_uint32(f"{arch}.attention.sliding_window_pattern", c["sliding_window_pattern"])
    if (part := rope.get("partial_rotary_factor")) and arch not in ("deepseek2", "gemma4"):
        w.add_rope_dimension_count(int(part * (c.get("head_dim") or hidden // heads)))
    if arch != "nemotron_h" and (
        experts := first_of(c, "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ):
        w.add_expert_count(experts)
        w.add_expert_used_count(first_of(c, "num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"))
    width_key = "intermediate_size" if arch in ("gpt-oss", "llama4", "minimax-m2") else "moe_intermediate_size"
    if width := c.get(width_key):
        w.add_expert_feed_forward_length(width)
    if "linear_num_key_heads" in c:
        write_delta_net(c, w)
    if arch == "minimax-m2":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if arch == "ernie4_5-moe":
        w.add_interleave_moe_layer_step(c["moe_layer_interval"])
        w.add_leading_dense_block_count(c["moe_layer_start_index"])
        w.add_expert_shared_count(c["moe_num_shared_experts"])
    if width := c.get("shared_expert_intermediate_size"):
        w.add_expert_shared_feed_forward_length(width)
    for key, add in (
        ("logit_scale", w.add_logit_scale), ("logits_scaling", w.add_logit_scale),
        ("embedding_multiplier", w.add_embedding_scale), ("residual_multiplier", w.add_residual_scale),
        ("attention_multiplier", w.add_attention_scale),
    ):  # fmt: skip
        if c.get(key) is not None:
            add(c[key])
    if c.get("sliding_window") and arch in SLIDING:
        w.add_sliding_window(c["sliding_window"])
    if "use_parallel_residual" in c:
        w.add_parallel_residual(c["use_parallel_residual"])
    if c.get("attn_logit_softcapping"):
        w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    if c.get("final_logit_softcapping"):
        w.add_final_logit_softcapping(c["final_logit_softcapping"])
