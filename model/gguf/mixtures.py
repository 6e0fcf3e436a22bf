"""Reads the configuration of mixtures of experts from a GGUF file's metadata, by architecture. Imports no torch."""

from model.gguf.common import (
    EVERY,
    SIGMOID,
    SOFTMAX,
    WINDOW,
    Values,
    like_llama,
    read_multipliers,
    read_predictors,
    read_window,
)
from model.gguf.source import ConfigSource

EXPERTS_OF_MAVERICK = 128
"""The one published Llama 4 without norms of queries and keys. No file says it."""
PHI_WARMTH = 1.243163121016122
"""Factor of cosines and sines of Phi-3.5-MoE, the one published Phi-MoE whose angles are scaled. No file says it."""


def read_qwen3_moe(source: ConfigSource, common: Values) -> Values:
    return like_llama("Qwen3MoeForCausalLM", width=1)(source, common) | {
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp has no other
    }


def read_qwen2_moe(source: ConfigSource, common: Values) -> Values:
    return like_llama("Qwen2MoeForCausalLM")(source, common) | {
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": source.count("expert_shared_feed_forward_length"),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "norm_topk_prob": False,  # llama.cpp has no other
    }


def read_deepseek2(source: ConfigSource, common: Values) -> Values:
    """DeepSeek-V2 and V3, and those that llama.cpp takes for them: sigmoids are V3's."""
    rotated, sigmoids = source.count("rope.dimension_count"), source.count("expert_gating_func", SOFTMAX) == SIGMOID
    values = like_llama("DeepseekV3ForCausalLM" if sigmoids else "DeepseekV2ForCausalLM")(source, common)
    rope = values.get("rope_scaling", {"rope_type": "default"})
    if source.has("rope.scaling.yarn_log_multiplier"):  # a tenth of what config.json says
        warmth = 10 * source.number("rope.scaling.yarn_log_multiplier")
        rope |= {"mscale": warmth, "mscale_all_dim": warmth}
    return values | {
        "rope_scaling": rope | {"partial_rotary_factor": 1.0},
        "kv_lora_rank": source.count("attention.kv_lora_rank"),
        "q_lora_rank": source.count("attention.q_lora_rank") if source.has("attention.q_lora_rank") else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": source.count("attention.key_length_mla") - rotated,
        "v_head_dim": source.count("attention.value_length_mla"),
        "kv_b_proj_by_head": True,
        **read_deepseek_experts(source),
        "topk_method": "group_limited_greedy" if source.count("expert_group_count", 1) > 1 else "greedy",
        "num_nextn_predict_layers": 0,
    }


