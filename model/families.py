"""Shapes of KV cache and attention by architecture: windows of layers, KV heads, defaults of config.json.

Imports no torch. Everything else of a family is read beside its layers, in `model/architectures/`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_manager.layout import KVShape
from model.alibi import said_of_mpt, slopes_of_bloom, slopes_of_mpt
from model.errors import CheckpointError, shown
from model.fields import Fields
from model.hybrids import (
    Mixers,
    mixers_of_falcon_h1,
    mixers_of_granite,
    mixers_of_kimi,
    mixers_of_lfm2,
    mixers_of_mamba2,
    mixers_of_nemotron,
    mixers_of_qwen,
    said_of_kimi,
    said_of_lfm2,
    said_of_lfm2_moe,
    said_of_mamba2,
    said_of_nemotron,
)
from model.latent import LatentShape, read_latent_shape, read_mistral_shape
from model.layer_kv import LayerKV, read_shapes, shared_owners

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"

RENAMED = {"n_embd": "hidden_size", "n_embed": "hidden_size", "n_layer": "num_hidden_layers",
           "n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}  # fmt: skip
"""Old keys of config.json (GPT-2), and their present names."""

ALIASES = {"MPTForCausalLM": "MptForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Names of architectures in config.json whose class transformers has under another name."""

TEXT_ALONE = {"Llama4ForConditionalGeneration": "Llama4ForCausalLM"}
"""Vision-language models of which the text model alone is served, and its architecture."""

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


def layer_types(
    fields: Fields, layers: int, kinds: Callable[[Fields, int], list[str]], near: str = SLIDING
) -> list[str]:
    """Returns the type of attention of each layer.

    Args:
        fields: The model's config.json.
        layers: The number of layers.
        kinds: Gives the types where config.json has no 'layer_types'.
        near: Type of those that do not see everything.

    Raises:
        CheckpointError: 'layer_types' does not name a known type for each layer.
    """
    named = fields.get("layer_types", list) if "layer_types" in fields else kinds(fields, layers)
    if len(named) != layers or not all(kind in (near, FULL) for kind in named):
        raise CheckpointError(
            f"{fields.path}: 'layer_types' is {shown(named)}, must name {near!r} or {FULL!r} for each of {layers} "
            "layers"
        )
    return named


def all_sliding(fields: Fields, layers: int) -> list[str]:  # noqa: ARG001
    return [SLIDING] * layers


