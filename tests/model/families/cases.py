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

    def __str__(self) -> str:
        return self.name


def rope(kind: str = "default", theta: float = 10000.0, **more: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def layers(letters: str) -> dict[str, Any]:
    """A letter a layer: f for full attention, s for a window."""
    kinds = [{"f": "full_attention", "s": "sliding_attention"}[letter] for letter in letters]
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
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
TIED = {"tie_word_embeddings": True}
EXPERTS = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
FALCON_OLD = {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "bias": True}

CASES = (
    Case("llama", "Llama", hf.LlamaConfig, "grouped-query attention"),
    Case("llama-biases", "Llama", hf.LlamaConfig, "biases in attention and MLP",
         {"attention_bias": True, "mlp_bias": True}, seed=2),
    Case("llama-tied", "Llama", hf.LlamaConfig, "tied embeddings, head_dim 24, MHA",
         TIED | {"head_dim": 24, "num_key_value_heads": 4}, embedding=0.3),
    Case("llama-llama3", "Llama", hf.LlamaConfig, "rope scaling llama3", LLAMA3, seed=3),
    Case("llama-linear", "Llama", hf.LlamaConfig, "rope scaling linear", rope("linear", factor=2.5)),
    Case("llama-yarn", "Llama", hf.LlamaConfig, "rope scaling yarn", YARN, seed=2),
    Case("llama-yarn-tuned", "Llama", hf.LlamaConfig, "yarn with betas, attention factor, not truncated", TUNED_YARN),
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
    Case("starcoder2", "StarCoder2", hf.Starcoder2Config, "biases, LayerNorm, tied embeddings, a window in all layers",
         {"sliding_window": 16}, windows=(16, 16, 16), seed=11, embedding=0.15, gain=5.0),
    Case("starcoder2-plain", "StarCoder2", hf.Starcoder2Config, "neither biases nor windows, untied",
         {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    Case("olmo2", "OLMo 2", hf.Olmo2Config, "norms after, norms of all queries and keys, grouped-query attention"),
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
