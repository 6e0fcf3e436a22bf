"""Reads the configuration of a model from a GGUF file, as config.json would have it, by architecture.

Imports no torch. Keys are those of llama.cpp's src/llama-arch.cpp. llama.cpp takes for granted what a family's file
cannot say, and so does this module.
"""

from model.gguf import mixtures, recurrent
from model.gguf.common import KV_HEADS, WINDOW, Reader, Values, like_llama, read_multipliers, read_rope, read_window
from model.gguf.gemma4 import read_gemma4
from model.gguf.source import ConfigSource


def _llama(source: ConfigSource, common: Values) -> Values:
    """Llama and Mistral, or Mixtral, which are one architecture in llama.cpp."""
    if not source.has("expert_count") or source.model.metadata.fields.get("llama.expert_count", int) == 0:
        return like_llama("LlamaForCausalLM")(source, common)
    return like_llama("MixtralForCausalLM")(source, common) | {
        "num_local_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
    }


def _smollm3(source: ConfigSource, common: Values) -> Values:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(common["num_hidden_layers"])]  # llama.cpp has no other
    return like_llama("SmolLM3ForCausalLM")(source, common) | {"no_rope_layers": rotated}


def _seed_oss(source: ConfigSource, common: Values) -> Values:
    tensors = source.model.tensors
    return like_llama("SeedOssForCausalLM")(source, common) | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
    }


def _granite(source: ConfigSource, common: Values) -> Values:
    return like_llama("GraniteForCausalLM")(source, common) | read_multipliers(source, common)


def _glm4(source: ConfigSource, common: Values) -> Values:
    return like_llama("Glm4ForCausalLM")(source, common) | {
        "attention_bias": "blk.0.attn_q.bias" in source.model.tensors,
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
    }


def _exaone4(source: ConfigSource, common: Values) -> Values:
    """EXAONE 4. With windows, all layers but every fourth have one, as config.json has it by default."""
    windows: Values = {"sliding_window": None, "layer_types": ["full_attention"] * common["num_hidden_layers"]}
    if source.has(WINDOW):
        windows = {"sliding_window": source.count(WINDOW)}
    return like_llama("Exaone4ForCausalLM")(source, common) | windows


def _ernie4_5(source: ConfigSource, common: Values) -> Values:
    biased = "blk.0.attn_q.bias" in source.model.tensors
    return like_llama("Ernie4_5ForCausalLM")(source, common) | {"use_bias": biased}


def _cohere(architecture: str) -> Reader:
    def read(source: ConfigSource, common: Values) -> Values:  # noqa: ARG001
        values: Values = {
            "architectures": [architecture],
            "intermediate_size": source.count("feed_forward_length"),
            "layer_norm_eps": source.number("attention.layer_norm_epsilon"),
            "logit_scale": source.number("logit_scale"),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in source.model.tensors,
            "attention_bias": "blk.0.attn_output.bias" in source.model.tensors,
        }
        return values | ({"sliding_window": source.count(WINDOW)} if source.has(WINDOW) else {})

    return read


def _stablelm(source: ConfigSource, common: Values) -> Values:
    return {
        "architectures": ["StableLmForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "layer_norm_eps": source.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": source.flag("use_parallel_residual", False),
        "use_qkv_bias": "blk.0.attn_q.bias" in source.model.tensors,
        **read_rope(source, common),
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
    }


def _gemma(source: ConfigSource, common: Values) -> Values:
    return like_llama("GemmaForCausalLM")(source, common) | {"hidden_act": "gelu_pytorch_tanh"}


def _query_scale(common: Values, largest: int) -> int:
    """Returns 'query_pre_attn_scalar', which llama.cpp knows by the number of layers: the largest model's differs."""
    whole = common["num_hidden_layers"] == largest
    scale: int = common["hidden_size"] // common["num_attention_heads"] if whole else common["head_dim"]
    return scale


def _gemma2(source: ConfigSource, common: Values) -> Values:
    caps = {
        "attn_logit_softcapping": source.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": source.number("final_logit_softcapping", 30.0),
    }
    return (
        like_llama("Gemma2ForCausalLM")(source, common)
        | caps
        | {
            "sliding_window": source.count(WINDOW, 4096),
            "query_pre_attn_scalar": _query_scale(common, 46),
        }
    )


def _gemma3(source: ConfigSource, common: Values) -> Values:
    values = like_llama("Gemma3ForCausalLM")(source, common)
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


def _phi3(source: ConfigSource, common: Values) -> Values:
    return like_llama("Phi3ForCausalLM")(source, common) | read_window(source)


def _gpt2(source: ConfigSource, common: Values) -> Values:  # noqa: ARG001
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_inner": source.count("feed_forward_length"),
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _starcoder2(source: ConfigSource, common: Values) -> Values:  # noqa: ARG001
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in source.model.tensors,
    }