def every_other(fields: Fields, layers: int) -> list[str]:  # noqa: ARG001
    """Gemma 2: every other layer has a window, from the first on."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def _all_but_each(default: int) -> Callable[[Fields, int], list[str]]:
    """Each 'sliding_window_pattern'-th layer has no window, the others have one."""

    def kinds(fields: Fields, layers: int) -> list[str]:
        pattern = fields.positive("sliding_window_pattern", default)
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(layers)]

    return kinds


every_fourth, every_sixth = _all_but_each(4), _all_but_each(6)


def types_of_gemma4(fields: Fields, layers: int) -> list[str]:
    """Gemma 4: the last layer has no window, whatever config.json says, as in transformers."""
    return [*layer_types(fields, layers, every_sixth)[:-1], FULL]


def _windows_of_gemma4(fields: Fields, layers: int) -> Windows:
    window = _window(fields, 512)
    return tuple(window if kind == SLIDING else None for kind in types_of_gemma4(fields, layers))


def _kv_of_gemma4(fields: Fields, layers: int, shape: KVShape) -> LayerKV:
    """Layers without a window have heads of their own. The last ones read the KV of an earlier layer of their type."""
    kinds = types_of_gemma4(fields, layers)
    shapes = read_shapes(fields, [kind == FULL for kind in kinds], shape)
    return LayerKV(shapes, shared_owners(fields, kinds, shapes))


def _last_ones(fields: Fields, layers: int) -> list[str]:
    """Qwen: layers from 'max_window_layers' on have a window."""
    first = fields.get("max_window_layers", int, 28)
    return [FULL if layer < first else SLIDING for layer in range(layers)]


def rotated_layers(fields: Fields, layers: int) -> list[bool]:
    """SmolLM3, Llama 4: whether each layer has rotary positions; 'no_rope_layers' has a 1 for those that have some."""
    every = fields.positive("no_rope_layer_interval", 4)
    named = fields.get("no_rope_layers", list, []) or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(named) < layers or not all(one in (0, 1) for one in named):
        raise fields.refuse("no_rope_layers", f"must have a 0 or 1 for each of {layers} layers")
    return [one == 1 for one in named[:layers]]


def _where_not_rotated(fields: Fields, layers: int) -> list[str]:
    return [FULL if rotated else SLIDING for rotated in rotated_layers(fields, layers)]


def _windows_of_smollm3(fields: Fields, layers: int) -> Windows:
    if not fields.flag("use_sliding_window"):
        return _everything(fields, layers)
    return _by_type(None, _where_not_rotated)(fields, layers)


def _windows_of_llama4(fields: Fields, layers: int) -> Windows:
    """Llama 4: layers with rotary positions see a chunk, the others everything."""
    rotated = rotated_layers(fields, layers)
    if fields.values.get("attention_chunk_size", 8192) is None:
        return _everything(fields, layers)
    chunk = fields.positive("attention_chunk_size", 8192)
    kinds = layer_types(fields, layers, lambda *_: [CHUNKED if turned else FULL for turned in rotated], CHUNKED)
    return tuple(chunk if kind == CHUNKED else None for kind in kinds)


def _odd_ones(fields: Fields, layers: int) -> list[str]:
    """Qwen 2 MoE: every other layer up to 'max_window_layers' has a window, from the first on."""
    last = fields.get("max_window_layers", int, 28)
    return [SLIDING if layer % 2 == 0 and layer < last else FULL for layer in range(layers)]


def _kv_heads(fields: Fields, heads: int) -> int:
    return fields.positive("num_key_value_heads", heads)


def _kv_heads_of_falcon(fields: Fields, heads: int) -> int:
    if fields.flag("new_decoder_architecture"):
        return fields.positive("num_kv_heads", heads)
    return 1 if fields.flag("multi_query", True) else heads


def _kv_heads_as_heads(fields: Fields, heads: int) -> int:  # noqa: ARG001
    return heads


def _one_kv_head(fields: Fields, heads: int) -> int:  # noqa: ARG001
    """Latent attention: all heads read one key."""
    return 1


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
        chunked: Whether windows are chunks, see `LayerGroup`.
        unscaled: Whether scores have no factor.
        multiplied: Whether 'attention_multiplier' is that scale.
        slopes: Returns the slope of each head's bias by distance (ALiBi). None: scores have none.
        key_multiplied: Whether 'key_multiplier' is a factor of keys, which is one of the scores.
        norm_eps: Value of 'rms_norm_eps'.
        mixers: Returns what mixes the tokens of each layer. None: all have attention.
        said: Returns config.json in the words of other families. None: it is in them.
        latent: Reads the shape of latent attention. None: the family has none.
        by_layer: Reads what layers differ in, from config.json, the number of layers and the KV of most of them. None:
            all layers have KV of one shape each.
        soft_cap: Value of 'attn_logit_softcapping'. None: the family has no soft cap, whatever its config.json holds.
    """

    windows: Callable[[Fields, int], Windows] = _everything
    kv_heads: Callable[[Fields, int], int] = _kv_heads
    head_dim: int | None = None
    context: int | None = None
    tied: bool = False
    scaled: bool = False
    chunked: bool = False
    unscaled: bool = False
    multiplied: bool = False
    slopes: Callable[[Fields, int], tuple[float, ...]] | None = None
    key_multiplied: bool = False
    norm_eps: float = 1e-6
    soft_cap: float | None = None
    mixers: Callable[[Fields, int], Mixers] | None = None
    said: Callable[[Fields], Fields] | None = None
    latent: Callable[[Fields], LatentShape] | None = None
    by_layer: Callable[[Fields, int, KVShape], LayerKV] | None = None


