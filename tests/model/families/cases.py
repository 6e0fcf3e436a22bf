"""The model families and their variants, as tiny checkpoints that can be written: one `Case` each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers as hf

CONTEXT = 256


@dataclass(frozen=True, eq=False)
class Case:
    """A tiny random model. changes: what its config says beside `checkpoints.SMALL`. windows: by layer, how many tokens
    a token sees; None where all layers see everything. gain: of the final norm, which spreads the logits. embedding:
    standard deviation of what enters the first layer; small in tied models, which would repeat their last token else.
    padded: whether padding changes nothing in transformers, which lets biases of a recurrence's inputs into its state
    and counts it in positions that make queries grow.
    """

    name: str
    family: str
    kind: type[hf.PretrainedConfig]
    covers: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] | None = None
    context: int = CONTEXT
    seed: int = 0
    gain: float = 3.0
    embedding: float = 1.0
    padded: bool = True

    def __str__(self) -> str:
        return self.name


def rope(kind: str = "default", theta: float = 10000.0, **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def layers(letters: str) -> dict[str, Any]:
    """A letter a layer: f for full attention, s for a window, r for a recurrence, c for a short convolution."""
    names = {"f": "full_attention", "s": "sliding_attention", "r": "linear_attention", "c": "conv"}
    kinds = [names[letter] for letter in letters]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
STEP = rope("llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=2.0, original_max_position_embeddings=64)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64)
TUNED_YARN = rope(
    "yarn",
    factor=8.0,
    original_max_position_embeddings=64,
    beta_fast=4.0,
    beta_slow=0.25,
    attention_factor=1.25,
    truncate=False,
)
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 13, "vocab_size_per_layer_input": 320,
          "hidden_size_per_layer_input": 0}  # fmt: skip
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
KIMI = {"moe_intermediate_size": 48, "linear_num_heads": 4, "linear_head_dim": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
OSS_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 3.0}
YARN_IN_FULL = {
    "rope_parameters": {
        "full_attention": YARN["rope_parameters"] | {"rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    }
}
LLAMA4 = {"head_dim": 16, "num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 112,
          "floor_scale": 20, "attn_scale": 0.5}  # fmt: skip
TIED = {"tie_word_embeddings": True}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
         "linear_value_head_dim": 16, "head_dim": 16}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
ERNIE_EXPERTS = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48}
GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}
NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16}
FALCON_H1_FACTORS = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.6, "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [0.7, 1.4, 0.6, 1.5, 0.8], "mlp_multipliers": [0.8838834764831844, 0.5859375],
}  # fmt: skip
SHARED = {
    "moe_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 48,
}
FALCON_OLD = {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "bias": True}

CASES = (
    Case("llama", "Llama", hf.LlamaConfig, "grouped-query attention"),
    Case("llama-biases", "Llama", hf.LlamaConfig, "biases in attention and MLP",
         {"attention_bias": True, "mlp_bias": True}, seed=2),
    Case("llama-tied", "Llama", hf.LlamaConfig, "tied embeddings, head_dim 24, MHA",
         TIED | {"head_dim": 24, "num_key_value_heads": 4}, embedding=0.3),
    Case("llama-llama3", "Llama", hf.LlamaConfig, "rope scaling llama3", LLAMA3, seed=3),
    Case("llama-linear", "Llama", hf.LlamaConfig, "rope scaling linear", rope("linear", factor=2.5)),
    Case("llama-dynamic", "Llama", hf.LlamaConfig, "rope scaling dynamic, within the length of its training",
         rope("dynamic", factor=4.0)),
    Case("llama-yarn", "Llama", hf.LlamaConfig, "rope scaling yarn", YARN, seed=2),
    Case("llama-yarn-tuned", "Llama", hf.LlamaConfig, "yarn with betas, attention factor, not truncated", TUNED_YARN,
         context=512),
    Case("mistral", "Mistral", hf.MistralConfig, "no window, head_dim 24",
         {"sliding_window": None, "head_dim": 24}, seed=1),
    Case("mistral-window", "Mistral", hf.MistralConfig, "a window in all layers", {"sliding_window": 17},
         windows=(17, 17, 17), seed=1),
    Case("ministral", "Ministral", hf.MinistralConfig, "windows in some layers",
         {"sliding_window": 12, "head_dim": 16} | layers("sfsf"), windows=(12, None, 12, None), seed=2),
    Case("mixtral", "Mixtral", hf.MixtralConfig, "5 experts, 2 at work", {"num_local_experts": 5}),
    Case("mixtral-window", "Mixtral", hf.MixtralConfig, "a window in all layers, 3 of 4 experts",
         {"num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 20}, windows=(20, 20, 20), seed=3),
    Case("qwen2", "Qwen2", hf.Qwen2Config, "biases of queries, keys and values", seed=5),
    Case("qwen2-window", "Qwen2", hf.Qwen2Config, "a window from layer 1 on, tied embeddings",
         TIED | {"use_sliding_window": True, "sliding_window": 15, "max_window_layers": 1}, windows=(None, 15, 15),
         embedding=0.3),
    Case("qwen2-moe", "Qwen2-MoE", hf.Qwen2MoeConfig, "6 experts, 2 at work, and a shared one with a gate",
         SHARED | {"norm_topk_prob": True}, seed=2),
    Case("qwen2-moe-mixed", "Qwen2-MoE", hf.Qwen2MoeConfig,
         "some layers dense, every other with a window, no biases, weights as they are",
         SHARED | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "qkv_bias": False,
                   "use_sliding_window": True, "sliding_window": 15},
         windows=(15, None, 15, None), seed=3),
    Case("qwen3", "Qwen3", hf.Qwen3Config, "norms of queries and keys, head_dim 24", {"head_dim": 24}),
    Case("qwen3-window", "Qwen3", hf.Qwen3Config, "a window in the last layer, biases, tied embeddings",
         TIED | {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 9,
                 "max_window_layers": 2},
         windows=(None, None, 9), embedding=0.3),
    Case("qwen3-yarn", "Qwen3", hf.Qwen3Config, "rope scaling yarn", YARN | {"head_dim": 32}),
    Case("qwen3-moe", "Qwen3-MoE", hf.Qwen3MoeConfig, "6 experts, 2 at work, weights of those to 1",
         EXPERTS | {"norm_topk_prob": True}, seed=2),
    Case("qwen3-moe-mixed", "Qwen3-MoE", hf.Qwen3MoeConfig, "some layers dense, weights as they are",
         EXPERTS | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False}),
    Case("qwen3-moe-window", "Qwen3-MoE", hf.Qwen3MoeConfig, "a window in all layers, biases, one expert at work",
         EXPERTS | {"num_experts_per_tok": 1, "attention_bias": True, "use_sliding_window": True, "sliding_window": 14},
         windows=(14, 14, 14), seed=4),
    Case("gemma", "Gemma", hf.GemmaConfig, "one KV head, head_dim 32",
         {"num_key_value_heads": 1, "head_dim": 32}, seed=5, embedding=0.3),
    Case("gemma2", "Gemma 2", hf.Gemma2Config, "alternating windows, soft caps, query scale",
         {"head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 4.0,
          "final_logit_softcapping": 9.0, "num_hidden_layers": 4},
         windows=(11, None, 11, None), seed=6, embedding=0.06, gain=12.0),
    Case("gemma2-uncapped", "Gemma 2", hf.Gemma2Config, "no soft caps, head_dim 24",
         {"head_dim": 24, "sliding_window": 33, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None,
          "final_logit_softcapping": None}, windows=(33, None, 33), seed=4, embedding=0.1, gain=8.0),
    Case("gemma3", "Gemma 3 text", hf.Gemma3TextConfig, "two rope bases, norms of queries and keys, windows in 2 of 3",
         {"head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 20, "sliding_window_pattern": 3,
          "num_hidden_layers": 4},
         windows=(13, 13, None, 13), seed=7, embedding=0.1, gain=8.0),
    Case("gemma3-linear", "Gemma 3 text", hf.Gemma3TextConfig,
         "linear rope scaling in the full layers alone, capped logits",
         {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32, "sliding_window_pattern": 2,
          "num_hidden_layers": 4, "rope_parameters": TWO_ROPES, "final_logit_softcapping": 12.0},
         windows=(8, None, 8, None), seed=2, embedding=0.1, gain=8.0),
    Case("gemma4", "Gemma 4 (text)", hf.Gemma4TextConfig,
         "inputs by layer, shared KV, MLPs twice as wide, wider heads in full layers, capped logits",
         GEMMA4 | layers("ssfssf") | {"num_kv_shared_layers": 3, "use_double_wide_mlp": True,
          "hidden_size_per_layer_input": 16, "final_logit_softcapping": 30.0},
         windows=(13, 13, None, 13, 13, None), seed=6, embedding=0.1, gain=8.0),
    Case("gemma4-moe", "Gemma 4 (text)", hf.Gemma4TextConfig,
         "experts beside MLPs, keys as values and fewer KV heads in full layers",
         GEMMA4 | layers("sfsf") | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "enable_moe_block": True,
          "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 48},
         windows=(13, None, 13, None), seed=0, embedding=0.1, gain=12.0),
    Case("gpt2", "GPT-2", hf.GPT2Config, "learned positions, tied embeddings", embedding=0.3),
    Case("gpt2-inner", "GPT-2", hf.GPT2Config, "n_inner, the exact gelu, untied",
         {"n_inner": 100, "activation_function": "gelu", "tie_word_embeddings": False}, seed=6),
    Case("gpt-neox", "GPT-NeoX", hf.GPTNeoXConfig, "parallel residual, a quarter of each head rotated", seed=14),
    Case("gpt-neox-sequential", "GPT-NeoX", hf.GPTNeoXConfig,
         "sequential residual, all of each head rotated, no attention biases",
         {"use_parallel_residual": False, "attention_bias": False} | rope(partial_rotary_factor=1.0, theta=20000.0),
         embedding=2.0, seed=2),
    Case("gpt-neox-linear", "GPT-NeoX", hf.GPTNeoXConfig, "rope scaling linear, tied embeddings, fast gelu",
         TIED | {"hidden_act": "gelu_fast"} | rope("linear", factor=2.0, partial_rotary_factor=0.5),
         seed=19, embedding=0.3),
    Case("opt", "OPT", hf.OPTConfig, "norms before, learned positions with an offset, relu", seed=1, embedding=0.3),
    Case("opt-plain", "OPT", hf.OPTConfig, "no biases in linears, gelu, untied",
         {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False}),
    Case("opt-post-norm", "OPT", hf.OPTConfig, "norms after, embeddings narrower than the layers",
         {"do_layer_norm_before": False, "word_embed_proj_dim": 32}, seed=7, embedding=0.6),
    Case("phi", "Phi", hf.PhiConfig, "parallel residual, half of each head rotated, a bias of the logits"),
    Case("phi-qk-norm", "Phi", hf.PhiConfig, "norms of queries and keys, MHA",
         {"qk_layernorm": True, "num_key_value_heads": 4, "partial_rotary_factor": 0.4, "hidden_size": 80},
         seed=8, embedding=2.0),
    Case("phi3", "Phi-3", hf.Phi3Config, "fused projections, a window in all layers", {"sliding_window": 21},
         windows=(21, 21, 21)),
    Case("phi3-partial", "Phi-3", hf.Phi3Config, "three quarters of each head rotated, tied embeddings",
         TIED | rope(partial_rotary_factor=0.75), seed=1, embedding=0.3),
    Case("phi3-longrope", "Phi-3", hf.Phi3Config, "rope scaling longrope, within the length of its training",
         {"original_max_position_embeddings": 200}
         | rope("longrope", short_factor=[1.0, 1.1, 1.3, 1.7, 2.3, 3.1, 4.7, 6.0], long_factor=[8.0] * 8),
         context=200, seed=4),
    Case("phimoe", "Phi-MoE", hf.PhimoeConfig, "sparsemixer over 6 experts, LayerNorm, biases, longrope",
         {"num_local_experts": 6, "router_jitter_noise": 0.1, "attention_bias": True, "lm_head_bias": True}
         | rope("longrope", short_factor=[1.0, 1.1, 1.3, 1.7, 2.3, 3.1, 4.7, 6.0], long_factor=[8.0] * 8,
                short_mscale=1.2, long_mscale=1.4, original_max_position_embeddings=200),
         context=200, seed=1),
    Case("phimoe-window", "Phi-MoE", hf.PhimoeConfig,
         "a window in all layers, no biases in attention, rotation as it is, heads of 32, tied embeddings",
         TIED | {"num_local_experts": 5, "router_jitter_noise": 0.3, "head_dim": 32, "sliding_window": 19},
         windows=(19, 19, 19), seed=2, embedding=0.3),
    Case("starcoder2", "StarCoder2", hf.Starcoder2Config, "biases, LayerNorm, tied embeddings, a window in all layers",
         {"sliding_window": 16}, windows=(16, 16, 16), seed=11, embedding=0.15, gain=5.0),
    Case("starcoder2-plain", "StarCoder2", hf.Starcoder2Config, "neither biases nor windows, untied",
         {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    Case("olmo2", "OLMo 2", hf.Olmo2Config, "norms after, norms of all queries and keys, grouped-query attention"),
    Case("qwen3.5", "Qwen 3.5 (text)", hf.Qwen3_5TextConfig, "gated delta rule, gated attention, a part rotated",
         DELTA | layers("rrfr") | rope(partial_rotary_factor=0.5, theta=1000.0), seed=7),
    Case("qwen3.5-wide", "Qwen 3.5 (text)", hf.Qwen3_5TextConfig,
         "attention first and last, as many key heads as value heads, other sizes, tied embeddings, biases",
         DELTA | layers("frrf") | TIED | {"linear_num_key_heads": 3, "linear_num_value_heads": 3,
          "linear_key_head_dim": 8, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3, "attention_bias": True}
         | rope(partial_rotary_factor=0.25), seed=5, embedding=0.3),
    Case("qwen3.5-moe", "Qwen 3.5 MoE (text)", hf.Qwen3_5MoeTextConfig, "experts beside a shared one",
         DELTA | EXPERTS | {"shared_expert_intermediate_size": 48} | layers("rfr")
         | rope(partial_rotary_factor=0.5, theta=1000.0), seed=5),
    Case("qwen3-next", "Qwen 3 Next", hf.Qwen3NextConfig, "projections by key head, an MLP in one layer",
         DELTA | EXPERTS | {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1], "norm_topk_prob": False}
         | layers("rfrf") | rope(partial_rotary_factor=0.25, theta=1000.0), seed=7),
    Case("deepseek-v2", "DeepSeek-V2", hf.DeepseekV2Config,
         "latent attention, a norm between the products of queries, experts from the best groups, a dense layer first",
         DEEPSEEK_EXPERTS | LATENT | {"topk_method": "group_limited_greedy",
          "routed_scaling_factor": 2.0}, seed=0),
    Case("deepseek-v2-lite", "DeepSeek-V2", hf.DeepseekV2Config,
         "one product of queries, the best of all experts, yarn with factors of scores, biases",
         DEEPSEEK_EXPERTS | LATENT | {"q_lora_rank": None, "topk_method": "greedy", "first_k_dense_replace": 0,
          "qk_nope_head_dim": 24, "v_head_dim": 20, "n_group": None, "topk_group": None, "attention_bias": True}
         | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.3), seed=4),
    Case("deepseek-v3", "DeepSeek-V3", hf.DeepseekV3Config, "experts in groups by sigmoid and bias, yarn",
         DEEPSEEK_EXPERTS | LATENT | {"num_hidden_layers": 4, "num_nextn_predict_layers": 0}
         | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0), seed=3),
    Case("deepseek-v3-halves", "DeepSeek-V3", hf.DeepseekV3Config,
         "halves rotated, one product of queries, weights as they are, values wider than the rest of keys",
         DEEPSEEK_EXPERTS | LATENT | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False,
          "v_head_dim": 64, "attention_bias": True, "num_nextn_predict_layers": 0}, seed=2),
    Case("glm4", "GLM-4", hf.Glm4Config, "norms before and after, half of each head rotated, in neighbours, biases",
         {"head_dim": 16}, seed=1),
    Case("glm4-whole", "GLM-4", hf.Glm4Config,
         "all of each head rotated, in neighbours, no biases, head_dim 32, tied embeddings",
         TIED | {"head_dim": 32, "attention_bias": False} | rope(partial_rotary_factor=1.0), seed=1, embedding=0.3),
    Case("glm4-moe-lite", "GLM-4 MoE lite", hf.Glm4MoeLiteConfig, "latent attention, layers of experts by name",
         {key: value for key, value in DEEPSEEK_EXPERTS.items() if key != "first_k_dense_replace"} | LATENT
         | {"mlp_layer_types": ["sparse", "dense", "sparse"]}, seed=6),
    Case("mistral4", "Mistral 4", hf.Mistral4Config,
         "latent attention, queries scaled by position, experts by softmax from groups of two, yarn",
         DEEPSEEK_EXPERTS | LATENT | {"routed_scaling_factor": 1.5}
         | rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0,
                llama_4_scaling_beta=0.6), seed=6),
    Case("glm4-moe", "GLM-4 MoE", hf.Glm4MoeConfig,
         "experts in groups by sigmoid and bias, two shared ones, a dense layer first, half of each head rotated",
         DEEPSEEK_EXPERTS | {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "use_qk_norm": True,
          "num_hidden_layers": 4, "head_dim": 24, "num_nextn_predict_layers": 0}, seed=4),
    Case("glm4-moe-plain", "GLM-4 MoE", hf.Glm4MoeConfig,
         "one group, weights as they are, biases in attention, experts in all layers, all of a head rotated",
         DEEPSEEK_EXPERTS | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "attention_bias": True,
          "first_k_dense_replace": 0, "n_shared_experts": 1, "head_dim": 16, "num_nextn_predict_layers": 0}
         | rope(partial_rotary_factor=1.0), seed=12),
    Case("gpt-oss", "gpt-oss", hf.GptOssConfig, "sinks, 6 experts, 2 at work, alternating windows, yarn, biases",
         OSS_EXPERTS | TUNED_YARN | {"sliding_window": 14, "num_hidden_layers": 4, "head_dim": 16},
         windows=(14, None, 14, None), seed=3, gain=5.0, context=512),
    Case("gpt-oss-limit", "gpt-oss", hf.GptOssConfig,
         "gates that reach their limit, full layers first, MHA, head_dim 32, no biases in attention, tied embeddings",
         OSS_EXPERTS | TIED | rope("linear", 1000.0, factor=2.0) | {"swiglu_limit": 0.7, "attention_bias": False,
          "num_key_value_heads": 4, "sliding_window": 21, "head_dim": 32, "num_experts_per_tok": 3} | layers("fsf"),
         windows=(None, 21, None), seed=3, embedding=0.3),
    Case("llama4", "Llama 4 (text)", hf.Llama4TextConfig,
         "chunks in 3 of 4 layers, no rotation and queries that grow in the fourth; 1 of 4 experts beside a shared one",
         LLAMA4 | {"attention_chunk_size": 13}, windows=(13, 13, 13, None), padded=False, seed=2),
    Case("llama4-dense", "Llama 4 (text)", hf.Llama4TextConfig,
         "experts in every other layer, 2 of 4 at work; no norms of queries and keys, frequencies of two kinds, tied",
         TIED | LLAMA4 | STEP | {"attention_chunk_size": 21, "interleave_moe_layer_step": 2, "use_qk_norm": False,
                                   "attention_bias": True, "num_experts_per_tok": 2, "no_rope_layers": [1, 0, 1, 0],
                                   "attn_temperature_tuning": False},
         windows=(21, None, 21, None), embedding=0.3, seed=4),
    Case("minimax-m2", "MiniMax M2", hf.MiniMaxM2Config,
         "norms over all queries and keys, half of each head rotated, 2 of 6 experts by sigmoid and bias",
         {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16} | rope(partial_rotary_factor=0.5), seed=3),
    Case("minimax-m2-wide", "MiniMax M2", hf.MiniMaxM2Config,
         "heads of 32, all of each rotated, MHA, 3 of 8 experts, tied embeddings",
         TIED | {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "num_key_value_heads": 4},
         seed=2, embedding=0.3),
    Case("olmo3", "OLMo 3", hf.Olmo3Config, "windows in 3 of 4 layers, norms after",
         {"sliding_window": 13, "num_hidden_layers": 4}, windows=(13, 13, 13, None)),
    Case("olmo3-yarn", "OLMo 3", hf.Olmo3Config, "yarn in the full layers alone, biases in attention",
         YARN_IN_FULL | {"sliding_window": 18, "attention_bias": True} | layers("fsfs"),
         windows=(None, 18, None, 18), seed=1),
    Case("smollm3", "SmolLM3", hf.SmolLM3Config, "every fourth layer without rotation, tied embeddings",
         {"num_hidden_layers": 4}, seed=1, embedding=0.3),
    Case("smollm3-window", "SmolLM3", hf.SmolLM3Config, "windows in the layers without rotation, biases, untied",
         {"tie_word_embeddings": False, "no_rope_layers": [1, 0, 1, 0], "num_hidden_layers": 4,
          "use_sliding_window": True, "sliding_window": 15, "attention_bias": True, "mlp_bias": True},
         windows=(None, 15, None, 15)),
    Case("granite", "Granite", hf.GraniteConfig, "multipliers of embeddings, residuals, scores and logits; tied",
         TIED | GRANITE, seed=8, embedding=0.014, gain=30.0),
    Case("granite-biases", "Granite", hf.GraniteConfig, "biases in attention and MLP, scores that are not scaled",
         {"embedding_multiplier": 3.0, "residual_multiplier": 1.5, "logits_scaling": 2.0, "attention_bias": True,
          "mlp_bias": True}, seed=2),
    Case("granite-moe", "Granite MoE", hf.GraniteMoeConfig,
         "5 experts, 2 at work; multipliers of embeddings, residuals, scores and logits; tied",
         TIED | GRANITE | {"num_local_experts": 5}, seed=6, embedding=0.014, gain=30.0),
    Case("granite-moe-biases", "Granite MoE", hf.GraniteMoeConfig,
         "biases in attention, 3 of 8 experts, scores that are not scaled, untied",
         {"embedding_multiplier": 3.0, "residual_multiplier": 1.5, "logits_scaling": 2.0, "attention_bias": True,
          "num_experts_per_tok": 3}, seed=1),
    Case("granite-hybrid", "Granite 4 hybrid", hf.GraniteMoeHybridConfig,
         "state-space mixers, experts beside an MLP, no positions; multipliers; tied",
         TIED | GRANITE | MAMBA | {"num_local_experts": 5, "shared_intermediate_size": 48} | layers("rfrr"),
         seed=1, embedding=0.014, gain=30.0),
    Case("granite-hybrid-dense", "Granite 4 hybrid", hf.GraniteMoeHybridConfig,
         "no experts, rotary positions, one group, biases but in the convolution, other sizes",
         MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope",
          "attention_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_n_heads": 4,
          "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 24, "mamba_d_conv": 3} | layers("frr"), seed=0,
         padded=False),
    Case("granite-4-attention", "Granite 4 hybrid", hf.GraniteMoeHybridConfig, "attention in all layers",
         {"num_local_experts": 0, "shared_intermediate_size": 96, "position_embedding_type": "rope"}
         | layers("fff"), seed=7),
    Case("kimi-linear", "Kimi Linear", hf.KimiLinearConfig,
         "Kimi Delta Attention, latent attention without positions, experts by sigmoid in groups, a dense layer first",
         LATENT | KIMI | {"num_local_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
          "n_shared_experts": 2} | layers("rrfr"), seed=7),
    Case("kimi-linear-plain", "Kimi Linear", hf.KimiLinearConfig,
         "queries by one product, 3 taps, experts of one group, weights as they are, attention first",
         LATENT | KIMI | {"q_lora_rank": None, "linear_conv_kernel_dim": 3, "linear_num_heads": 2,
          "linear_head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": False,
          "mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 1.5} | layers("frr"), seed=0),
    Case("lfm2", "LFM2", hf.Lfm2Config, "short convolutions between gates, norms of queries and keys, tied",
         {"norm_eps": 0.02, "block_multiple_of": 32} | layers("ccfc"), seed=1, embedding=0.3),
    Case("lfm2-biases", "LFM2", hf.Lfm2Config, "biases of convolutions, 4 taps, widths as they are, untied",
         {"norm_eps": 0.02, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False,
          "tie_word_embeddings": False} | layers("cfcf"), seed=6, padded=False),
    Case("lfm2-moe", "LFM2 MoE", hf.Lfm2MoeConfig, "experts by sigmoid and bias, a dense layer first",
         {"norm_eps": 0.02, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
          "num_dense_layers": 1, "routed_scaling_factor": 1.5} | layers("cfcc"), seed=0, embedding=0.3),
    Case("mamba2", "Mamba-2", hf.Mamba2Config, "state-space mixers alone, tied",
         {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "tie_word_embeddings": True}, seed=3,
         context=262144, embedding=0.3),
    Case("mamba2-biases", "Mamba-2", hf.Mamba2Config, "biases but in the convolution, one group, untied",
         {"num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 24, "conv_kernel": 3, "use_bias": True,
          "use_conv_bias": False}, seed=4, context=262144, padded=False),
    Case("nemotron-h", "Nemotron-H", hf.NemotronHConfig, "a part a layer: state-space mixers, attention, MLPs",
         NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]},
         seed=6),
    Case("nemotron-h-moe", "Nemotron-H", hf.NemotronHConfig, "experts without gates by sigmoid and bias, biases",
         NEMOTRON | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "use_bias": True,
          "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2,
          "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5}, seed=6,
         padded=False),
    Case("falcon-h1", "Falcon-H1", hf.FalconH1Config,
         "attention beside a state-space mixer in each layer, gates without a norm, factors of all parts",
         MAMBA | FALCON_H1_FACTORS | {"mamba_d_ssm": 128}, seed=7),
    Case("falcon-h1-normed", "Falcon-H1", hf.FalconH1Config, "a norm before gates, biases, width by expansion; tied",
         MAMBA | TIED | {"mamba_d_ssm": None, "mamba_rms_norm": True, "mamba_proj_bias": True, "projectors_bias": True,
          "attention_bias": True, "mlp_bias": True}, seed=3, embedding=0.3, padded=False),
    Case("falcon-h1-gated", "Falcon-H1", hf.FalconH1Config, "a norm after the gates",
         MAMBA | {"mamba_d_ssm": 128, "mamba_rms_norm": True, "mamba_norm_before_gate": False}, seed=3),
    Case("seed-oss", "Seed-OSS", hf.SeedOssConfig, "biases of queries, keys and values, head_dim 32",
         {"head_dim": 32}, seed=2),
    Case("seed-oss-biases", "Seed-OSS", hf.SeedOssConfig, "biases of outputs and MLP alone",
         {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True}, seed=3),
    Case("cohere", "Cohere", hf.CohereConfig, "parallel residual, neighbours rotated, a factor of the logits, tied",
         {"logit_scale": 2.0}, seed=1, embedding=0.3),
    Case("cohere-qk-norm", "Cohere", hf.CohereConfig, "norms of each query and key head, biases, untied",
         {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False, "logit_scale": 0.5}, seed=2),
    Case("cohere2", "Cohere 2", hf.Cohere2Config, "windows and rotation in 3 of 4 layers, tied embeddings",
         {"logit_scale": 2.0, "sliding_window": 14, "num_hidden_layers": 4}, windows=(14, 14, 14, None), seed=3,
         embedding=0.3),
    Case("cohere2-mixed", "Cohere 2", hf.Cohere2Config, "full layers first, biases, untied",
         {"logit_scale": 0.5, "sliding_window": 21, "tie_word_embeddings": False, "attention_bias": True}
         | layers("fsfs"), windows=(None, 21, None, 21), seed=11),
    Case("stablelm", "StableLM", hf.StableLmConfig, "LayerNorm, a quarter of each head rotated, biases",
         {"use_qkv_bias": True}, seed=1),
    Case("stablelm-parallel", "StableLM", hf.StableLmConfig,
         "parallel residual, norms of each query and key head, half of each head rotated, tied embeddings",
         TIED | {"use_parallel_residual": True, "qk_layernorm": True} | rope(partial_rotary_factor=0.5),
         embedding=0.3),
    Case("gptj", "GPT-J", hf.GPTJConfig, "parallel residual, half of each head rotated, biases of MLP and logits",
         {"rotary_dim": 8}, seed=5),
    Case("gptj-inner", "GPT-J", hf.GPTJConfig, "n_inner, all of each head rotated, the exact gelu, tied embeddings",
         TIED | {"rotary_dim": 16, "n_inner": 100, "activation_function": "gelu"}, seed=3, embedding=0.3),
    Case("ernie4.5", "ERNIE 4.5", hf.Ernie4_5Config, "neighbours rotated, head_dim 16, tied embeddings",
         {"head_dim": 16}, seed=1, embedding=0.3),
    Case("ernie4.5-biases", "ERNIE 4.5", hf.Ernie4_5Config, "biases everywhere, untied",
         {"head_dim": 32, "use_bias": True, "tie_word_embeddings": False}, seed=3),
    Case("ernie4.5-moe", "ERNIE 4.5 MoE", hf.Ernie4_5_MoeConfig,
         "experts by softmax and bias, two shared ones, a dense layer first and last, neighbours rotated, tied",
         ERNIE_EXPERTS | {"num_hidden_layers": 4, "moe_layer_end_index": 2, "moe_norm_min": 0.5}, seed=2,
         embedding=0.3),
    Case("ernie4.5-moe-biases", "ERNIE 4.5 MoE", hf.Ernie4_5_MoeConfig,
         "biases everywhere, every other layer dense, one shared expert, head_dim 32, untied",
         ERNIE_EXPERTS | {"moe_num_shared_experts": 1, "use_bias": True, "moe_layer_start_index": 0,
          "moe_layer_interval": 2, "head_dim": 32, "tie_word_embeddings": False}, seed=6),
    Case("ernie4.5-moe-unshared", "ERNIE 4.5 MoE", hf.Ernie4_5_MoeConfig, "no shared experts",
         ERNIE_EXPERTS | {"moe_num_shared_experts": 0, "moe_layer_start_index": 2}, seed=3, embedding=0.3),
    Case("exaone4", "EXAONE 4", hf.Exaone4Config, "windows and rotation in 3 of 4 layers, norms of queries and keys",
         {"sliding_window": 16, "num_hidden_layers": 4}, windows=(16, 16, 16, None), seed=4),
    Case("exaone4-full", "EXAONE 4", hf.Exaone4Config, "no windows, all layers rotated, tied embeddings",
         TIED | {"sliding_window": None} | layers("fff"), seed=8, embedding=0.15, gain=6.0),
    Case("hunyuan", "Hunyuan dense", hf.HunYuanDenseV1Config, "norms of queries and keys after their rotation",
         {"head_dim": 16}, seed=2),
    Case("hunyuan-alpha", "Hunyuan dense", hf.HunYuanDenseV1Config,
         "a stretched base, head_dim 32, biases, tied embeddings",
         TIED | {"head_dim": 32, "attention_bias": True} | rope("dynamic", alpha=50.0, factor=1.0), seed=2,
         embedding=0.3),
    Case("bloom", "BLOOM", hf.BloomConfig, "biases by distance, normalised embeddings, untied",
         {"tie_word_embeddings": False}, context=2048, seed=5),
    Case("bloom-3-heads", "BLOOM", hf.BloomConfig, "3 heads", {"hidden_size": 48, "num_attention_heads": 3,
         "tie_word_embeddings": False}, context=2048, seed=0),
    Case("mpt", "MPT", hf.MptConfig, "biases by distance, nothing has a bias, tied", {"max_seq_len": 256}, seed=4,
         embedding=0.2),
    Case("mpt-3-heads", "MPT", hf.MptConfig, "3 heads, a scale of its own, untied",
         {"hidden_size": 48, "num_attention_heads": 3, "tie_word_embeddings": False, "max_seq_len": 256,
          "attn_config": {"softmax_scale": 0.3}}, seed=2),
    Case("falcon", "Falcon", hf.FalconConfig, "one KV head, parallel residual",
         {"ffn_hidden_size": None}, seed=4, embedding=0.3),
    Case("falcon-new", "Falcon", hf.FalconConfig, "new decoder, grouped-query attention, two norms",
         {"new_decoder_architecture": True, "num_kv_heads": 2}, seed=4, embedding=0.3),
    Case("falcon-one-norm", "Falcon", hf.FalconConfig, "new decoder with one norm (Falcon 2)",
         {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
          "tie_word_embeddings": False}, seed=1),
    Case("falcon-sequential", "Falcon", hf.FalconConfig, "MHA, sequential residual, biases", FALCON_OLD,
         seed=12, embedding=0.3),
)  # fmt: skip

BY_NAME = {case.name: case for case in CASES}
