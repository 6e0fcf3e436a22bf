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
}  # fmt: skip
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
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    if not (COMMON | shape)["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (hidden,)
        if shape["architectures"] == ["Qwen3ForCausalLM"]:
            for name in ("q_norm", "k_norm"):
                yield f"{at}self_attn.{name}.weight", (dim,)
        for name, out in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{at}self_attn.{name}.weight", (out, hidden)
        yield f"{at}self_attn.o_proj.weight", (hidden, queries)
        for name in ("gate_proj", "up_proj"):
            yield f"{at}mlp.{name}.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
