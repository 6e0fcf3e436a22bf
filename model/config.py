"""config.json and generation_config.json of a Hugging Face model directory. Imports no torch."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cache_manager.layout import KVLayout, layer_groups
from model.errors import CheckpointError
from scheduler.request import InvalidRequest, ModelDefaults, Sampling

T = TypeVar("T")

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {**{name: (size, 0) for name, size in ELEMENT_BYTES.items()}, "int8": (1, 4), "fp8": (1, 4)}
"""By dtype of the KV pool: bytes of an element, and of the scale of each token and head."""


WINDOWED = ("MistralForCausalLM", "MinistralForCausalLM")
MISTRAL_WINDOW = 4096  # where a config says nothing of it
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What an architecture needs to know. context: longest sequence in tokens. windows: by layer, how many tokens a
    token sees, itself included; None for all before it. dtype: of the checkpoint's weights.
    """

    architecture: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]

    def kv_layout(self, page_size: int, dtype: str) -> KVLayout:
        """dtype: of the KV pool."""
        element, scale = KV_BYTES[dtype]
        groups, windows = layer_groups(self.windows)
        return KVLayout(groups, self.kv_heads, self.head_dim, element, page_size, scale, windows)


class _Fields:
    """Typed access to a parsed config.json, with errors that name the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path, self.values = path, values

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.path}: {key!r} is missing")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {key!r} is {value!r}, must be of type {kind.__name__}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self.get(key, float, default)
        if not 0 < value < math.inf:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be a number above 0")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.get(key, int, default)
        if value < 1:
            raise CheckpointError(f"{self.path}: {key!r} is {value}, must be at least 1")
        return value


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where the file is missing or holds no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: is this a Hugging Face model directory?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return values


def read_config(directory: Path) -> ModelConfig:
    """Reads config.json; keys in the Hub's classic style or transformers 5's. Raises CheckpointError."""
    path = directory / "config.json"
    fields = _Fields(path, read_json(path))
    values = fields.values
    _refuse_unsupported(path, values)
    architectures = fields.get("architectures", list)
    if len(architectures) != 1 or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path}: 'architectures' is {architectures!r}, must name one architecture")
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    kv_heads = fields.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    head_dim = fields.positive("head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"{path}: 'head_dim' is {head_dim}, rotary positions need an even one")
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    if dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{path}: dtype {dtype!r} is not supported, use one of {', '.join(ELEMENT_BYTES)}")
    return ModelConfig(
        architecture=architectures[0],
        vocabulary=fields.positive("vocab_size"),
        hidden=hidden,
        intermediate=fields.positive("intermediate_size"),
        layers=fields.positive("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=fields.positive("max_position_embeddings"),
        rope_theta=_rope_theta(fields),
        norm_eps=fields.positive_float("rms_norm_eps", 1e-6),
        attention_bias=fields.get("attention_bias", bool, False),
        mlp_bias=fields.get("mlp_bias", bool, False),
        tied_embeddings=fields.get("tie_word_embeddings", bool, False),
        windows=_windows(fields, architectures[0]),
        dtype=dtype,
        eos_token_ids=_eos(path, values, fields.positive("vocab_size")) or (),
    )


def _refuse_unsupported(path: Path, values: dict[str, Any]) -> None:
    if values.get("quantization_config") is not None:
        raise CheckpointError(f"{path}: 'quantization_config' is set; quantized checkpoints are not supported yet")
    if values.get("auto_map") is not None:
        raise CheckpointError(f"{path}: 'auto_map' asks for code from the checkpoint; Quire never runs that")
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{path}: 'hidden_act' is {activation!r}, only 'silu' is supported")


def _windows(fields: _Fields, architecture: str) -> tuple[int | None, ...]:
    """By layer. A window that no sequence of the model's context can leave is none."""
    layers, values = fields.positive("num_hidden_layers"), fields.values
    if architecture not in WINDOWED:
        return (None,) * layers
    if "sliding_window" in values and values["sliding_window"] is None:
        window = None
    else:
        window = fields.positive("sliding_window", MISTRAL_WINDOW)
    kinds = fields.get("layer_types", list, [SLIDING] * layers)
    if len(kinds) != layers or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise CheckpointError(
            f"{fields.path}: 'layer_types' is {kinds!r}, must name {SLIDING!r} or {FULL!r} for each of {layers} layers"
        )
    if window is None or window >= fields.positive("max_position_embeddings"):
        return (None,) * layers
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _rope_theta(fields: _Fields) -> float:
    """From 'rope_theta', or from transformers 5's 'rope_parameters'. Scaled rope is refused."""
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.get(key, dict, {})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"{fields.path}: rope type {kind!r} in {key!r} is not supported yet, only 'default'")
    rope = fields.get("rope_parameters", dict, {})
    if "rope_theta" in rope:
        return _Fields(fields.path, rope).positive_float("rope_theta")
    return fields.positive_float("rope_theta", 10000.0)


def _eos(path: Path, values: dict[str, Any], vocabulary: int) -> tuple[int, ...] | None:
    eos = values.get("eos_token_id")
    if eos is None:
        return None
    ids = eos if isinstance(eos, list) else [eos]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary for i in ids):
        raise CheckpointError(f"{path}: 'eos_token_id' is {eos!r}, must be an id or a list of ids below {vocabulary}")
    return tuple(ids)


def read_defaults(directory: Path, config: ModelConfig) -> ModelDefaults:
    """What requests get where they are silent, from generation_config.json if there is one. Raises CheckpointError."""
    path = directory / "generation_config.json"
    if not path.exists():
        return ModelDefaults(eos_token_ids=config.eos_token_ids)
    fields = _Fields(path, read_json(path))
    sampled = fields.get("do_sample", bool, True)
    defaults = ModelDefaults(
        temperature=fields.get("temperature", float, 1.0) if sampled else 0.0,
        top_p=fields.get("top_p", float, 1.0),
        top_k=fields.get("top_k", int, 0),
        min_p=fields.get("min_p", float, 0.0),
        eos_token_ids=_eos(path, fields.values, config.vocabulary) or config.eos_token_ids,
    )
    try:
        Sampling(defaults.temperature, defaults.top_p, defaults.top_k, defaults.min_p)
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from None
    return defaults
