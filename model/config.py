"""config.json of a model directory, or what a GGUF file says in its place. No torch."""

from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from cache_manager.layout import KVLayout, KVShape, LayerGroup, layer_groups
from model.errors import MOST_SHOWN, CheckpointError, shown
from model.families import ALIASES, FAMILIES, RENAMED, TEXT_ALONE, Family, family_of
from model.fields import MOST_OF, Fields, read_json
from model.gguf.config import read_gguf_config
from model.gguf.split import SUFFIX, is_gguf
from model.hybrids import Mixers
from model.latent import LatentShape
from model.layer_kv import LayerKV
from model.multimodal import NANO, Vision, read_text
from model.nano import is_nano, read_nano_text, read_nano_vision
from model.recurrent import RecurrentShape
from model.vision_families import KINDS

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_BYTES = {**{name: (size, 0) for name, size in ELEMENT_BYTES.items()}, "int8": (1, 4), "fp8": (1, 4)}
"""By dtype of the KV pool: bytes of an element, and of the scale of each token and head."""


STORED_FORMATS: tuple[str, ...] = ("awq", "compressed-tensors", "fp8", "gptq", "mxfp4")
"""`quant_method` of the quantized checkpoints that are served; `model.weight_formats.registry.STORED` has the same."""

NO_KV = KVShape(1, 16, 16)  # of pages that stand for tokens of a model without attention: a page cannot be empty
MOST_EOS = 256  # ids that end a sequence; each step compares what it draws with all of them


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Facts of a model that all packages need.

    Attributes:
        context: Longest sequence, in tokens.
        windows: Tokens that a token sees, itself included, by layer; None for all before it.
        chunked: Whether windows are chunks, see `LayerGroup`.
        scale: Factor of attention's scores, which `soft_cap` then bounds by its tanh. None leaves them.
        slopes: What a score of each head loses for each token between query and key (ALiBi). () for nothing.
        dtype: Name of the dtype of the checkpoint's weights.
        fields: All of config.json, for what only the architecture knows. For a vision-language model, what its text
            model's would hold.
        vision: None for a model of text alone.
        first_position: Position that rope gives the first token.
        latent: Shape of latent attention. None for a model with other attention.
        recurrent: Shape of each layer's recurrence, None for a layer without one. () where none has one.
        attends: Whether each layer has attention. () where all have.
        kv_shapes: KV of each layer. () where all layers have `kv_heads` of `head_dim`.
        kv_layers: By layer, number of the layer whose KV it reads: an earlier one has written it. () where each layer
            has its own.
        quantization: `quantization_config` of a checkpoint whose weights are stored in a format of their own.
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
    latent: LatentShape | None = None
    recurrent: tuple[RecurrentShape | None, ...] = ()
    attends: tuple[bool, ...] = ()
    kv_shapes: tuple[KVShape, ...] = ()
    kv_layers: tuple[int, ...] = ()
    slopes: tuple[float, ...] = ()
    chunked: bool = False
    quantization: Fields | None = field(default=None, repr=False, compare=False)

    @property
    def rotary_axes(self) -> int:
        """Axes of rotary positions, see `Vision`."""
        return 1 if self.vision is None else self.vision.rotary_axes

    @property
    def stored_format(self) -> str:
        """Name of the format that the checkpoint's weights are stored in; empty for plain ones."""
        return "" if self.quantization is None else self.quantization.get("quant_method", str)

    @property
    def layer_shapes(self) -> tuple[KVShape, ...]:
        """KV of each layer, as if each had its own."""
        shape = KVShape(self.kv_heads, self.head_dim, self.head_dim) if self.latent is None else self.latent.kv
        return self.kv_shapes or (shape,) * self.layers

    def of_layer(self, number: int) -> "ModelConfig":
        """Returns the configuration of a model whose layers all have the KV of this layer."""
        shape = self.layer_shapes[number]
        return replace(self, kv_heads=shape.heads, head_dim=shape.key_dim, kv_shapes=())

    def kv_layout(self, page_size: int, dtype: str) -> KVLayout:
        """Returns the layout of the KV cache in a pool of this dtype."""
        element, scale = KV_BYTES[dtype]
        attends, owners = self.attends or (True,) * self.layers, self.kv_layers or range(self.layers)
        own = [layer for layer in range(self.layers) if attends[layer] and owners[layer] == layer]
        if own:
            windows = [self.windows[layer] for layer in own]
            groups = layer_groups([self.layer_shapes[layer] for layer in own], windows, self.chunked)
            numbered = tuple(replace(group, layers=tuple(own[i] for i in group.layers)) for group in groups)
        else:  # states are found by the pages of a prompt's tokens, which hold nothing then
            numbered = (LayerGroup((0,), NO_KV),)
        states = tuple(one.state(layer) for layer, one in enumerate(self.recurrent) if one is not None)
        return KVLayout(numbered, element, page_size, scale, states)


