"""Names of tensors in GGUF files and on the Hugging Face hub, by architecture.

The names are those of `gguf-py` (gguf/tensor_mapping.py), the changes those of llama.cpp's converter. Imports no torch.
"""

from model.gguf.mixture_names import MIXTURES
from model.gguf.name_parts import (
    ATTENTION,
    HEAD_NORMS,
    LLAMA,
    MLP,
    NORMS,
    NORMS_AFTER,
    NORMS_PLUS_ONE,
    PAIRED,
    PARALLEL,
    SANDWICH,
)
from model.gguf.named import Change, Names
from model.gguf.recurrent_names import RECURRENT

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
DENSE = {
    "LlamaForCausalLM": Names(LLAMA, changes=PAIRED),
    "Qwen2ForCausalLM": Names(LLAMA),
    "Qwen3ForCausalLM": Names(LLAMA | HEAD_NORMS),
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
    "BloomForCausalLM": Names(
        NORMS
        | {
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        changes={"attn_qkv": Change.QKV_APART},
        layers="transformer.h.{}.",
        top={
            "token_embd": "transformer.word_embeddings",
            "token_embd_norm": "transformer.word_embeddings_layernorm",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
    ),
    "MptForCausalLM": Names(
        {
            "attn_norm": "norm_1",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "ffn_norm": "norm_2",
            "ffn_up": "ffn.up_proj",
            "ffn_down": "ffn.down_proj",
        },
        layers="transformer.blocks.{}.",
        top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
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
NAMES = DENSE | MIXTURES | RECURRENT
"""By the name of the architecture on the hub."""