LIKE_LLAMA = Family()
FAMILIES = {
    "BloomForCausalLM": Family(kv_heads=_kv_heads_as_heads, context=2048, tied=True, slopes=slopes_of_bloom),
    "CohereForCausalLM": Family(tied=True),
    "Cohere2ForCausalLM": Family(_by_type(4096, every_fourth), tied=True),
    "DeepseekV2ForCausalLM": Family(kv_heads=_one_kv_head, latent=read_latent_shape),
    "DeepseekV3ForCausalLM": Family(kv_heads=_one_kv_head, latent=read_latent_shape),
    "Ernie4_5ForCausalLM": Family(head_dim=128, tied=True, norm_eps=1e-5),
    "Ernie4_5_MoeForCausalLM": Family(tied=True, norm_eps=1e-5),
    "Exaone4ForCausalLM": Family(_by_type(4096, every_fourth), norm_eps=1e-5),
    "Glm4ForCausalLM": Family(head_dim=128, norm_eps=1.5625e-7),
    "Glm4MoeForCausalLM": Family(norm_eps=1e-5),
    "Glm4MoeLiteForCausalLM": Family(kv_heads=_one_kv_head, norm_eps=1e-5, latent=read_latent_shape),
    "GptOssForCausalLM": Family(_by_type(128, every_other), head_dim=64, norm_eps=1e-5),
    "GraniteForCausalLM": Family(multiplied=True),
    "GraniteMoeForCausalLM": Family(multiplied=True),
    "GraniteMoeHybridForCausalLM": Family(multiplied=True, mixers=mixers_of_granite),
    "HunYuanDenseV1ForCausalLM": Family(norm_eps=1e-5),
    "LlamaForCausalLM": LIKE_LLAMA,
    "Llama4ForCausalLM": Family(_windows_of_llama4, head_dim=128, context=131072, norm_eps=1e-5, chunked=True),
    "Mistral4ForCausalLM": Family(kv_heads=_one_kv_head, latent=read_mistral_shape),
    "MiniMaxM2ForCausalLM": Family(head_dim=128),
    "MistralForCausalLM": Family(_everywhere(4096)),
    "MinistralForCausalLM": Family(_by_type(4096, all_sliding)),
    "MixtralForCausalLM": Family(_everywhere(None), norm_eps=1e-5),
    "Qwen2ForCausalLM": Family(_where_used(_last_ones)),
    "Qwen2MoeForCausalLM": Family(_where_used(_odd_ones)),
    "Qwen3ForCausalLM": Family(_where_used(_last_ones), head_dim=128),
    "Qwen3NextForCausalLM": Family(head_dim=256, mixers=mixers_of_qwen),
    "Qwen3_5ForCausalLM": Family(head_dim=256, mixers=mixers_of_qwen),
    "Qwen3_5MoeForCausalLM": Family(head_dim=256, mixers=mixers_of_qwen),
    "Qwen3MoeForCausalLM": Family(_where_used(all_sliding)),
    "GemmaForCausalLM": Family(head_dim=256, tied=True),
    "Gemma2ForCausalLM": Family(_by_type(4096, every_other), head_dim=256, tied=True, scaled=True, soft_cap=50.0),
    "Gemma3ForCausalLM": Family(_by_type(4096, every_sixth), head_dim=256, tied=True, scaled=True),
    "Gemma4ForCausalLM": Family(
        _windows_of_gemma4, head_dim=256, context=131072, tied=True, unscaled=True, by_layer=_kv_of_gemma4
    ),
    "GPT2LMHeadModel": Family(kv_heads=_kv_heads_as_heads, tied=True),
    "GPTJForCausalLM": Family(kv_heads=_kv_heads_as_heads, context=2048),
    "GPTNeoXForCausalLM": Family(kv_heads=_kv_heads_as_heads),
    "OPTForCausalLM": Family(kv_heads=_kv_heads_as_heads, tied=True),
    "Olmo2ForCausalLM": Family(norm_eps=1e-5),
    "Olmo3ForCausalLM": Family(_by_type(4096, every_fourth), norm_eps=1e-5),
    "PhiForCausalLM": LIKE_LLAMA,
    "Phi3ForCausalLM": Family(_everywhere(None), norm_eps=1e-5),
    "PhimoeForCausalLM": Family(_everywhere(None), norm_eps=1e-5),
    "SeedOssForCausalLM": Family(head_dim=128),
    "SmolLM3ForCausalLM": Family(_windows_of_smollm3, tied=True),
    "StableLmForCausalLM": LIKE_LLAMA,
    "Starcoder2ForCausalLM": Family(_everywhere(None), tied=True),
    "FalconH1ForCausalLM": Family(key_multiplied=True, norm_eps=1e-5, mixers=mixers_of_falcon_h1),
    "KimiLinearForCausalLM": Family(
        kv_heads=_one_kv_head,
        context=1048576,
        norm_eps=1e-5,
        latent=read_latent_shape,
        mixers=mixers_of_kimi,
        said=said_of_kimi,
    ),
    "Lfm2ForCausalLM": Family(context=128000, tied=True, mixers=mixers_of_lfm2, said=said_of_lfm2),
    "Lfm2MoeForCausalLM": Family(context=128000, tied=True, mixers=mixers_of_lfm2, said=said_of_lfm2_moe),
    "Mamba2ForCausalLM": Family(context=262144, mixers=mixers_of_mamba2, said=said_of_mamba2),
    "MptForCausalLM": Family(
        kv_heads=_kv_heads_as_heads, context=2048, tied=True, multiplied=True, slopes=slopes_of_mpt, said=said_of_mpt
    ),
    "NemotronHForCausalLM": Family(head_dim=128, mixers=mixers_of_nemotron, said=said_of_nemotron),
    "FalconForCausalLM": Family(kv_heads=_kv_heads_of_falcon, context=2048, tied=True),
}
"""All text models that are served, by the name of their architecture."""


def family_of(architecture: str) -> Family:
    return FAMILIES.get(architecture, LIKE_LLAMA)
