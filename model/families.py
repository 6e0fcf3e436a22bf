"""Shapes of KV cache and attention by architecture: windows of layers, KV heads, defaults of config.json.

Imports no torch. Everything else of a family is read beside its layers, in `model/architectures/`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.errors import CheckpointError, shown
from model.fields import Fields

SLIDING, FULL = "sliding_attention", "full_attention"

RENAMED = {"n_embd": "hidden_size", "n_embed": "hidden_size", "n_layer": "num_hidden_layers",
           "n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}  # fmt: skip
"""Old keys of config.json (GPT-2), and their present names."""

Windows = Sequence[int | None]


def _everything(fields: Fields, layers: int) -> Windows:  # noqa: ARG001
    return (None,) * layers


def _everywhere(default: int | None) -> Callable[[Fields, int], Windows]:
    """Gives all layers 'sliding_window'; null is no window."""

    def windows(fields: Fields, layers: int) -> Windows:
        return (_window(fields, default),) * layers

    return windows


def _by_type(default: int | None, kinds: Callable[[Fields, int], list[str]]) -> Callable[[Fields, int], Windows]:
    """'layer_types' names the layers with a window. `kinds` gives the types where config.json does not."""

    def windows(fields: Fields, layers: int) -> Windows:
        window = _window(fields, default)
        return tuple(window if kind == SLIDING else None for kind in layer_types(fields, layers, kinds))

    return windows


def _where_used(kinds: Callable[[Fields, int], list[str]]) -> Callable[[Fields, int], Windows]:
    """Qwen: windows count only with 'use_sliding_window'."""

    def windows(fields: Fields, layers: int) -> Windows:
        if not fields.flag("use_sliding_window"):
            return _everything(fields, layers)
        return _by_type(4096, kinds)(fields, layers)

    return windows


def _window(fields: Fields, default: int | None) -> int | None:
    if fields.values.get("sliding_window", default) is None:
        return None
    return fields.positive("sliding_window", default)


def layer_types(fields: Fields, layers: int, kinds: Callable[[Fields, int], list[str]]) -> list[str]:
    """Returns the type of attention of each layer.

    Args:
        fields: The model's config.json.
        layers: The number of layers.
        kinds: Gives the types where config.json has no 'layer_types'.

    Raises:
        CheckpointError: 'layer_types' does not name a known type for each layer.
    """
    named = fields.get("layer_types", list, kinds(fields, layers))
    if len(named) != layers or not all(kind in (SLIDING, FULL) for kind in named):
        raise CheckpointError(
            f"{fields.path}: 'layer_types' is {shown(named)}, must name {SLIDING!r} or {FULL!r} for each of {layers} "
            "layers"
        )
    return named


def all_sliding(fields: Fields, layers: int) -> list[str]:  # noqa: ARG001
    return [SLIDING] * layers


def every_other(fields: Fields, layers: int) -> list[str]:  # noqa: ARG001
    """Gemma 2: every other layer has a window, from the first on."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def every_sixth(fields: Fields, layers: int) -> list[str]:
    """Gemma 3: each 'sliding_window_pattern'-th layer has no window, the others have one."""
    pattern = fields.positive("sliding_window_pattern", 6)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]


def _last_ones(fields: Fields, layers: int) -> list[str]:
    """Qwen: layers from 'max_window_layers' on have a window."""
    first = fields.get("max_window_layers", int, 28)
    return [FULL if layer < first else SLIDING for layer in range(layers)]


def _kv_heads(fields: Fields, heads: int) -> int:
    return fields.positive("num_key_value_heads", heads)


def _kv_heads_of_falcon(fields: Fields, heads: int) -> int:
    if fields.flag("new_decoder_architecture"):
        return fields.positive("num_kv_heads", heads)
    return 1 if fields.flag("multi_query", True) else heads


def _kv_heads_as_heads(fields: Fields, heads: int) -> int:  # noqa: ARG001
    return heads


@dataclass(frozen=True, slots=True)
class Family:
    """Shape of a family's attention, with the values that hold where config.json is silent.

    Attributes:
        windows: Returns the window of each layer; None is no window.
        kv_heads: Returns the number of KV heads.
        head_dim: Elements of a head. None: hidden size / heads.
        context: Positions of the model. None: config.json must say.
        tied: Whether the output layer shares the embedding's weight.
        scaled: Whether 'query_pre_attn_scalar' sets the scale of attention's scores.
        norm_eps: Value of 'rms_norm_eps'.
        soft_cap: Value of 'attn_logit_softcapping'. None: the family has no soft cap, whatever its config.json holds.
    """

    windows: Callable[[Fields, int], Windows] = _everything
    kv_heads: Callable[[Fields, int], int] = _kv_heads
    head_dim: int | None = None
    context: int | None = None
    tied: bool = False
    scaled: bool = False
    norm_eps: float = 1e-6
    soft_cap: float | None = None


LIKE_LLAMA = Family()
FAMILIES = {
    "LlamaForCausalLM": LIKE_LLAMA,
    "MistralForCausalLM": Family(_everywhere(4096)),
    "MinistralForCausalLM": Family(_by_type(4096, all_sliding)),
    "MixtralForCausalLM": Family(_everywhere(None), norm_eps=1e-5),
    "Qwen2ForCausalLM": Family(_where_used(_last_ones)),
    "Qwen3ForCausalLM": Family(_where_used(_last_ones), head_dim=128),
    "Qwen3MoeForCausalLM": Family(_where_used(all_sliding)),
    "GemmaForCausalLM": Family(head_dim=256, tied=True),
    "Gemma2ForCausalLM": Family(_by_type(4096, every_other), head_dim=256, tied=True, scaled=True, soft_cap=50.0),
    "Gemma3ForCausalLM": Family(_by_type(4096, every_sixth), head_dim=256, tied=True, scaled=True),
    "GPT2LMHeadModel": Family(kv_heads=_kv_heads_as_heads, tied=True),
    "GPTNeoXForCausalLM": Family(kv_heads=_kv_heads_as_heads),
    "OPTForCausalLM": Family(kv_heads=_kv_heads_as_heads, tied=True),
    "Olmo2ForCausalLM": Family(norm_eps=1e-5),
    "PhiForCausalLM": LIKE_LLAMA,
    "Phi3ForCausalLM": Family(_everywhere(None), norm_eps=1e-5),
    "Starcoder2ForCausalLM": Family(_everywhere(None), tied=True),
    "FalconForCausalLM": Family(kv_heads=_kv_heads_of_falcon, context=2048, tied=True),
}
"""All text models that are served, by the name of their architecture."""


def family_of(architecture: str) -> Family:
    return FAMILIES.get(architecture, LIKE_LLAMA)