def read_config(directory: Path) -> ModelConfig:
    """Reads config.json; keys in the Hub's classic style or transformers 5's. Raises CheckpointError.

    Args:
        directory: Model directory, or GGUF file, whose metadata says what config.json would.
    """
    if is_gguf(directory):
        fields = Fields(directory, read_gguf_config(directory))
        stored = fields.section("quantization_config") if "quantization_config" in fields else None
        return replace(_read(fields.get("architectures", list)[0], fields), quantization=stored)
    path = directory / "config.json"
    if not path.exists() and (files := sorted(directory.glob(f"*{SUFFIX}"))):
        raise CheckpointError(f"{path} is missing: --model {files[0]} serves that file without one")
    values = read_json(path)
    fields = Fields(path, {RENAMED.get(key, key): value for key, value in values.items()})
    architecture = NANO if is_nano(fields) else _architecture(fields)
    quantization = _quantization(fields)
    return replace(_read_any(architecture, fields, directory), quantization=quantization)


def _read_any(architecture: str, fields: Fields, directory: Path) -> ModelConfig:
    """Reads the config of a text or a vision-language model. Raises CheckpointError."""
    if architecture == NANO:
        text = _read(NANO, read_nano_text(fields, directory))
        return replace(text, vision=read_nano_vision(fields, directory))
    if architecture in TEXT_ALONE:
        return _read(TEXT_ALONE[architecture], _text_alone(fields))
    kind = KINDS.get(architecture)
    if kind is None:
        return _read(architecture, fields)
    name, text_fields = read_text(fields, kind)
    return replace(
        _read(name, text_fields),
        architecture=architecture,
        vision=kind.reader(fields, kind, name),
        first_position=kind.first_position,
    )


