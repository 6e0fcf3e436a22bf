"""Names of tensors in GGUF files and on the Hugging Face hub, by architecture.

The names are those of `gguf-py` (gguf/tensor_mapping.py), the changes those of llama.cpp's converter. Imports no torch.
"""

from collections.abc import Mapping

from model.gguf.named import Change, Names

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
SANDWICH = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
PAIRED = {"attn_q": Change.PAIRED_QUERIES, "attn_k": Change.PAIRED_KEYS}
NORMS_PLUS_ONE = dict.fromkeys(("output_norm", "attn_q_norm", "attn_k_norm", *NORMS, *SANDWICH), Change.PLUS_ONE)
LLAMA = NORMS | ATTENTION | MLP
PARALLEL = ATTENTION | MLP | {"attn_norm": "input_layernorm"}
DEEPSEEK = Names(
    NORMS
    | MLP
    | SHARED_EXPERTS
    | {
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_output": "self_attn.o_proj",
        "ffn_gate_inp": "mlp.gate",
    },
    EXPERTS | {"attn_k_b": "self_attn.k_b_proj.{}", "attn_v_b": "self_attn.v_b_proj.{}"},
    whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
)
"""Names of DeepSeek-V2 and V3. The product that expands latents is in parts, one of a head's keys or values each."""
GPT_OSS = Names(
    ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.router",
    },
    EXPERTS,
    whole={"attn_sinks.weight": "self_attn.sinks"},
)
GEMMA4 = Names(
    ATTENTION
    | MLP
    | SANDWICH
    | HEAD_NORMS
    | {
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    {
        "ffn_gate_exps": "experts.{}.gate_proj",
        "ffn_up_exps": "experts.{}.up_proj",
        "ffn_gate_up_exps": "experts.{}.gate_up_proj",
        "ffn_down_exps": "experts.{}.down_proj",
    },
    whole={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    top={
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
)
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
DELTA_WHOLE = {"ssm_a": "linear_attn.ssm_a", "ssm_dt.bias": "linear_attn.dt_bias"}
DELTA_TILED = {
    "attn_qkv": Change.TILED_AFTER_KEYS,
    "attn_gate": Change.TILED,
    "ssm_beta": Change.TILED,
    "ssm_alpha": Change.TILED,
    "ssm_a": Change.TILED,
    "ssm_dt": Change.TILED,
    "ssm_conv1d": Change.TILED_CHANNELS,
    "ssm_out": Change.TILED_INPUTS,
}
STATE_SPACE = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
STATE_SPACE_WHOLE = {"ssm_a": "ssm_a", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
STATE_SPACE_CHANGES = {"ssm_conv1d": Change.CHANNELS} | dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm"), Change.IN_COLUMNS)


def _below(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Puts a prefix before names on the hub."""
    return {name: f"{prefix}.{part}" for name, part in names.items()}


LFM2 = Names(
    HEAD_NORMS
    | ATTENTION
    | {
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
    },
    {
        "ffn_gate_exps": "feed_forward.experts.{}.w1",
        "ffn_up_exps": "feed_forward.experts.{}.w3",
        "ffn_down_exps": "feed_forward.experts.{}.w2",
    },
    {"shortconv.conv": Change.CHANNELS},
    {
        f"shortconv.{part}.{kind}": f"conv.{part}.{kind}"
        for part in ("conv", "in_proj", "out_proj")
        for kind in ("weight", "bias")
    }
    | {"exp_probs_b.bias": "feed_forward.expert_bias"},
    top={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
)
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
GRANITE_MOE = {name: part.replace("mlp.", "block_sparse_moe.") for name, part in EXPERTS.items()}
NAMES = {
    "LlamaForCausalLM": Names(LLAMA, changes=PAIRED),
    "MixtralForCausalLM": Names(
        LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"},
        MIXTRAL_EXPERTS,
        PAIRED,
    ),
    "Qwen2ForCausalLM": Names(LLAMA),
    "Qwen3ForCausalLM": Names(LLAMA | HEAD_NORMS),
    "Qwen3MoeForCausalLM": Names(LLAMA | HEAD_NORMS | {"ffn_gate_inp": "mlp.gate"}, EXPERTS),
    "Qwen2MoeForCausalLM": Names(
        LLAMA | QWEN_EXPERTS,
        EXPERTS,
    ),
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "GptOssForCausalLM": GPT_OSS,
    "GraniteMoeForCausalLM": Names(
        LLAMA | {"ffn_gate_inp": "block_sparse_moe.router"},
        GRANITE_MOE,
        PAIRED,
    ),
    "GraniteMoeHybridForCausalLM": Names(
        NORMS
        | ATTENTION
        | _below("mamba", STATE_SPACE)
        | {
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.output_linear",
            "ffn_gate_inp": "block_sparse_moe.router",
        },
        GRANITE_MOE,
        PAIRED | STATE_SPACE_CHANGES,
        _below("mamba", STATE_SPACE_WHOLE),
    ),
    "NemotronHForCausalLM": Names(
        _below("mixer", STATE_SPACE)
        | {
            "attn_norm": "norm",
            "attn_q": "mixer.q_proj",
            "attn_k": "mixer.k_proj",
            "attn_v": "mixer.v_proj",
            "attn_output": "mixer.o_proj",
            "ffn_up": "mixer.up_proj",
            "ffn_down": "mixer.down_proj",
            "ffn_gate_inp": "mixer.gate",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        {"ffn_up_exps": "mixer.experts.{}.up_proj", "ffn_down_exps": "mixer.experts.{}.down_proj"},
        PAIRED | STATE_SPACE_CHANGES,
        _below("mixer", STATE_SPACE_WHOLE) | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        layers="backbone.layers.{}.",
        top=BACKBONE,
    ),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "Mamba2ForCausalLM": Names(
        _below("mixer", STATE_SPACE) | {"attn_norm": "norm"},
        changes=STATE_SPACE_CHANGES,
        whole=_below("mixer", STATE_SPACE_WHOLE),
        layers="backbone.layers.{}.",
        top=BACKBONE,
    ),
    "PhimoeForCausalLM": Names(LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"}, MIXTRAL_EXPERTS),
    "Ernie4_5_MoeForCausalLM": Names(
        LLAMA | SHARED_EXPERTS | {"ffn_gate_inp": "mlp.gate"},
        EXPERTS,
        {"exp_probs_b": Change.FLAT},
        whole={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
    ),
    "MiniMaxM2ForCausalLM": Names(
        LLAMA | HEAD_NORMS | {"ffn_gate_inp": "block_sparse_moe.gate"},
        MIXTRAL_EXPERTS,
        whole={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
    "Glm4MoeForCausalLM": Names(
        ATTENTION
        | MLP
        | SHARED_EXPERTS
        | HEAD_NORMS
        | {
            "attn_norm": "input_layernorm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.gate",
        },
        EXPERTS,
        whole={"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
    ),
    "Qwen3NextForCausalLM": Names(
        ATTENTION | HEAD_NORMS | DELTA_NET | QWEN_EXPERTS,
        EXPERTS,
        NORMS_PLUS_ONE | {"ssm_conv1d": Change.CHANNELS, "ffn_gate_inp_shexp": Change.FLAT},
        DELTA_WHOLE,
    ),
    "Qwen3_5ForCausalLM": Names(
        ATTENTION | HEAD_NORMS | DELTA_NET | MLP,
        changes=NORMS_PLUS_ONE | DELTA_TILED,
        whole=DELTA_WHOLE,
    ),
    "Qwen3_5MoeForCausalLM": Names(
        ATTENTION | HEAD_NORMS | DELTA_NET | QWEN_EXPERTS,
        EXPERTS,
        NORMS_PLUS_ONE | DELTA_TILED | {"ffn_gate_inp_shexp": Change.FLAT},
        DELTA_WHOLE,
    ),
    "SmolLM3ForCausalLM": Names(LLAMA, changes=PAIRED),
    "SeedOssForCausalLM": Names(PARALLEL | {"post_attention_norm": "post_attention_layernorm"}),
    "GraniteForCausalLM": Names(LLAMA, changes=PAIRED),
    "Ernie4_5ForCausalLM": Names(LLAMA),
    "Glm4ForCausalLM": Names(
        NORMS
        | ATTENTION
        | {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "Exaone4ForCausalLM": Names(ATTENTION | MLP | HEAD_NORMS | NORMS_AFTER),
    "HunYuanDenseV1ForCausalLM": Names(
        LLAMA | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
    ),
    "CohereForCausalLM": Names(PARALLEL | HEAD_NORMS),
    "Cohere2ForCausalLM": Names(PARALLEL),
    "StableLmForCausalLM": Names(LLAMA),
    "GemmaForCausalLM": Names(LLAMA, changes=NORMS_PLUS_ONE),
    "Gemma2ForCausalLM": Names(ATTENTION | MLP | SANDWICH, changes=NORMS_PLUS_ONE),
    "Gemma3ForCausalLM": Names(ATTENTION | MLP | SANDWICH | HEAD_NORMS, changes=NORMS_PLUS_ONE),
    "Gemma4ForCausalLM": GEMMA4,
    "Phi3ForCausalLM": Names(
        NORMS
        | {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "GPT2LMHeadModel": Names(
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        changes=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), Change.LYING),
        layers="transformer.h.{}.",
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
    ),
    "Starcoder2ForCausalLM": Names(NORMS | ATTENTION | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "Olmo2ForCausalLM": Names(ATTENTION | MLP | HEAD_NORMS | NORMS_AFTER),
    "FalconForCausalLM": Names(
        {
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
            "attn_norm": "input_layernorm",
        },
        changes={"attn_qkv": Change.QKV_APART},
        layers="transformer.h.{}.",
        top={"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
    ),
    "GPTNeoXForCausalLM": Names(
        NORMS
        | {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        changes={"attn_qkv": Change.QKV_APART},
        layers="gpt_neox.layers.{}.",
        top={"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    ),
    "PhiForCausalLM": Names(
        ATTENTION
        | {
            "attn_norm": "input_layernorm",
            "attn_output": "self_attn.dense",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
        top={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
    ),
}
"""By the name of the architecture on the hub."""