def read_deepseek_experts(source: ConfigSource) -> Values:
    groups = source.count("expert_group_count", 1)
    return {
        "first_k_dense_replace": source.model.metadata.fields.get(f"{source.prefix}.leading_dense_block_count", int, 0),
        "n_routed_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "n_shared_experts": source.count("expert_shared_count"),
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "routed_scaling_factor": source.number("expert_weights_scale", 1.0),
        "norm_topk_prob": source.flag("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": source.count("expert_group_used_count", groups),
    }


def read_glm4_moe(source: ConfigSource, common: Values) -> Values:
    """GLM-4.5 and later."""
    check_sigmoids(source)
    return like_llama("Glm4MoeForCausalLM")(source, common) | {
        "attention_bias": "blk.0.attn_q.bias" in source.model.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in source.model.tensors,
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
        **read_predictors(source, common),
        **read_deepseek_experts(source),
    }


def read_gpt_oss(source: ConfigSource, common: Values) -> Values:
    """gpt-oss. Its limit of gates and the bounds of YaRN, which are not rounded, are those of the published models."""
    every, layers = source.count(f"{WINDOW}_pattern", 2), range(common["num_hidden_layers"])
    values = like_llama("GptOssForCausalLM")(source, common)
    rope = values.get("rope_scaling", {"rope_type": "default"})
    return values | {
        "rope_scaling": rope | ({"truncate": False} if rope["rope_type"] == "yarn" else {}),
        "intermediate_size": source.count("expert_feed_forward_length"),
        "num_local_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "experts_apart": True,
        "sliding_window": source.count(WINDOW),
        "layer_types": ["sliding_attention" if number % every < every - 1 else "full_attention" for number in layers],
    }


def read_granite_moe(source: ConfigSource, common: Values) -> Values:
    return (
        like_llama("GraniteMoeForCausalLM")(source, common)
        | read_multipliers(source, common)
        | {"num_local_experts": source.count("expert_count"), "num_experts_per_tok": source.count("expert_used_count")}
    )


def read_phimoe(source: ConfigSource, common: Values) -> Values:
    """Phi-MoE. The band beside which experts are weighed is that of the published models."""
    values = like_llama("PhimoeForCausalLM")(source, common)
    if values.get("rope_scaling", {}).get("rope_type") == "longrope":
        values["rope_scaling"] |= {"short_mscale": PHI_WARMTH}
    return (
        values
        | {
            "attention_bias": "blk.0.attn_q.bias" in source.model.tensors,
            "lm_head_bias": "output.bias" in source.model.tensors,
            "num_local_experts": source.count("expert_count"),
            "num_experts_per_tok": source.count("expert_used_count"),
        }
        | read_window(source)
    )


def read_ernie4_5_moe(source: ConfigSource, common: Values) -> Values:
    """ERNIE 4.5's mixture. Its last layers have experts too: llama.cpp has no others."""
    fields, prefix = source.model.metadata.fields, source.prefix
    return like_llama("Ernie4_5_MoeForCausalLM")(source, common) | {
        "use_bias": "blk.0.attn_q.bias" in source.model.tensors,
        "moe_num_experts": source.count("expert_count"),
        "moe_k": source.count("expert_used_count"),
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "moe_num_shared_experts": fields.get(f"{prefix}.expert_shared_count", int, 0),
        "moe_layer_start_index": fields.get(f"{prefix}.leading_dense_block_count", int, 0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": source.count(EVERY),
    }


def read_llama4(source: ConfigSource, common: Values) -> Values:
    """Llama 4. llama.cpp takes for granted the length of chunks, and which layers have no positions: every fourth.

    Raises:
        CheckpointError: The file says that layers have no chunks, or others, or bases of their own, or that heads are
            rotated in part.
    """
    fields, base = source.model.metadata.fields, common["rope_theta"]
    if source.has(WINDOW) and fields.values.get(f"llama4.{WINDOW}") == 0:
        raise fields.refuse(f"llama4.{WINDOW}", "a Llama 4 without chunks is not served")
    if source.count(f"{WINDOW}_pattern", 4) != 4:
        raise fields.refuse(f"llama4.{WINDOW}_pattern", "must be 4")
    if source.number("rope.freq_base_swa", base) != base:
        raise fields.refuse("llama4.rope.freq_base_swa", f"must be that of all layers, {base}")
    if source.count("rope.dimension_count", common["head_dim"]) != common["head_dim"]:
        raise fields.refuse("llama4.rope.dimension_count", f"must be that of a head, {common['head_dim']}")
    experts = source.count("expert_count")
    return like_llama("Llama4ForCausalLM")(source, common) | {
        "intermediate_size": source.count("expert_feed_forward_length"),
        "intermediate_size_mlp": source.count("feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": source.count("expert_used_count"),
        "interleave_moe_layer_step": source.count(EVERY),
        "use_qk_norm": experts != EXPERTS_OF_MAVERICK,
    }


def read_minimax_m2(source: ConfigSource, common: Values) -> Values:
    check_sigmoids(source)
    return like_llama("MiniMaxM2ForCausalLM")(source, common) | {
        "intermediate_size": source.count("expert_feed_forward_length"),
        "num_local_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "rotary_dim": source.count("rope.dimension_count", common["head_dim"]),
    }


def check_sigmoids(source: ConfigSource) -> None:
    """Raises CheckpointError where experts are chosen by anything but sigmoids. Files that do not say mean these."""
    if source.count("expert_gating_func", SIGMOID) != SIGMOID:
        raise source.model.metadata.fields.refuse(
            f"{source.prefix}.expert_gating_func", f"must be {SIGMOID}, which is sigmoid"
        )
