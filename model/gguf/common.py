"""Reads what most architectures of GGUF files say alike: positions, norms, biases; refuses keys that are not read.

Imports no torch. Keys are those of llama.cpp's src/llama-arch.cpp.
"""

import math
from collections.abc import Callable
from typing import Any

from model.gguf.source import ConfigSource

Values = dict[str, Any]
Reader = Callable[[ConfigSource, Values], Values]
"""Returns what one architecture says beside what all say in the same way, which is its second argument."""


UNREAD = (
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_length", "logit_scale",
    "residual_scale", "embedding_scale", "expert_weights_scale", "expert_shared_count", "leading_dense_block_count",
    "expert_group_count", "interleave_moe_layer_step",
)  # fmt: skip
"""Keys that change what a model computes, in ways that the architectures here do not have."""

SOFTMAX, SIGMOID = 1, 2  # values of 'expert_gating_func'
WINDOW, EVERY = "attention.sliding_window", "interleave_moe_layer_step"
ZERO_ALONE = ("attention.clamp_kqv", "attention.max_alibi_bias", "attention.temperature_length", WINDOW)
"""Keys of `UNREAD`, and windows, that 0 alone switches off. For the others 1 is neutral too."""
KV_HEADS = "attention.head_count_kv"
DEEPSEEK = ("expert_weights_scale", "expert_shared_count", "leading_dense_block_count", "expert_group_count")
GRANITE = ("attention.scale", "embedding_scale", "logit_scale", "residual_scale")
READ = {
    "cohere2": ("logit_scale", WINDOW),
    "deepseek2": DEEPSEEK,
    "glm4moe": DEEPSEEK,
    "command-r": ("logit_scale",),
    "ernie4_5-moe": ("expert_shared_count", "leading_dense_block_count", EVERY),
    "exaone4": (WINDOW,),
    "gemma2": (WINDOW,),
    "gemma3": (WINDOW,),
    "gemma4": (WINDOW,),
    "gpt-oss": (WINDOW,),
    "granite": GRANITE,
    "granitehybrid": GRANITE,
    "granitemoe": GRANITE,
    "kimi-linear": DEEPSEEK,
    "lfm2moe": ("leading_dense_block_count",),
    "llama4": (EVERY, WINDOW),
    "mpt": ("attention.max_alibi_bias",),
    "nemotron_h_moe": ("expert_weights_scale", "expert_shared_count", "expert_group_count"),
    "phi3": (WINDOW,),
    "phimoe": (WINDOW,),
}
"""Keys among `UNREAD` and `WINDOW` that an architecture reads. Olmo 3 is an olmo2 with windows, which does not."""


def check_unread(source: ConfigSource) -> None:
    """Raises CheckpointError where a key that is not read would change what the model computes."""
    fields = source.model.metadata.fields
    for key in (*UNREAD, WINDOW):
        if key in READ.get(source.prefix, ()) or not source.has(key):
            continue
        if fields.values.get(f"{source.prefix}.{key}") not in ((0,) if key in ZERO_ALONE else (0, 1)):
            raise fields.refuse(f"{source.prefix}.{key}", f"which is not supported for {source.prefix}")


def read_rope(source: ConfigSource, values: Values) -> Values:
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


def any_layer_has(source: ConfigSource, name: str) -> bool:
    """Returns whether a layer has a tensor of this name. Where layers differ, the first need not be one that could."""
    return any(one.startswith("blk.") and one.endswith(f".{name}") for one in source.model.tensors)


def read_partial(source: ConfigSource, head_dim: int) -> Values:
    """Returns the rotated part of a head where it is not all of it."""
    dims = source.count("rope.dimension_count", head_dim)
    return {} if dims == head_dim else {"partial_rotary_factor": dims / head_dim}


def like_llama(architecture: str, width: int | None = None) -> Reader:
    """Returns a reader of what most say; `width` is that of MLPs where a file does not say, as there are none."""

    def read(source: ConfigSource, common: Values) -> Values:
        tensors = source.model.tensors
        return {
            "architectures": [architecture],
            "intermediate_size": source.count("feed_forward_length", width),
            "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
            **read_rope(source, common),
            **read_partial(source, common["head_dim"]),
        }

    return read


def read_multipliers(source: ConfigSource, common: Values) -> Values:
    """Returns Granite's factors."""
    return {
        "attention_multiplier": source.number("attention.scale", common["head_dim"] ** -0.5),
        "embedding_multiplier": source.number("embedding_scale", 1.0),
        "residual_multiplier": source.number("residual_scale", 1.0),
        "logits_scaling": source.number("logit_scale", 1.0),
    }


def read_window(source: ConfigSource) -> Values:
    """Returns the window of all layers. Phi 4 has 0 for none."""
    if not source.has(WINDOW) or source.model.metadata.fields.values.get(f"{source.prefix}.{WINDOW}") == 0:
        return {}
    return {"sliding_window": source.count(WINDOW)}


def read_predictors(source: ConfigSource, common: Values) -> Values:
    """Returns the layers without those after the last that predict further tokens, and the number of these.

    Raises:
        CheckpointError: No layer is left.
    """
    fields, key = source.model.metadata.fields, f"{source.prefix}.nextn_predict_layers"
    predictors, layers = fields.get(key, int, 0), common["num_hidden_layers"]
    if not 0 <= predictors < layers:
        raise fields.refuse(key, f"must be from 0 to {layers - 1}, there are {layers} layers with these")
    return {"num_hidden_layers": layers - predictors, "num_nextn_predict_layers": predictors}
