"""The configuration of a GGUF file, as the config.json that the model would have on the hub. Imports no torch.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from difflib import get_close_matches
from pathlib import Path

from model.errors import MOST_SHOWN, CheckpointError
from model.fields import MOST, Fields
from model.gguf.common import KV_HEADS, Values, check_unread
from model.gguf.families import ARCHITECTURES
from model.gguf.names import hub_names
from model.gguf.source import ConfigSource
from model.gguf.split import GGUFModel, open_model
from model.gguf.tokens import end_tokens

DIFFERING = ("gemma4",)  # architectures whose layers may have different KV heads
HYBRIDS = (
    "granitehybrid",
    "kimi-linear",
    "lfm2",
    "lfm2moe",
    "nemotron_h",
    "nemotron_h_moe",
)  # whose layers without attention have no KV heads
UNATTENDED = ("mamba2",)  # whose layers have no heads at all
METHOD = "gguf"
"""`quant_method` of weights in blocks. No config.json may name it: only files have such weights."""


def read_gguf_config(path: Path) -> Values:
    """Returns what config.json of the same model on the hub would hold.

    Raises:
        CheckpointError: The files are damaged, or the architecture is not served.
    """
    model = open_model(path)
    fields = model.metadata.fields
    name = fields.get("general.architecture", str)
    if name not in ARCHITECTURES:
        near = ", ".join(get_close_matches(name[:MOST_SHOWN], ARCHITECTURES, cutoff=0.0))
        raise fields.refuse("general.architecture", f"which is not served; the nearest that are: {near}")
    source = ConfigSource(model, name)
    check_unread(source)
    common = _common(source)
    values = common | ARCHITECTURES[name](source, common)
    values |= _weights(model, values["architectures"][0])
    if "tiled_inputs" in values and "quantization_config" in values:
        values["quantization_config"]["tiled_inputs"] = values["tiled_inputs"]
    return values


def _common(source: ConfigSource) -> Values:
    """Returns what all architectures say in the same way."""
    tensors, heads = source.model.tensors, 1 if source.prefix in UNATTENDED else source.count("attention.head_count")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source.model.path}: the tensor token_embd.weight is missing or is no matrix")
    hidden, layers = source.count("embedding_length"), source.count("block_count")
    if source.prefix in DIFFERING:
        kv_heads = source.by_layer("attention.head_count_kv", layers, heads)[0]
    elif source.prefix in HYBRIDS:
        kv_heads = max(source.by_layer(KV_HEADS, layers, heads, least=0))
    else:
        kv_heads = source.count("attention.head_count_kv", heads)
    values: Values = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": source.count("attention.key_length", max(1, hidden // heads)),
        "max_position_embeddings": _context(source),
        "rope_theta": source.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": end_tokens(source.model.metadata, embedding.shape[0]),
    }
    latent = source.has("attention.kv_lora_rank")  # the values are part of the keys then
    if not latent and source.count("attention.value_length", values["head_dim"]) != values["head_dim"]:
        raise CheckpointError(
            f"{source.model.path}: '{source.prefix}.attention.value_length' differs from 'attention.key_length', "
            "which is not supported"
        )
    return values


def _context(source: ConfigSource) -> int:
    """Returns the length of contexts, at most `MOST`, the bound of counts.

    Llama 4 Scout's file says 10 million. A config.json could be lowered, a file cannot.
    """
    fields, key = source.model.metadata.fields, f"{source.prefix}.context_length"
    return Fields(fields.path, {key: min(fields.get(key, int), MOST)}).positive(key)


def _weights(model: GGUFModel, architecture: str) -> Values:
    """Returns dtype and weight format, which names the type of each linear; plain weights alone have none."""
    types = {
        one.name.removesuffix(".weight"): one.tensor.type
        for one in hub_names(architecture, model.tensors)
        if one.name.endswith(".weight") and len(one.tensor.shape) > 1
    }
    layers = {name: kind for name, kind in types.items() if any(part.isdecimal() for part in name.split("."))}
    names = {kind.name for kind in layers.values()}
    if all(kind.is_plain for kind in types.values()):
        # Gemma's activations do not fit in float16.
        wide = "BF16" in names or architecture.startswith("Gemma")
        return {"dtype": "float32" if names == {"F32"} else "bfloat16" if wide else "float16"}
    kinds = {name: kind.name for name, kind in types.items()}
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": METHOD, "types": kinds}}
