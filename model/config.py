"""config.json and generation_config.json of a Hugging Face model directory. Imports no torch."""

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cache_manager.layout import KVLayout, layer_groups
from model.errors import MOST_SHOWN, CheckpointError, shown
from model.families import FAMILIES, RENAMED, family_of
from model.fields import Fields, read_json
from model.multimodal import KINDS, NANO, Vision, read_text, read_vision
from model.nano import is_nano, read_nano_text, read_nano_vision
from scheduler.limits import ModelDefaults
from scheduler.request import InvalidRequest, Sampling

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {**{name: (size, 0) for name, size in ELEMENT_BYTES.items()}, "int8": (1, 4), "fp8": (1, 4)}
"""By dtype of the KV pool: bytes of an element, and of the scale of each token and head."""


MOST_EOS = 256  # ids that end a sequence; each step compares what it draws with all of them


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What all rooms need to know of a model. context: longest sequence in tokens. windows: by layer, how many tokens a
    token sees, itself included; None for all before it. scale: of attention's scores, which `soft_cap` then bounds by
    its tanh; None leaves them. dtype: of the checkpoint's weights. fields: all of config.json, for what only the
    architecture knows; of a model that sees, what its text model's would hold. vision: None for a model of text alone.
    first_position: where rope begins to count.
    """

    architecture: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    windows: tuple[int | None, ...]
    scale: float
    soft_cap: float | None
    tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    fields: Fields = field(repr=False, compare=False)
    vision: Vision | None = None
    first_position: int = 0

    def kv_layout(self, page_size: int, dtype: str) -> KVLayout:
        """dtype: of the KV pool."""
        element, scale = KV_BYTES[dtype]
        groups, windows = layer_groups(self.windows)
        return KVLayout(groups, self.kv_heads, self.head_dim, element, page_size, scale, windows)


def read_config(directory: Path) -> ModelConfig:
    """Reads config.json; keys in the Hub's classic style or transformers 5's. Raises CheckpointError."""
    path = directory / "config.json"
    values = read_json(path)
    fields = Fields(path, {RENAMED.get(key, key): value for key, value in values.items()})
    architecture = NANO if is_nano(fields) else _architecture(fields)
    if "quantization_config" in fields:
        raise CheckpointError(f"{path}: 'quantization_config' is set; quantized checkpoints are not supported yet")
    if architecture == NANO:
        text = _read(NANO, read_nano_text(fields, directory))
        return replace(text, vision=read_nano_vision(fields, directory))
    kind = KINDS.get(architecture)
    if kind is None:
        return _read(architecture, fields)
    name, text_fields = read_text(fields, kind)
    return replace(
        _read(name, text_fields),
        architecture=architecture,
        vision=read_vision(fields, kind, name),
        first_position=kind.first_position,
    )


def _architecture(fields: Fields) -> str:
    """The architecture that config.json names.

    Comes before all other fields: those of an architecture that is not served have other names.

    Raises CheckpointError unless it is one that is served.
    """
    names = fields.get("architectures", list)
    if len(names) != 1 or not isinstance(names[0], str):
        raise fields.refuse("architectures", "must name one architecture")
    name, served = names[0], (*FAMILIES, *KINDS)
    if name not in served:
        near = ", ".join(get_close_matches(name[:MOST_SHOWN], served, cutoff=0.0))
        raise fields.refuse("architectures", f"which is not served; the nearest that are: {near}")
    return name


def _read(architecture: str, fields: Fields) -> ModelConfig:
    """Of a model of text. Raises CheckpointError."""
    path, family = fields.path, family_of(architecture)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    layers, context = fields.positive("num_hidden_layers"), _context(fields, family.context)
    kv_heads = family.kv_heads(fields, heads)
    if heads % kv_heads:
        raise CheckpointError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    head_dim = fields.positive("head_dim", family.head_dim or max(1, hidden // heads))
    dtype = str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32")
    if dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{path}: dtype {shown(dtype)} is not supported, use one of {', '.join(ELEMENT_BYTES)}")
    capped = family.soft_cap is not None and fields.values.get("attn_logit_softcapping", 1) is not None
    return ModelConfig(
        architecture=architecture,
        vocabulary=fields.positive("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=context,
        windows=tuple(None if w is None or w >= context else w for w in family.windows(fields, layers)),
        scale=(fields.positive_float("query_pre_attn_scalar", 256.0) if family.scaled else head_dim) ** -0.5,
        soft_cap=fields.positive_float("attn_logit_softcapping", family.soft_cap) if capped else None,
        tied_embeddings=fields.flag("tie_word_embeddings", family.tied),
        dtype=dtype,
        eos_token_ids=_eos(path, fields.values, fields.positive("vocab_size")) or (),
        fields=fields,
    )


def _context(fields: Fields, default: int | None) -> int:
    """Longest sequence. With 'longrope' that of the training: past it, keys in the cache would have to turn anew."""
    context = fields.positive("max_position_embeddings", default)
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.section(key)
        if rope.values.get("rope_type", rope.values.get("type")) in ("longrope", "su"):
            trained = fields if "original_max_position_embeddings" in fields else rope
            return min(context, trained.positive("original_max_position_embeddings", context))
    return context


def _eos(path: Path, values: dict[str, Any], vocabulary: int) -> tuple[int, ...] | None:
    eos = values.get("eos_token_id")
    if eos is None:
        return None
    ids = eos if isinstance(eos, list) else [eos]
    if len(ids) > MOST_EOS:
        raise CheckpointError(f"{path}: 'eos_token_id' has {len(ids)} ids, may have {MOST_EOS}")
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocabulary for i in ids):
        raise CheckpointError(
            f"{path}: 'eos_token_id' is {shown(eos)}, must be an id or a list of ids below {vocabulary}"
        )
    return tuple(ids)


def read_defaults(directory: Path, config: ModelConfig) -> ModelDefaults:
    """What requests get where they are silent, from generation_config.json if there is one. Raises CheckpointError."""
    path = directory / "generation_config.json"
    if not path.exists():
        return ModelDefaults(eos_token_ids=config.eos_token_ids)
    fields = Fields(path, read_json(path))
    sampled = fields.get("do_sample", bool, True)
    defaults = ModelDefaults(
        temperature=fields.get("temperature", float, 1.0) if sampled else 0.0,
        top_p=fields.get("top_p", float, 1.0),
        top_k=fields.get("top_k", int, 0),
        min_p=fields.get("min_p", float, 0.0),
        repetition_penalty=fields.get("repetition_penalty", float, 1.0),
        eos_token_ids=_eos(path, fields.values, config.vocabulary) or config.eos_token_ids,
    )
    try:
        Sampling(
            defaults.temperature,
            defaults.top_p,
            defaults.top_k,
            defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        )
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from None
    return defaults
