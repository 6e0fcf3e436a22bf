"""Converts a checkpoint to llama.cpp's format, in bfloat16. Needs the gguf package.

python -m bench.peers.as_gguf MODEL OUT.gguf
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def convert(model: Path, out: Path) -> None:
    """Writes a checkpoint of `bench.shapes.write_model` as a GGUF file."""
    config = json.loads((model / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    writer = GGUFWriter(out, architecture)
    _write_config(writer, config)
    _write_tokenizer(writer, config["vocab_size"])
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(_name(name), values)
            continue
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = interleaved(values, heads[part])
        content = gguf.quants.quantize(np.ascontiguousarray(values), GGMLQuantizationType.BF16)
        writer.add_tensor(_name(name), content, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Interleaves the rows of each head: llama.cpp's rope rotates neighbours, the checkpoint's rotates halves."""
    halves = weight.reshape(heads, 2, -1, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _write_config(writer: GGUFWriter, config: dict) -> None:
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
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    """Writes a vocabulary that both engines take; requests hold token ids. A merge needs both parts as tokens."""
    tokens = [f"w{i}" for i in range(vocabulary - 2)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, "w", "0"])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges(["w 0"])


def _name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    _, _, layer, *rest = name.split(".")
    return f"blk.{layer}.{NAMES['.'.join(rest[:-1])]}.weight"


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
