"""Writes llamas and qwen3s as GGUF files, as convert_hf_to_gguf.py of llama.cpp does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from torch import Tensor

from bench.quantized.gguf_types import decode, encode

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Block:
    """A tensor of a file.

    Attributes:
        raw: As it is stored: float32, or bytes.
        kind: Its type.
    """

    raw: NDArray[Any]
    kind: Kind


def stored_name(name: str) -> str:
    """Returns the name in the file of a tensor of the checkpoint."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest[:-1])]}.weight"


def encode_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], kind_of: Callable[[str, int], Kind]
) -> tuple[dict[str, Block], dict[str, Tensor]]:
    """Encodes a checkpoint's tensors.

    Args:
        config: Its config.json.
        tensors: Tensors by name.
        kind_of: Returns the type of a matrix by its name and its inputs. Other tensors are F32.

    Returns:
        Tensors of the file by their names there; and the matrices that they stand for, float32, by the checkpoint's.
    """
    blocks, meant = {}, {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if values.ndim == 1:
            blocks[stored_name(name)] = Block(values, Kind.F32)
            continue
        kind = kind_of(name, values.shape[1])
        raw = encode(values, kind)
        meant[name] = torch.from_numpy(decode(raw, kind))
        blocks[stored_name(name)] = Block(_in_pairs(name, raw, config), kind)
    return blocks, meant


def _in_pairs(name: str, rows: NDArray[Any], config: Mapping[str, Any]) -> NDArray[Any]:
    """Puts the rows of each head in the order of pairs: llama.cpp's rope of a llama rotates neighbours, not halves."""
    if config["architectures"][0] != "LlamaForCausalLM" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_file(config: Mapping[str, Any], blocks: Mapping[str, Block], kind: Kind, out: Path) -> None:
    """Writes a file whose tokens are made up: what is measured are token ids.

    Args:
        config: The checkpoint's config.json.
        blocks: First result of `encode_tensors`.
        kind: Type that the file is named for.
        out: The file.
    """
    writer = gguf.GGUFWriter(out, ARCHITECTURES[config["architectures"][0]])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(_file_type(kind))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    # A merge needs both of its parts as tokens.
    writer.add_token_list([*(f"w{i}" for i in range(config["vocab_size"] - 2)), "w", "0"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["w 0"])
    for name, block in blocks.items():
        writer.add_tensor(name, block.raw, raw_dtype=None if block.kind == Kind.F32 else block.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _file_type(kind: Kind) -> gguf.LlamaFileType:
    """Returns the type of a file of one type; those of K types are named for their size, small without others."""
    types = gguf.LlamaFileType.__members__
    return types.get(f"MOSTLY_{kind.name}") or types[f"MOSTLY_{kind.name}_S"]