def _falcon(source: ConfigSource, common: Values) -> Values:
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


def _gpt_neox(source: ConfigSource, common: Values) -> Values:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "layer_norm_eps": source.number("attention.layer_norm_epsilon"),
        "use_parallel_residual": source.flag("use_parallel_residual", True),
        "attention_bias": "blk.0.attn_qkv.bias" in source.model.tensors,
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
    }


def _phi2(source: ConfigSource, common: Values) -> Values:
    return {
        "architectures": ["PhiForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "layer_norm_eps": source.number("attention.layer_norm_epsilon"),
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
    }


def _check_heads(source: ConfigSource, common: Values) -> None:
    """Raises CheckpointError where heads are none of equal parts, each with keys of its own."""
    fields, heads = source.model.metadata.fields, common["num_attention_heads"]
    if common["hidden_size"] % heads:
        raise fields.refuse(f"{source.prefix}.attention.head_count", f"does not divide {common['hidden_size']}")
    if common["num_key_value_heads"] != heads:
        raise fields.refuse(f"{source.prefix}.{KV_HEADS}", f"must be that of the heads, {heads}")


def _bloom(source: ConfigSource, common: Values) -> Values:
    _check_heads(source, common)
    if source.count("feed_forward_length") != 4 * common["hidden_size"]:
        raise source.model.metadata.fields.refuse("bloom.feed_forward_length", "must be 4 times the embedding's")
    return {
        "architectures": ["BloomForCausalLM"],
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
    }


def _mpt(source: ConfigSource, common: Values) -> Values:
    """MPT, whose config.json has names of its own. A file without biases by distance says 0 for them: it is refused."""
    _check_heads(source, common)
    width, hidden = source.count("feed_forward_length"), common["hidden_size"]
    if width % hidden:
        raise source.model.metadata.fields.refuse("mpt.feed_forward_length", f"must be a multiple of {hidden}")
    return {
        "architectures": ["MptForCausalLM"],
        "d_model": common["hidden_size"],
        "n_heads": common["num_attention_heads"],
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "expansion_ratio": width // hidden,
        "attn_config": {"alibi_bias_max": source.number("attention.max_alibi_bias")},
    }


ARCHITECTURES: dict[str, Reader] = {
    "llama": _llama,
    "qwen2": like_llama("Qwen2ForCausalLM"),
    "qwen3": like_llama("Qwen3ForCausalLM"),
    "qwen3moe": mixtures.read_qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": read_gemma4,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "starcoder2": _starcoder2,
    "olmo2": like_llama("Olmo2ForCausalLM"),
    "falcon": _falcon,
    "gptneox": _gpt_neox,
    "phi2": _phi2,
    "qwen2moe": mixtures.read_qwen2_moe,
    "deepseek2": mixtures.read_deepseek2,
    "gpt-oss": mixtures.read_gpt_oss,
    "granitemoe": mixtures.read_granite_moe,
    "phimoe": mixtures.read_phimoe,
    "llama4": mixtures.read_llama4,
    "minimax-m2": mixtures.read_minimax_m2,
    "glm4moe": mixtures.read_glm4_moe,
    "ernie4_5-moe": mixtures.read_ernie4_5_moe,
    "qwen3next": recurrent.read_qwen3_next,
    "qwen35": recurrent.read_qwen3_5,
    "qwen35moe": recurrent.read_qwen3_5_moe,
    "granitehybrid": recurrent.read_granite_hybrid,
    "lfm2": recurrent.read_lfm2,
    "lfm2moe": recurrent.read_lfm2_moe,
    "mamba2": recurrent.read_mamba2,
    "nemotron_h": recurrent.read_nemotron_h,
    "falcon-h1": recurrent.read_falcon_h1,
    "kimi-linear": recurrent.read_kimi_linear,
    "nemotron_h_moe": recurrent.read_nemotron_h,
    "smollm3": _smollm3,
    "seed_oss": _seed_oss,
    "granite": _granite,
    "ernie4_5": _ernie4_5,
    "glm4": _glm4,
    "exaone4": _exaone4,
    "hunyuan-dense": like_llama("HunYuanDenseV1ForCausalLM"),
    "command-r": _cohere("CohereForCausalLM"),
    "cohere2": _cohere("Cohere2ForCausalLM"),
    "stablelm": _stablelm,
    "bloom": _bloom,
    "mpt": _mpt,
}
"""By 'general.architecture'."""
