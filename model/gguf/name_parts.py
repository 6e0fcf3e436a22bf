"""Names of tensors in GGUF files and on the Hugging Face hub that several architectures share.

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
MIXTRAL_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GRANITE_MOE = {name: part.replace("mlp.", "block_sparse_moe.") for name, part in EXPERTS.items()}
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


def below(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Puts a prefix before names on the hub."""
    return {name: f"{prefix}.{part}" for name, part in names.items()}
