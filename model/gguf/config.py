"""The configuration of a GGUF file, as the config.json that the model would have on the hub. Imports no torch.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of llama.cpp's src/llama-arch.cpp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from model.errors import MOST_SHOWN, CheckpointError
from model.gguf.names import hub_names
from model.gguf.split import GGUFModel, open_model
from model.gguf.tokens import end_tokens

METHOD = "gguf"
"""`quant_method` of weights in blocks. No config.json may name it: only files have such weights."""

MOST_FACTORS = 2**12


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A file whose configuration is read.

    Attributes:
        model: The file or files.
        prefix: Its architecture, which most keys begin with.
    """

    model: GGUFModel
    prefix: str

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.model.metadata

    def count(self, key: str, default: int | None = None) -> int:
        return self.model.metadata.count(f"{self.prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        return self.model.metadata.fields.positive_float(f"{self.prefix}.{key}", default)

    def text(self, key: str, default: str) -> str:
        return self.model.metadata.fields.get(f"{self.prefix}.{key}", str, default)

    def factors(self, tensor: str) -> list[float] | None:
        """Returns the numbers of a small tensor of float32. None where there is none."""
        one = self.model.tensors.get(tensor)
        if one is None:
            return None
        if one.type.name != "F32" or len(one.shape) != 1 or one.shape[0] > MOST_FACTORS:
            raise CheckpointError(
                f"{one.file.path}: tensor {tensor} is {one.type.name} of shape {list(one.shape)}, must be F32 of one "
                f"dimension, of at most {MOST_FACTORS}"
            )
        numbers: list[float] = one.bytes().view(np.float32).tolist()
        return numbers


Values = dict[str, Any]
Reader = Callable[[Source, Values], Values]
"""Returns what one architecture says beside what all say in the same way, which is its second argument."""


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
    source = Source(model, name)
    common = _common(source)
    values = common | ARCHITECTURES[name](source, common)
    return values | _weights(model, values["architectures"][0])


def _common(source: Source) -> Values:
    """Returns what all architectures say in the same way."""
    tensors, heads = source.model.tensors, source.count("attention.head_count")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{source.model.path}: the tensor token_embd.weight is missing or is no matrix")
    hidden = source.count("embedding_length")
    values: Values = {
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": source.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": source.count("attention.head_count_kv", heads),
        "head_dim": source.count("attention.key_length", max(1, hidden // heads)),
        "max_position_embeddings": source.count("context_length"),
        "rope_theta": source.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": end_tokens(source.model.metadata, embedding.shape[0]),
    }
    if source.count("attention.value_length", values["head_dim"]) != values["head_dim"]:
        raise CheckpointError(
            f"{source.model.path}: '{source.prefix}.attention.value_length' differs from 'attention.key_length', "
            "which is not supported"
        )
    return values


def _rope(source: Source, values: Values) -> Values:
    """Returns the rules by which positions are stretched."""
    kind = source.text("rope.scaling.type", "none")
    length = values["max_position_embeddings"]
    frequencies = source.factors("rope_freqs.weight")
    short = source.factors("rope_factors_short.weight")
    if frequencies is not None:  # Llama 3.1 has its rule as a divisor of each frequency
        return {"rope_scaling": {"rope_type": "longrope", "short_factor": frequencies, "attention_factor": 1.0}}
    if short is not None:
        rope: Values = {"rope_type": "longrope", "short_factor": short}
        if source.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = source.number("rope.scaling.attn_factor")
        return {
            "rope_scaling": rope,
            "original_max_position_embeddings": source.count("rope.scaling.original_context_length", length),
        }
    if kind in ("none", "longrope") or (kind == "linear" and not source.has("rope.scaling.factor")):
        return {}
    if kind not in ("linear", "yarn"):
        raise source.model.metadata.fields.refuse(
            f"{source.prefix}.rope.scaling.type", "which is not supported; supported: none, linear, yarn, longrope"
        )
    rope = {"rope_type": kind, "factor": source.number("rope.scaling.factor")}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = source.count("rope.scaling.original_context_length", length)
        for key, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if source.has(f"rope.scaling.{theirs}"):
                rope[key] = source.number(f"rope.scaling.{theirs}")
    return {"rope_scaling": rope}


def _partial(source: Source, head_dim: int) -> Values:
    """Returns the rotated part of a head where it is not all of it."""
    dims = source.count("rope.dimension_count", head_dim)
    return {} if dims == head_dim else {"partial_rotary_factor": dims / head_dim}


def _like_llama(architecture: str) -> Reader:
    def read(source: Source, common: Values) -> Values:
        tensors = source.model.tensors
        return {
            "architectures": [architecture],
            "intermediate_size": source.count("feed_forward_length"),
            "rms_norm_eps": source.number("attention.layer_norm_rms_epsilon"),
            "attention_bias": "blk.0.attn_output.bias" in tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in tensors,
            **_rope(source, common),
            **_partial(source, common["head_dim"]),
        }

    return read


def _llama(source: Source, common: Values) -> Values:
    """Llama and Mistral, or Mixtral, which are one architecture in llama.cpp."""
    if not source.has("expert_count") or source.model.metadata.fields.get("llama.expert_count", int) == 0:
        return _like_llama("LlamaForCausalLM")(source, common)
    return _like_llama("MixtralForCausalLM")(source, common) | {
        "num_local_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
    }


def _qwen3_moe(source: Source, common: Values) -> Values:
    return _like_llama("Qwen3MoeForCausalLM")(source, common) | {
        "intermediate_size": source.count("feed_forward_length", 1),  # of layers without experts: there are none
        "moe_intermediate_size": source.count("expert_feed_forward_length"),
        "num_experts": source.count("expert_count"),
        "num_experts_per_tok": source.count("expert_used_count"),
        "norm_topk_prob": True,  # llama.cpp has no other
    }


def _gemma(source: Source, common: Values) -> Values:
    return _like_llama("GemmaForCausalLM")(source, common) | {"hidden_act": "gelu_pytorch_tanh"}


def _query_scale(common: Values, largest: int) -> int:
    """Returns 'query_pre_attn_scalar', which llama.cpp knows by the number of layers: the largest model's differs."""
    whole = common["num_hidden_layers"] == largest
    scale: int = common["hidden_size"] // common["num_attention_heads"] if whole else common["head_dim"]
    return scale


def _gemma2(source: Source, common: Values) -> Values:
    caps = {
        "attn_logit_softcapping": source.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": source.number("final_logit_softcapping", 30.0),
    }
    return (
        _like_llama("Gemma2ForCausalLM")(source, common)
        | caps
        | {
            "sliding_window": source.count("attention.sliding_window", 4096),
            "query_pre_attn_scalar": _query_scale(common, 46),
        }
    )


def _gemma3(source: Source, common: Values) -> Values:
    values = _like_llama("Gemma3ForCausalLM")(source, common)
    if not source.has("rope.freq_base"):
        values["rope_theta"] = 1e6
    if source.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = source.number("final_logit_softcapping")
    return values | {
        "sliding_window": source.count("attention.sliding_window"),
        "sliding_window_pattern": source.count("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": source.number("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": _query_scale(common, 62),
    }


def _phi3(source: Source, common: Values) -> Values:
    values = _like_llama("Phi3ForCausalLM")(source, common)
    if source.has("attention.sliding_window"):
        values["sliding_window"] = source.count("attention.sliding_window")
    return values


def _gpt2(source: Source, common: Values) -> Values:  # noqa: ARG001
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_inner": source.count("feed_forward_length"),
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _starcoder2(source: Source, common: Values) -> Values:  # noqa: ARG001
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "intermediate_size": source.count("feed_forward_length"),
        "norm_epsilon": source.number("attention.layer_norm_epsilon"),
        "use_bias": "blk.0.attn_q.bias" in source.model.tensors,
    }


def _falcon(source: Source, common: Values) -> Values:
    """Falcon 7B has one KV head; later ones have several, and one or two norms."""
    several = common["num_key_value_heads"] > 1
    return {
        "architectures": ["FalconForCausalLM"],
        "new_decoder_architecture": several,
        "num_kv_heads": common["num_key_value_heads"],
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in source.model.tensors else 1,
        "bias": "blk.0.attn_qkv.bias" in source.model.tensors,
        "ffn_hidden_size": source.count("feed_forward_length", 4 * common["hidden_size"]),
        "layer_norm_epsilon": source.number("attention.layer_norm_epsilon"),
    }


ARCHITECTURES: dict[str, Reader] = {
    "llama": _llama,
    "qwen2": _like_llama("Qwen2ForCausalLM"),
    "qwen3": _like_llama("Qwen3ForCausalLM"),
    "qwen3moe": _qwen3_moe,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt2": _gpt2,
    "starcoder2": _starcoder2,
    "olmo2": _like_llama("Olmo2ForCausalLM"),
    "falcon": _falcon,
}
"""By 'general.architecture'."""


def _weights(model: GGUFModel, architecture: str) -> Values:
    """Returns dtype and weight format, which names the type of each linear; plain weights alone have none."""
    types = {
        one.name.removesuffix(".weight"): one.tensor.type
        for one in hub_names(architecture, model.tensors)
        if one.name.endswith(".weight") and len(one.tensor.shape) > 1
    }
    layers = {name: kind for name, kind in types.items() if ".layers." in name or ".h." in name}
    names = {kind.name for kind in layers.values()}
    if all(kind.is_plain for kind in types.values()):
        dtype = "float32" if names == {"F32"} else "bfloat16" if "BF16" in names else "float16"
        return {"dtype": dtype}
    kinds = {name: kind.name for name, kind in types.items()}
    return {"dtype": "bfloat16", "quantization_config": {"quant_method": METHOD, "types": kinds}}