def _text_alone(fields: Fields) -> Fields:
    """Returns the config of a vision-language model's text model. Raises CheckpointError where there is none."""
    if "text_config" not in fields:
        raise CheckpointError(f"{fields.path}: 'text_config' is missing")
    whole = ("dtype", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    said = {key: fields.values[key] for key in whole if fields.values.get(key) is not None}
    return Fields(fields.path, fields.section("text_config").values | said)


def _quantization(fields: Fields) -> Fields | None:
    """Returns 'quantization_config', None where there is none. Raises CheckpointError unless its format is served."""
    if "quantization_config" not in fields:
        return None
    section = fields.section("quantization_config")
    method = section.values.get("quant_method")
    if method not in STORED_FORMATS:
        raise CheckpointError(
            f"{fields.path}: 'quantization_config' is set: weights in the format {shown(method)} are not served; "
            "use the checkpoint that it was made from, with --quantization int8 for weights in 8 bits"
        )
    return section


def _architecture(fields: Fields) -> str:
    """Returns the architecture that config.json names.

    Comes before all other fields: those of an architecture that is not served have other names.

    Raises CheckpointError unless it is one that is served.
    """
    names = fields.get("architectures", list)
    if len(names) != 1 or not isinstance(names[0], str):
        raise fields.refuse("architectures", "must name one architecture")
    name, served = ALIASES.get(names[0], names[0]), (*FAMILIES, *TEXT_ALONE, *KINDS)
    if name not in served:
        near = ", ".join(get_close_matches(name[:MOST_SHOWN], served, cutoff=0.0))
        raise fields.refuse("architectures", f"which is not served; the nearest that are: {near}")
    return name


def _read(architecture: str, fields: Fields) -> ModelConfig:
    """Reads the config of a text model. Raises CheckpointError."""
    path, family = fields.path, family_of(architecture)
    fields = fields if family.said is None else family.said(fields)
    hidden, heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    layers, context = fields.positive("num_hidden_layers"), _context(fields, family.context)
    kv_heads = family.kv_heads(fields, heads)
    _check_heads(path, heads, kv_heads)
    head_dim = fields.positive("head_dim", family.head_dim or max(1, hidden // heads))
    dtype = str(fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32")
    if dtype not in ELEMENT_BYTES:
        raise CheckpointError(f"{path}: dtype {shown(dtype)} is not supported, use one of {', '.join(ELEMENT_BYTES)}")
    latent = None if family.latent is None else family.latent(fields)
    by_layer = (
        LayerKV() if family.by_layer is None else family.by_layer(fields, layers, KVShape(kv_heads, head_dim, head_dim))
    )
    for shape in by_layer.shapes:
        _check_heads(path, heads, shape.heads)
    mixers = Mixers() if family.mixers is None else family.mixers(fields, layers)
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
        scale=_scale(fields, family, head_dim) if latent is None else latent.scale,
        soft_cap=fields.positive_float("attn_logit_softcapping", family.soft_cap) if capped else None,
        tied_embeddings=fields.flag("tie_word_embeddings", family.tied),
        dtype=dtype,
        eos_token_ids=read_end_ids(path, fields.values, fields.positive("vocab_size")) or (),
        fields=fields,
        latent=latent,
        recurrent=mixers.recurrent,
        attends=mixers.attends,
        kv_shapes=by_layer.shapes,
        kv_layers=by_layer.owners,
        slopes=() if family.slopes is None else family.slopes(fields, heads),
        chunked=family.chunked,
    )


def _check_heads(path: Path, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise CheckpointError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads evenly")


def _scale(fields: Fields, family: Family, head_dim: int) -> float:
    if family.unscaled:
        return 1.0
    if family.multiplied:
        return fields.positive_float("attention_multiplier", 1.0)
    factor = fields.positive_float("key_multiplier", 1.0) if family.key_multiplied else 1.0
    return factor * (fields.positive_float("query_pre_attn_scalar", 256.0) if family.scaled else head_dim) ** -0.5


def _context(fields: Fields, default: int | None) -> int:
    """Returns the longest sequence in tokens.

    With 'longrope' it is that of the training: past it, keys in the cache would have to be rotated again. With 'yarn'
    it is that of the training times the factor, as in vLLM: published instructions add no longer one.
    """
    context = fields.positive("max_position_embeddings", default)
    for key in ("rope_parameters", "rope_scaling"):
        rope = fields.section(key)
        kind = rope.values.get("rope_type", rope.values.get("type"))
        if kind == "yarn":
            length = rope.positive("original_max_position_embeddings", context)
            stretched = int(length * rope.positive_float("factor", 1.0))
            context = max(context, min(stretched, MOST_OF["max_position_embeddings"]))
        if kind in ("longrope", "su"):
            trained = fields if "original_max_position_embeddings" in fields else rope
            return min(context, trained.positive("original_max_position_embeddings", context))
    return context


def read_end_ids(path: Path, values: dict[str, Any], vocabulary: int) -> tuple[int, ...] | None:
    """Reads 'eos_token_id' of a file's values; None without one.

    Raises:
        CheckpointError: It is no id below `vocabulary`, and no list of some.
    """
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
