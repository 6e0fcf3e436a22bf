"""Converts a checkpoint to llama.cpp's format, in bfloat16. Needs the gguf package.

python -m bench.peers.as_gguf MODEL OUT.gguf
"""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from bench.peers.gguf_parts import PARTS, Config, Hybrid, Named, Parts

IN_FLOAT = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm")  # matrices that llama.cpp reads in float32


def convert(model: Path, out: Path) -> None:
    """Writes a checkpoint of `bench.shapes.write_model` as a GGUF file."""
    config = json.loads((model / "config.json").read_text())
    parts = PARTS[config["architectures"][0]]
    writer = GGUFWriter(out, parts.name)
    _write_config(writer, config)
    parts.write_config(writer, config)
    _write_tokenizer(writer, config, json.loads((model / "tokenizer.json").read_text())["model"])
    for name, tensor in load_file(model / "model.safetensors").items():
        for full, values in _named(parts, name, tensor.float().numpy(), config):
            if values.ndim == 1 or not set(IN_FLOAT).isdisjoint(full.split(".")):
                writer.add_tensor(full, np.ascontiguousarray(values))
                continue
            content = gguf.quants.quantize(np.ascontiguousarray(values), GGMLQuantizationType.BF16)
            writer.add_tensor(full, content, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _named(parts: Parts, name: str, values: np.ndarray, config: Config) -> Named:
    if name == "model.embed_tokens.weight":
        yield "token_embd.weight", values
    elif name == "model.norm.weight":
        yield "output_norm.weight", values + 1 if isinstance(parts, Hybrid) else values
    else:
        _, _, layer, part = name.split(".", 3)
        for own, made in parts.named(part, values, config):
            yield f"blk.{layer}.{own}", made


def _write_config(writer: GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_tokenizer(writer: GGUFWriter, config: Config, tokenizer: dict[str, Any]) -> None:
    """Writes a byte-level BPE, or in place of one word an id a vocabulary that both engines take.

    Requests hold token ids, so that the second has any merge; that needs both parts as tokens.
    """
    count = config["vocab_size"]
    tokens, merges, types = [*(f"w{i}" for i in range(count - 2)), "w", "0"], ["w 0"], [gguf.TokenType.NORMAL] * count
    if tokenizer["type"] == "BPE":
        tokens = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
        tokens += [f"<unused {i}>" for i in range(len(tokens), count)]
        merges = [" ".join(pair) for pair in tokenizer["merges"]]
        end = int(config["eos_token_id"])
        types[end] = gguf.TokenType.CONTROL
        writer.add_eos_token_id(end)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
