"""config.json as the Hub's checkpoints have it, written by transformers 4 and older: the same model in other words."""

from typing import Any

Values = dict[str, Any]

TRAP = 16  # a window that 'use_sliding_window' switches off, small enough to show if it is taken for one
TIED_BY_DEFAULT = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "opt", "falcon", "starcoder2", "smollm3"),
    *("cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gemma4_text"),
)
WITHOUT_HEAD_DIM = ("llama", "mistral", "mixtral")  # unless it is another than width over heads
WITH_CODE = ("phi3", "falcon")  # their first checkpoints came with code, which no model needs any more
BIASED = ("gpt_neox", "seed_oss", "gpt_oss", "glm4")  # where attention has biases unless the config says otherwise
HALF_ROTATED = ("glm4", "glm4_moe")  # unless the config says otherwise
SPELLED_ANEW = ("gemma3_text", "olmo3", "gpt_oss")  # say 'rope_type' in 'rope_scaling', not 'type'
UNSAID = {  # what configs did not say when it was so
    "mlp_bias": False,
    "add_cross_attention": False,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "_remove_final_layer_norm": False,
    "use_bidirectional_attention": False,
    "num_ln_in_parallel_attn": 2,
    "is_decoder": False,
}


def classic(values: Values) -> Values:
    """Returns a config.json in the older form of one that transformers 5 wrote."""
    kind = values["model_type"]
    old = {key: value for key, value in values.items() if not (key in UNSAID and value == UNSAID[key])}
    old["torch_dtype"] = old.pop("dtype")
    old["transformers_version"] = "4.38.2"
    old["_name_or_path"] = "somebody/some-model"
    if kind in TIED_BY_DEFAULT and old["tie_word_embeddings"]:
        del old["tie_word_embeddings"]
    if kind == "gpt_neox" and values["attention_bias"]:
        del old["attention_bias"]  # came later
    if kind in WITH_CODE:
        old["auto_map"] = {"AutoModelForCausalLM": f"modeling_{kind}.{old['architectures'][0]}"}
    if kind in WITHOUT_HEAD_DIM and old["head_dim"] in (None, old["hidden_size"] // old["num_attention_heads"]):
        del old["head_dim"]
    _rope(kind, old)
    if old.get("attention_bias") is False and kind not in BIASED:
        del old["attention_bias"]
    REST.get(kind, lambda _: None)(old)
    return old


def _rope(kind: str, old: Values) -> None:
    if kind == "gemma4_text":
        return  # it has no older form
    ropes = old.pop("rope_parameters", None)
    if ropes is None:
        return
    if "full_attention" in ropes:
        if kind == "gemma3_text":
            old["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
        ropes = ropes["full_attention"]
    rest = dict(ropes)
    theta, part, name = rest.pop("rope_theta"), rest.pop("partial_rotary_factor", None), rest.pop("rope_type")
    spelled = "rope_type" if name == "llama3" or kind in SPELLED_ANEW else "type"
    old["rope_scaling"] = None if name == "default" else {spelled: name, **rest}
    if kind == "gpt_neox":
        old |= {"rotary_emb_base": theta, "rotary_pct": part}
        return
    old["rope_theta"] = theta
    if kind == "minimax_m2":
        old["rotary_dim"] = int(old["head_dim"] * (part or 1.0))
    elif part is not None and (part != 1.0 or kind in HALF_ROTATED):
        old["partial_rotary_factor"] = part


def _qwen(old: Values) -> None:
    kinds = old.pop("layer_types", ["full_attention"] * old["num_hidden_layers"])
    old["max_window_layers"] = kinds.index("sliding_attention") if "sliding_attention" in kinds else 1
    if not old["use_sliding_window"]:
        old["sliding_window"] = TRAP
    if "num_local_experts" in old:
        old["num_experts"] = old.pop("num_local_experts")


def _qwen2_moe(old: Values) -> None:
    del old["layer_types"]
    if not old["use_sliding_window"]:
        old["sliding_window"] = TRAP


def _gemma(old: Values) -> None:
    """The first Gemma says the exact gelu and means its approximation."""
    old |= {"hidden_act": "gelu", "hidden_activation": None}


def _gemma2(old: Values) -> None:
    del old["layer_types"]
    old |= {"hidden_act": old["hidden_activation"], "cache_implementation": "hybrid"}


def _gemma3(old: Values) -> None:
    del old["layer_types"]
    old |= {"sliding_window_pattern": old.pop("_sliding_window_pattern"), "cache_implementation": "hybrid"}


def _gemma4(old: Values) -> None:
    """Layers without a window differ by keys of their own."""
    full = next(iter(old.pop("per_layer_config").values()))
    old |= {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full.get("num_key_value_heads")}


def _gpt2(old: Values) -> None:
    if old["n_inner"] is None:
        del old["n_inner"]
    old |= {"n_ctx": old["n_positions"], "task_specific_params": {"text-generation": {"do_sample": True}}}


def _gpt_oss(old: Values) -> None:
    del old["swiglu_alpha"]
    old |= {"experts_per_token": old["num_experts_per_tok"], "initial_context_length": 4096}


def _granite_hybrid(old: Values) -> None:
    """Names mixers as the first configs did."""
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    old["layer_types"] = [names[kind] for kind in old["layer_types"]]
    del old["time_step_limit"]


def _kimi_linear(old: Values) -> None:
    """Has an object for the layers without attention, which are counted from 1."""
    kinds, mlps = old.pop("layer_types"), old["mlp_layer_types"]
    old["linear_attn_config"] = {
        "full_attn_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == "full_attention"],
        "kda_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == "linear_attention"],
        "head_dim": old.pop("linear_head_dim"),
        "num_heads": old.pop("linear_num_heads"),
        "short_conv_kernel_size": old.pop("linear_conv_kernel_dim"),
    }
    dense = mlps.count("dense")
    if mlps[:dense] == ["dense"] * dense:
        del old["mlp_layer_types"]
        old["first_k_dense_replace"] = dense
    old |= {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "rope_theta": 10000.0}


def _lfm2(old: Values) -> None:
    """Names the layers with attention alone."""
    kinds = old.pop("layer_types")
    old["full_attn_idxs"] = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    old |= {"block_ff_dim": old.pop("intermediate_size"), "tie_embedding": old.pop("tie_word_embeddings")}


def _nemotron_h(old: Values) -> None:
    """Has a letter for each layer."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
    kinds = old.pop("layers_block_type")
    old |= {"hybrid_override_pattern": "".join(letters[kind] for kind in kinds), "num_hidden_layers": len(kinds)}
    old["time_step_limit"] = [0.0, float("inf")]  # as the number that JSON does not have


def _falcon_h1(old: Values) -> None:
    del old["time_step_limit"]


def _opt(old: Values) -> None:
    old |= {"activation_dropout": 0.0, "prefix": "</s>"}


def _phi(old: Values) -> None:
    if old["num_key_value_heads"] == old["num_attention_heads"]:
        old["num_key_value_heads"] = None


def _falcon(old: Values) -> None:
    """Says neither context nor rope, nor the width of the MLP where it is four times the model's."""
    del old["max_position_embeddings"]
    if old["rope_theta"] == 10000.0 and old["rope_scaling"] is None:
        del old["rope_theta"], old["rope_scaling"]
    if not old["new_decoder_architecture"]:
        del old["num_kv_heads"]
    if old["ffn_hidden_size"] == 4 * old["hidden_size"]:
        del old["ffn_hidden_size"]
    old |= {"apply_residual_connection_post_layernorm": False}


REST = {
    "qwen2": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite_hybrid,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "opt": _opt,
    "phi": _phi,
    "falcon": _falcon,
}
