"""Names of tensors in GGUF files of mixtures of experts, and on the Hugging Face hub.

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
    PAIRED,
    QWEN_EXPERTS,
    SHARED_EXPERTS,
    below,
)
from model.gguf.named import Change, Names

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
MIXTURES = {
    "Llama4ForCausalLM": Names(
        NORMS
        | ATTENTION
        | below(
            "feed_forward",
            {
                "ffn_gate": "gate_proj",
                "ffn_up": "up_proj",
                "ffn_down": "down_proj",
                "ffn_gate_inp": "router",
                "ffn_gate_shexp": "shared_expert.gate_proj",
                "ffn_up_shexp": "shared_expert.up_proj",
                "ffn_down_shexp": "shared_expert.down_proj",
            },
        ),
        {name: part.replace("mlp.", "feed_forward.") for name, part in EXPERTS.items()},
    ),
    "MixtralForCausalLM": Names(
        LLAMA | {"ffn_gate_inp": "block_sparse_moe.gate"},
        MIXTRAL_EXPERTS,
        PAIRED,
    ),
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
}
"""By the name of the architecture on the hub."""
