"""Reads the configuration of a model from a GGUF file, as config.json would have it, by architecture.

Imports no torch. Keys are those of llama.cpp's src/llama-arch.cpp. llama.cpp takes for granted what a family's file
cannot say, and so does this module.
"""

import math
from collections.abc import Callable
from typing import Any

from model.gguf.source import Source

Values = dict[str, Any]
Reader = Callable[[Source, Values], Values]
"""Returns what one architecture says beside what all say in the same way, which is its second argument."""


UNREAD = (
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_length", "logit_scale",
    "residual_scale", "embedding_scale", "expert_weights_scale", "expert_shared_count", "leading_dense_block_count",
    "expert_group_count",
)  # fmt: skip
"""Keys that change what a model computes, in ways that the architectures here do not have."""

WINDOW = "attention.sliding_window"
WITH_WINDOWS = ("gemma2", "gemma3", "phi3")


def check_unread(source: Source) -> None:
    """Raises CheckpointError where a key that is not read would change what the model computes."""
    keys = UNREAD if source.prefix in WITH_WINDOWS else (*UNREAD, WINDOW)  # Olmo 3 is an olmo2 with windows
    fields = source.model.metadata.fields
    for key in keys:
        if source.has(key) and fields.values.get(f"{source.prefix}.{key}") not in (0, 1):
            raise fields.refuse(f"{source.prefix}.{key}", f"which is not supported for {source.prefix}")


def _rope(source: Source, values: Values) -> Values:
    """Returns the rules by which positions are stretched."""
    kind = source.text("rope.scaling.type", "none")
    length = values["max_position_embeddings"]
    frequencies = source.factors("rope_freqs.weight")
    short = source.factors("rope_factors_short.weight")
    if frequencies is not None:  # Llama 3.1 has its rule as a divisor of each frequency
        return {"rope_scaling": {"rope_type": "longrope", "short_factor": frequencies, "attention_factor": 1.0}}
    if short is not None:
        rope: Values = {"rope_type": "longrope", "short_factor": short}
        if source.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = source.number("rope.scaling.attn_factor")
        return {
            "rope_scaling": rope,
            "original_max_position_embeddings": source.count("rope.scaling.original_context_length", length),
        }
    if kind in ("none", "longrope") or (kind == "linear" and not source.has("rope.scaling.factor")):
        return {}
    if kind not in ("linear", "yarn"):
        raise source.model.metadata.fields.refuse(
            f"{source.prefix}.rope.scaling.type", "which is not supported; supported: none, linear, yarn, longrope"
        )
    rope = {"rope_type": kind, "factor": source.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = source.count("rope.scaling.original_context_length", length)
        for key, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if source.has(f"rope.scaling.{theirs}"):
                rope[key] = source.number(f"rope.scaling.{theirs}")
        if source.has("rope.scaling.attn_factor"):  # of YaRN's own
            own = 1 + 0.1 * math.log(max(1.0, rope["factor"]))
            rope["attention_factor"] = own * source.number("rope.scaling.attn_factor")
    return {"rope_scaling": rope}


def _partial(source: Source, head_dim: int) -> Values:
    """Returns the rotated part of a head where it is not all of it."""
    dims = source.count("rope.dimension_count", head_dim)
    return {} if dims == head_dim else {"partial_rotary_factor": dims / head_dim}


def _like_llama(architecture: str) -> Reader:
    def read(source: Source, common: Values) -> Values:
        tensors = source.model.tensors
        return {
            "architectures": [architecture],
            "intermediate_size": source.count("feed_forward_length"),
            "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
            **_rope(source, common),
            **_partial(source, common["head_dim"]),
        }

    return read


def _llama(source: Source, common: Values) -> Values:
    """Llama and Mistral, or Mixtral, which are one architecture in llama.cpp."""
    if not source.has("expert_count") or source.model.metadata.fields.get("llama.expert_count", int) == 0:
        return _like_llama("LlamaForCausalLM")(source, common)
    return _like_llama("MixtralForCausalLM")(source, common) | {
        "num_local_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
    }


def _qwen3_moe(source: Source, common: Values) -> Values:
    return _like_llama("Qwen3MoeForCausalLM")(source, common) | {
        "intermediate_size": source.count("feed_forward_length", 1),  # of layers without experts: there are none
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp has no other
    }


def _gemma(source: Source, common: Values) -> Values:
    return _like_llama("GemmaForCausalLM")(source, common) | {"hidden_act": "gelu_pytorch_tanh"}


def _query_scale(common: Values, largest: int) -> int:
    """Returns 'query_pre_attn_scalar', which llama.cpp knows by the number of layers: the largest model's differs."""
    whole = common["num_hidden_layers"] == largest
    scale: int = common["hidden_size"] // common["num_attention_heads"] if whole else common["head_dim"]
    return scale


def _gemma2(source: Source, common: Values) -> Values:
    caps = {
        "attn_logit_softcapping": source.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": source.number("final_logit_softcapping", 30.0),
    }
    return (
        _like_llama("Gemma2ForCausalLM")(source, common)
        | caps
        | {
            "sliding_window": source.count(WINDOW, 4096),
            "query_pre_attn_scalar": _query_scale(common, 46),
        }
    )


def _gemma3(source: Source, common: Values) -> Values:
    values = _like_llama("Gemma3ForCausalLM")(source, common)
    if not source.has("rope.freq_base"):
        values["rope_theta"] = 1e6
    if source.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = source.number("final_logit_softcapping")
    return values | {
        "sliding_window": source.count(WINDOW),
        "sliding_window_pattern": source.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": source.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scale(common, 62),
    }


def _phi3(source: Source, common: Values) -> Values:
    values = _like_llama("Phi3ForCausalLM")(source, common)
    if source.has(WINDOW) and source.model.metadata.fields.values.get(f"phi3.{WINDOW}") != 0:  # Phi 4 has 0 for none
        values["sliding_window"] = source.count(WINDOW)
    return values


def _gpt2(source: Source, common: Values) -> Values:  # noqa: ARG001
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_inner": source.count("feed_forward_length"),
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _starcoder2(source: Source, common: Values) -> Values:  # noqa: ARG001
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in source.model.tensors,
    }


def _falcon(source: Source, common: Values) -> Values:
    """Falcon 7B has one KV head; later ones have several, and one or two norms."""
    several = common["num_key_value_heads"] > 1
    return {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": several,
        "num_kv_heads": common["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in source.model.tensors else 1,
        "bias": "blk.0.attn_qkv.bias" in source.model.tensors,
        "ffn_hidden_size": source.count("feed_forward_length", 4 * common["hidden_size"]),
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
    }


def _gpt_neox(source: Source, common: Values) -> Values:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "layer_norm_eps": source.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": source.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in source.model.tensors,
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
    }


def _phi2(source: Source, common: Values) -> Values:
    return {
        "architectures": ["PhiForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "layer_norm_eps": source.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
    }


ARCHITECTURES: dict[str, Reader] = {
    "llama": _llama,
    "qwen2": _like_llama("Qwen2ForCausalLM"),
    "qwen3": _like_llama("Qwen3ForCausalLM"),
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "starcoder2": _starcoder2,
    "olmo2": _like_llama("Olmo2ForCausalLM"),
    "falcon": _falcon,
    "gptneox": _gpt_neox,
    "phi2": _phi2,
}
"""By 'general.architecture'."""
