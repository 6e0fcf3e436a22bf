"""config.json of published models, as the Hub has them: how many parameters they have, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from model.config import read_config
from model.footprint import weight_bytes
from tests.model.config_files import refusal, write

MINIMAX_M2 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "bos_token_id": None, "eos_token_id": None,
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
    "max_position_embeddings": 196608, "mlp_intermediate_size": 8192, "model_type": "minimax",
    "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62,
    "num_key_value_heads": 8, "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
    "shared_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False, "use_mtp": True,
    "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}  # fmt: skip
PHI_3_5_MOE = {
    "architectures": ["PhiMoEForCausalLM"], "attention_bias": True,
    "auto_map": {"AutoConfig": "configuration_phimoe.PhiMoEConfig"}, "bos_token_id": 1, "eos_token_id": 32000,
    "hidden_act": "silu", "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400,
    "lm_head_bias": True, "max_position_embeddings": 131072, "model_type": "phimoe", "num_attention_heads": 32,
    "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
    "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [8.0] * 64, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096,
        "short_factor": [1.25] * 64, "short_mscale": 1.243163121016122, "type": "longrope",
    },
    "rope_theta": 10000.0, "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32064,
}  # fmt: skip

ERNIE_21B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 2560, "intermediate_size": 12288, "max_position_embeddings": 131072, "model_type": "ernie4_5_moe",
    "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "vocab_size": 103424,
}  # fmt: skip

GLM_4_9B = {
    "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
    "max_position_embeddings": 32768, "model_type": "glm4", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 151552,
}  # fmt: skip

GRANITE_3B_A800M = {
    "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 1536,
    "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoe",
    "num_attention_heads": 24, "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "num_local_experts": 40, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 49155,
}  # fmt: skip

GRANITE_4_H_MICRO = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "layer_types": ["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)],
    "logits_scaling": 8, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 64, "mamba_proj_bias": False,
    "max_position_embeddings": 131072, "model_type": "granitemoehybrid", "num_attention_heads": 32,
    "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 0,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000,
    "shared_intermediate_size": 8192, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": 100352,
}  # fmt: skip

BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-05, "model_type": "bloom", "n_embed": 1024, "n_inner": None, "n_layer": 24,
    "num_attention_heads": 16, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048,
    "torch_dtype": "float16", "use_cache": True, "vocab_size": 250880,
}  # fmt: skip

MPT_7B = {
    "architectures": ["MPTForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
    "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None,
    },
    "d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu",
    "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32,
    "n_layers": 32, "no_bias": True, "norm_type": "low_precision_layernorm", "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16", "use_cache": False, "verbose": 0,
    "vocab_size": 50432,
}  # fmt: skip

CODESTRAL_MAMBA_7B = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0,
    "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 8, "norm_before_gate": True, "num_heads": 128,
    "num_hidden_layers": 64, "pad_token_id": 0, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": False,
    "use_conv_bias": True, "vocab_size": 32768,
}  # fmt: skip

KIMI_LINEAR_48B = {
    "architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4], "num_heads": 32, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip

LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
    "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False,
    "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True, "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
    "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "use_pos_enc": True,
    "vocab_size": 65536,
}  # fmt: skip

LLAMA_4_MAVERICK = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
        "attn_temperature_tuning": 4, "bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008],
        "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "max_position_embeddings": 1048576, "model_type": "llama4_text", "moe_layers": list(range(1, 48, 2)),
        "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "num_local_experts": 128, "pad_token_id": 200018, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "use_qk_norm": False,
        "vocab_size": 202048,
    },
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model", "num_hidden_layers": 34},
}  # fmt: skip

NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "auto_map": {"AutoConfig": "configuration.X"},
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64,
    "mamba_proj_bias": False, "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h", "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1, "n_groups": 8, "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05,
    "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": False,
    "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16",
    "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip

FALCON_H1_0_5B = {
    "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381, "head_dim": 64, "hidden_act": "silu",
    "hidden_size": 1024, "intermediate_size": 2048, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625,
    "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
    "mamba_proj_bias": False, "mamba_rms_norm": False, "max_position_embeddings": 16384, "mlp_bias": False,
    "mlp_multipliers": [0.8838834764831844, 0.5859375], "model_type": "falcon_h1", "num_attention_heads": 8,
    "num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-05,
    "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3536, 0.25, 0.3536, 0.5, 0.3536],
    "ssm_out_multiplier": 0.2357, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32784,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "billions", "context"),
    [
        (MINIMAX_M2, 228.7, 196608),
        (PHI_3_5_MOE, 41.87, 4096),
        (ERNIE_21B, 21.83, 131072),
        (GLM_4_9B, 9.40, 32768),
        (GRANITE_3B_A800M, 3.299, 4096),
        (GRANITE_4_H_MICRO, 3.191, 131072),
        (BLOOM_560M, 0.5592, 2048),
        (MPT_7B, 6.649, 2048),
        (CODESTRAL_MAMBA_7B, 7.285, 262144),
        (KIMI_LINEAR_48B, 49.12, 1048576),
        (LFM2_1_2B, 1.170, 128000),
        (LLAMA_4_MAVERICK, 400.7, 1048576),
        (NEMOTRON_3_NANO, 31.58, 262144),
        (FALCON_H1_0_5B, 0.5214, 16384),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else "",
)
def test_parameters(values: dict[str, Any], billions: float, context: int, tmp_path: Path) -> None:
    config = read_config(write(tmp_path, values))
    assert config.context == context
    untied = replace(config, quantization=None, tied_embeddings=False)  # some CPUs hold a tied weight twice
    shared = config.vocabulary * config.hidden if config.tied_embeddings else 0
    parameters = weight_bytes(untied, "bfloat16") / 2 - shared
    assert parameters / 1e9 == pytest.approx(billions, rel=7e-4)  # what recurrences hold in float32 counts twice


def _maverick(**changes: Any) -> dict[str, Any]:
    return {**LLAMA_4_MAVERICK["text_config"], **changes}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (MINIMAX_M2, {"rotary_dim": 256}, "256 of the 128 elements of a head are to be rotated"),
        (MINIMAX_M2, {"num_experts_per_tok": 257}, "there are 256 experts"),
        (ERNIE_21B, {"moe_k": 65}, "'moe_k' is 65, there are 64 experts"),
        (MPT_7B, {"attn_config": {"clip_qkv": 6}}, "'clip_qkv' is 6, which is not supported"),
        (MPT_7B, {"attn_config": {"alibi": False}}, "'alibi' is False, must be True"),
        (MPT_7B, {"no_bias": False}, "'no_bias' is False, must be True"),
        (CODESTRAL_MAMBA_7B, {"num_heads": 64}, "'num_heads' is 64, heads of 64 elements do not make"),
        (CODESTRAL_MAMBA_7B, {"n_groups": 3}, "'n_groups' is 3, 128 heads cannot be divided into as many groups"),
        (CODESTRAL_MAMBA_7B, {"hidden_act": "gelu"}, "'hidden_act' is 'gelu', must be 'silu'"),
        (GRANITE_4_H_MICRO, {"hidden_act": "gelu"}, "'hidden_act' is 'gelu', must be 'silu'"),
        (NEMOTRON_3_NANO, {"mamba_hidden_act": "relu"}, "'mamba_hidden_act' is 'relu', must be 'silu'"),
        (KIMI_LINEAR_48B, {"mla_use_nope": False}, "'mla_use_nope' is False, latent attention with positions"),
        (KIMI_LINEAR_48B, {"moe_router_activation_func": "softmax"}, "must be 'sigmoid'"),
        (KIMI_LINEAR_48B, {"linear_attn_config": {"full_attn_layers": [0]}}, "'full_attn_layers'"),
        (LLAMA_4_MAVERICK, {"text_config": None}, "'text_config' is missing"),
        (LLAMA_4_MAVERICK, {"text_config": _maverick(moe_layers=[48])}, "'moe_layers' is [48], must be numbers of"),
        (LLAMA_4_MAVERICK, {"text_config": _maverick(num_experts_per_tok=129)}, "there are 128 experts"),
        (LLAMA_4_MAVERICK, {"text_config": _maverick(layer_types=["sliding_attention"] * 48)}, "'chunked_attention'"),
        (LLAMA_4_MAVERICK, {"text_config": _maverick(floor_scale=0)}, "'floor_scale' is 0"),
        (LLAMA_4_MAVERICK, {"text_config": _maverick(max_position_embeddings=2**24)}, "'max_position_embeddings' is"),
        (PHI_3_5_MOE, {"num_experts_per_tok": 3}, "'num_experts_per_tok' is 3, must be 2"),
        (PHI_3_5_MOE, {"router_jitter_noise": -0.1}, "'router_jitter_noise' is -0.1, must not be below 0"),
        (PHI_3_5_MOE, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "must be 'default' or 'longrope'"),
        (PHI_3_5_MOE, {"rope_scaling": {**PHI_3_5_MOE["rope_scaling"], "short_mscale": None}}, "'short_mscale'"),
    ],
)
def test_refused(values: dict[str, Any], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(write(tmp_path, values | {"quantization_config": None} | changes))
