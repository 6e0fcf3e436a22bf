"""Shapes of real models, and checkpoints of them with random weights. Needs only torch and safetensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

MODELS: dict[str, dict[str, Any]] = {
    "llama-135m": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320,
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    },
    "granite-4-h-350m": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "vocab_size": 100352,
        "hidden_size": 768, "intermediate_size": 2048, "shared_intermediate_size": 2048, "num_local_experts": 0,
        "num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
        "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
        "mamba_n_heads": 48, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4,
        "mamba_expand": 2, "position_embedding_type": "nope", "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.246,
    },
    "deepseek-0.5b": {  # no published model: the attention of DeepSeek-V2-Lite, with MLPs instead of experts
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 65536,
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "first_k_dense_replace": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip
EXPERT = "mlp.experts."
"""Stands in the names of experts' tensors, before the number."""
COMMON = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6}


def write_model(directory: Path, shape: dict) -> Path:
    """Writes a checkpoint of random matrices and norms of 1, and returns its directory."""
    (directory / "config.json").write_text(json.dumps(COMMON | shape))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
        for name, size in tensor_shapes(shape)
    }
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def tensor_shapes(shape: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each tensor. An untied output layer comes second."""
    hidden = shape["hidden_size"]
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    if not (COMMON | shape)["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (hidden,)
        if is_state_space(shape) and is_recurrent(shape, layer):
            yield from _state_space(shape, f"{at}mamba.")
        elif is_recurrent(shape, layer):
            yield from _delta_rule(shape, f"{at}linear_attn.")
        elif is_latent(shape):
            yield from _latent_attention(shape, f"{at}self_attn.")
        else:
            yield from _attention(shape, f"{at}self_attn.")
        yield from _mlp(shape, at)


def _mlp(shape: dict, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    if experts := shape.get("num_experts"):
        yield f"{at}mlp.gate.weight", (experts, hidden)
        inner = shape["moe_intermediate_size"]
        for expert in range(experts):
            for name in ("gate_proj", "up_proj"):
                yield f"{at}{EXPERT}{expert}.{name}.weight", (inner, hidden)
            yield f"{at}{EXPERT}{expert}.down_proj.weight", (hidden, inner)
        return
    if is_state_space(shape):
        yield f"{at}shared_mlp.input_linear.weight", (2 * inner, hidden)
        yield f"{at}shared_mlp.output_linear.weight", (hidden, inner)
        return
    for name in ("gate_proj", "up_proj"):
        yield f"{at}mlp.{name}.weight", (inner, hidden)
    yield f"{at}mlp.down_proj.weight", (hidden, inner)


def is_recurrent(shape: dict, layer: int) -> bool:
    """Returns whether a layer has a state instead of attention: of Qwen 3.5 three of four do."""
    if is_state_space(shape):
        return shape["layer_types"][layer] == "mamba"
    return "linear_num_value_heads" in shape and (layer + 1) % 4 != 0


def is_state_space(shape: dict) -> bool:
    """Returns whether the recurrent layers of a shape are state-space mixers."""
    return "mamba_n_heads" in shape


def state_elements(shape: dict) -> int:
    """Returns the elements of the matrices of a recurrent layer."""
    if is_state_space(shape):
        return shape["mamba_n_heads"] * shape["mamba_d_head"] * shape["mamba_d_state"]
    return shape["linear_num_value_heads"] * shape["linear_key_head_dim"] * shape["linear_value_head_dim"]


def is_latent(shape: dict) -> bool:
    """Returns whether a shape has latent attention."""
    return "kv_lora_rank" in shape


def _latent_attention(shape: dict, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, rank = shape["hidden_size"], shape["num_attention_heads"], shape["kv_lora_rank"]
    plain, rotated, value = shape["qk_nope_head_dim"], shape["qk_rope_head_dim"], shape["v_head_dim"]
    yield f"{at}q_a_proj.weight", (shape["q_lora_rank"], hidden)
    yield f"{at}q_a_layernorm.weight", (shape["q_lora_rank"],)
    yield f"{at}q_b_proj.weight", (heads * (plain + rotated), shape["q_lora_rank"])
    yield f"{at}kv_a_proj_with_mqa.weight", (rank + rotated, hidden)
    yield f"{at}kv_a_layernorm.weight", (rank,)
    yield f"{at}kv_b_proj.weight", (heads * (plain + value), rank)
    yield f"{at}o_proj.weight", (hidden, heads * value)


def _attention(shape: dict, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, dim, (family,) = shape["hidden_size"], shape["head_dim"], shape["architectures"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    if family.startswith("Qwen"):
        for name in ("q_norm", "k_norm"):
            yield f"{at}{name}.weight", (dim,)
    gated = 2 if family.startswith("Qwen3_5") else 1
    for name, out in (("q_proj", gated * queries), ("k_proj", keys), ("v_proj", keys)):
        yield f"{at}{name}.weight", (out, hidden)
    yield f"{at}o_proj.weight", (hidden, queries)


def _state_space(shape: dict, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = shape["hidden_size"], shape["mamba_n_heads"]
    values = heads * shape["mamba_d_head"]
    channels = values + 2 * shape["mamba_n_groups"] * shape["mamba_d_state"]
    yield f"{at}in_proj.weight", (values + channels + heads, hidden)
    yield f"{at}conv1d.weight", (channels, 1, shape["mamba_d_conv"])
    yield f"{at}conv1d.bias", (channels,)
    for name in ("A_log", "dt_bias", "D"):
        yield f"{at}{name}", (heads,)
    yield f"{at}norm.weight", (values,)
    yield f"{at}out_proj.weight", (hidden, values)


def _delta_rule(shape: dict, at: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads = shape["hidden_size"], shape["linear_num_value_heads"]
    keys, values = shape["linear_num_key_heads"] * shape["linear_key_head_dim"], heads * shape["linear_value_head_dim"]
    for name, out in (("qkv", 2 * keys + values), ("z", values), ("b", heads), ("a", heads)):
        yield f"{at}in_proj_{name}.weight", (out, hidden)
    yield f"{at}conv1d.weight", (2 * keys + values, 1, shape["linear_conv_kernel_dim"])
    for name in ("A_log", "dt_bias"):
        yield f"{at}{name}", (heads,)
    yield f"{at}norm.weight", (shape["linear_value_head_dim"],)
    yield f"{at}out_proj.weight", (hidden, values)
