"""Names of tensors in GGUF files of models with recurrent layers, and on the Hugging Face hub.

The names are those of `gguf-py` (gguf/tensor_mapping.py), the changes those of llama.cpp's converter. Imports no torch.
"""

from model.gguf.name_parts import (
    ATTENTION,
    DEEPSEEK,
    EXPERTS,
    GRANITE_MOE,
    HEAD_NORMS,
    LLAMA,
    MIXTRAL_EXPERTS,
    MLP,
    NORMS,
    NORMS_PLUS_ONE,
    PAIRED,
    QWEN_EXPERTS,
    SHARED_EXPERTS,
    below,
)
from model.gguf.named import Change, Names

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
KIMI_LINEAR = Names(
    LLAMA
    | dict(DEEPSEEK.block)
    | below("block_sparse_moe", {"ffn_gate_inp": "gate"})
    | {name: part.replace("mlp.", "block_sparse_moe.") for name, part in SHARED_EXPERTS.items()}
    | below(
        "self_attn",
        {f"ssm_conv1d_{part}": f"{part}_conv1d" for part in "qkv"}
        | {f"ssm_{part}": f"{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")}
        | {"ssm_beta": "b_proj", "ssm_norm": "o_norm", "attn_kv_b": "kv_b_proj"},
    ),
    MIXTRAL_EXPERTS | {"attn_k_b": "self_attn.k_b_proj.{}", "attn_v_b": "self_attn.v_b_proj.{}"},
    dict.fromkeys(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), Change.CHANNELS) | {"ssm_a": Change.IN_COLUMNS},
    below("self_attn", {"ssm_a": "ssm_a", "ssm_dt.bias": "dt_bias"})
    | {"exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"},
)
BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
RECURRENT = {
    "GraniteMoeHybridForCausalLM": Names(
        NORMS
        | ATTENTION
        | below("mamba", STATE_SPACE)
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
        below("mamba", STATE_SPACE_WHOLE),
    ),
    "FalconH1ForCausalLM": Names(
        ATTENTION
        | below("mamba", STATE_SPACE)
        | {
            "attn_norm": "input_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        changes=STATE_SPACE_CHANGES,
        # The name of the second norm has no end in files that are made today.
        whole=below("mamba", STATE_SPACE_WHOLE)
        | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight"),
        top={"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
    ),
    "NemotronHForCausalLM": Names(
        below("mixer", STATE_SPACE)
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
        below("mixer", STATE_SPACE_WHOLE) | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
        layers="backbone.layers.{}.",
        top=BACKBONE,
    ),
    "KimiLinearForCausalLM": KIMI_LINEAR,
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": LFM2,
    "Mamba2ForCausalLM": Names(
        below("mixer", STATE_SPACE) | {"attn_norm": "norm"},
        changes=STATE_SPACE_CHANGES,
        whole=below("mixer", STATE_SPACE_WHOLE),
        layers="backbone.layers.{}.",
        top=BACKBONE,
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
}
"""By the name of the architecture on the hub."""
