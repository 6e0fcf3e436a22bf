"""Reads the configuration of models with recurrent layers from a GGUF file's metadata. Imports no torch."""

from model.errors import CheckpointError
from model.gguf.common import KV_HEADS, Values, any_layer_has, like_llama, read_multipliers, read_predictors
from model.gguf.mixtures import check_sigmoids, read_deepseek_experts
from model.gguf.source import ConfigSource

KINDS = {True: "linear_attention", False: "full_attention"}


def read_qwen3_next(source: ConfigSource, common: Values) -> Values:
    """Qwen 3 Next. Older files have its projections by key head, as the hub has them."""
    apart = not any(name.endswith(".ssm_in.weight") for name in source.model.tensors)
    return _read_layers(source, common, "Qwen3NextForCausalLM") | read_experts(source) | {"in_proj_apart": apart}


def read_qwen3_5(source: ConfigSource, common: Values) -> Values:
    return _read_layers(source, common, "Qwen3_5ForCausalLM") | _read_tiles(source)


def read_qwen3_5_moe(source: ConfigSource, common: Values) -> Values:
    return _read_layers(source, common, "Qwen3_5MoeForCausalLM") | read_experts(source) | _read_tiles(source)


def _read_tiles(source: ConfigSource) -> Values:
    """Returns the numbers of `model.weight_formats.tiles.HeadTiles`, where they change an order."""
    key_heads, heads = source.count("ssm.group_count"), source.count("ssm.time_step_rank")
    each = heads // key_heads
    return {"tiled_inputs": [key_heads, each, source.count("ssm.inner_size") // heads]} if each > 1 else {}


def read_experts(source: ConfigSource) -> Values:
    return {
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": source.count("expert_shared_feed_forward_length"),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp has no other
    }


def _read_layers(source: ConfigSource, common: Values, architecture: str) -> Values:
    """Returns what all these models say."""
    metadata, heads = source.model.metadata, source.count("ssm.time_step_rank")
    counts = read_predictors(source, common)
    layers, every = counts["num_hidden_layers"], source.count("full_attention_interval", 4)
    recurrent = [(number + 1) % every != 0 for number in range(layers)]
    if source.has("attention.recurrent_layers"):
        key = f"{source.prefix}.attention.recurrent_layers"
        recurrent = metadata.flags(key)[:layers]
        if len(recurrent) < layers:
            raise CheckpointError(f"{metadata.path}: {key!r} has {len(recurrent)} values for {layers} layers")
    return like_llama(architecture, width=1)(source, common) | {
        **counts,
        "layer_types": [KINDS[one] for one in recurrent],
        "partial_rotary_factor": source.count("rope.dimension_count", common["head_dim"]) / common["head_dim"],
        "linear_num_key_heads": source.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": source.count("ssm.state_size"),
        "linear_value_head_dim": source.count("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": source.count("ssm.conv_kernel"),
    }


def read_lfm2(source: ConfigSource, common: Values) -> Values:
    return like_llama("Lfm2ForCausalLM")(source, common) | _read_convolutions(source, common)


def read_lfm2_moe(source: ConfigSource, common: Values) -> Values:
    """LFM2's mixture of experts: sigmoid with a bias, weights that add up to 1, as llama.cpp takes for granted."""
    return (
        like_llama("Lfm2MoeForCausalLM")(source, common)
        | _read_convolutions(source, common)
        | {
            "num_dense_layers": source.count("leading_dense_block_count"),
            "moe_intermediate_size": source.count("expert_feed_forward_length"),
            "num_experts": source.count("expert_count"),
            "num_experts_per_tok": source.count("expert_used_count"),
            "use_expert_bias": any_layer_has(source, "exp_probs_b.bias"),
        }
    )


def _read_convolutions(source: ConfigSource, common: Values) -> Values:
    heads = source.by_layer(KV_HEADS, common["num_hidden_layers"], common["num_attention_heads"], least=0)
    return {
        "norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "conv_L_cache": source.count("shortconv.l_cache"),
        "conv_bias": any_layer_has(source, "shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
    }


def read_mamba2(source: ConfigSource, common: Values) -> Values:
    inner, heads = source.count("ssm.inner_size"), source.count("ssm.time_step_rank")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "layer_norm_epsilon": source.number("attention.layer_norm_rms_epsilon"),
        "expand": max(1, inner // common["hidden_size"]),
        "num_heads": heads,
        "head_dim": max(1, inner // heads),
        "n_groups": source.count("ssm.group_count"),
        "state_size": source.count("ssm.state_size"),
        "conv_kernel": source.count("ssm.conv_kernel"),
        "use_bias": any_layer_has(source, "ssm_in.bias"),
        "use_conv_bias": any_layer_has(source, "ssm_conv1d.bias"),
    }


def read_granite_hybrid(source: ConfigSource, common: Values) -> Values:
    """Granite 4. Its MLP is one of all tokens, beside experts if there are some; positions are a switch."""
    inner, heads = source.count("ssm.inner_size"), source.count("ssm.time_step_rank")
    kv_heads = source.by_layer(KV_HEADS, common["num_hidden_layers"], common["num_attention_heads"], least=0)
    values = like_llama("GraniteMoeHybridForCausalLM")(source, common) | read_multipliers(source, common)
    experts: Values = {"num_local_experts": 0}
    if any_layer_has(source, "ffn_gate_inp.weight"):
        experts = {
            "num_local_experts": source.count("expert_count"),
            "num_experts_per_tok": source.count("expert_used_count"),
        }
    return (
        values
        | experts
        | {
            "shared_intermediate_size": source.count("expert_shared_feed_forward_length", values["intermediate_size"]),
            "attention_bias": any_layer_has(source, "attn_q.bias"),
            "layer_types": ["attention" if count else "mamba" for count in kv_heads],
            "position_embedding_type": "rope" if source.flag("rope.scaling.finetuned", True) else "nope",
            "mamba_n_heads": heads,
            "mamba_d_head": max(1, inner // heads),
            "mamba_expand": max(1, inner // common["hidden_size"]),
            "mamba_n_groups": source.count("ssm.group_count"),
            "mamba_d_state": source.count("ssm.state_size"),
            "mamba_d_conv": source.count("ssm.conv_kernel"),
            "mamba_conv_bias": any_layer_has(source, "ssm_conv1d.bias"),
            "mamba_proj_bias": any_layer_has(source, "ssm_in.bias"),
        }
    )


def read_nemotron_h(source: ConfigSource, common: Values) -> Values:
    """Nemotron-H and Nemotron 3. A layer's counts say what it is: attention, an MLP or experts, or else a mixer."""
    layers, heads = common["num_hidden_layers"], source.count("ssm.time_step_rank")
    kv_heads = source.by_layer(KV_HEADS, layers, common["num_attention_heads"], least=0)
    widths = source.by_layer("feed_forward_length", layers, 1, least=0)
    experts = _read_nemotron_experts(source) if any_layer_has(source, "ffn_gate_inp.weight") else Values()
    wide = "moe" if experts else "mlp"
    return {
        "architectures": ["NemotronHForCausalLM"],
        "layers_block_type": [
            "attention" if count else wide if width else "mamba" for count, width in zip(kv_heads, widths, strict=True)
        ],
        "layer_norm_epsilon": source.number("attention.layer_norm_rms_epsilon"),
        "intermediate_size": max(1, *widths),
        "attention_bias": any_layer_has(source, "attn_q.bias"),
        "mlp_bias": any_layer_has(source, "ffn_up.bias"),
        "use_bias": any_layer_has(source, "ssm_in.bias"),
        "use_conv_bias": any_layer_has(source, "ssm_conv1d.bias"),
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, source.count("ssm.inner_size") // heads),
        "n_groups": source.count("ssm.group_count"),
        "ssm_state_size": source.count("ssm.state_size"),
        "conv_kernel": source.count("ssm.conv_kernel"),
        **experts,
    }


def _read_nemotron_experts(source: ConfigSource) -> Values:
    groups = source.count("expert_group_count", 1)
    return {
        "n_routed_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": source.count("expert_shared_feed_forward_length"),
        "n_shared_experts": source.count("expert_shared_count"),
        "norm_topk_prob": source.flag("expert_weights_norm", True),
        "routed_scaling_factor": source.number("expert_weights_scale", 1.0),
        "n_group": groups,
        "topk_group": source.count("expert_group_used_count", groups),
    }


def read_falcon_h1(source: ConfigSource, common: Values) -> Values:
    """Falcon-H1. Its factors are in the weights, and gates come before the norm, as llama.cpp has it."""
    inner, heads = source.count("ssm.inner_size"), source.count("ssm.time_step_rank")
    return like_llama("FalconH1ForCausalLM")(source, common) | {
        "attention_bias": any_layer_has(source, "attn_q.bias"),
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_n_groups": source.count("ssm.group_count"),
        "mamba_d_state": source.count("ssm.state_size"),
        "mamba_d_conv": source.count("ssm.conv_kernel"),
        "mamba_conv_bias": any_layer_has(source, "ssm_conv1d.bias"),
        "mamba_proj_bias": any_layer_has(source, "ssm_in.bias"),
        "projectors_bias": any_layer_has(source, "ssm_out.bias"),
        "mamba_rms_norm": any_layer_has(source, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
    }


def read_kimi_linear(source: ConfigSource, common: Values) -> Values:
    """Kimi Linear. Its latent attention has no positions, and its experts' weights add up to 1, as in llama.cpp."""
    check_sigmoids(source)
    heads, plain = common["num_attention_heads"], source.count("rope.dimension_count")
    kv_heads = source.by_layer(KV_HEADS, common["num_hidden_layers"], heads, least=0)
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
        "layer_types": [KINDS[count == 0] for count in kv_heads],
        "linear_num_heads": heads,
        "linear_head_dim": source.count("kda.head_dim"),
        "linear_conv_kernel_dim": source.count("ssm.conv_kernel"),
        "kv_lora_rank": source.count("attention.kv_lora_rank"),
        "q_lora_rank": source.count("attention.q_lora_rank") if source.has("attention.q_lora_rank") else None,
        "qk_rope_head_dim": plain,
        "qk_nope_head_dim": source.count("attention.key_length_mla") - plain,
        "v_head_dim": source.count("attention.value_length_mla"),
        "kv_b_proj_by_head": any_layer_has(source, "attn_k_b.weight"),
        **read_deepseek_experts(source),
        "norm_topk_prob": True,
    }
