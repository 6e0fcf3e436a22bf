"""Families whose layers mix tokens in several ways: by attention, by a recurrence, by both or not at all. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.fields import Fields
from model.recurrent import (
    FULL,
    LINEAR,
    ConvolutionShape,
    DeltaShape,
    RecurrentShape,
    ScanShape,
    read_delta_shape,
    read_kinds,
    read_taps,
)

CONVOLUTION, MLP, EXPERTS = "conv", "mlp", "moe"
MAMBA = {"mamba": LINEAR, LINEAR: LINEAR, "attention": FULL, FULL: FULL}
"""Kinds of Granite's layers, by their names in old config.json and in those of transformers 5."""

NEMOTRON = MAMBA | {MLP: MLP, EXPERTS: EXPERTS}
NEMOTRON_LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}


@dataclass(frozen=True, slots=True)
class Mixers:
    """Recurrences and attention by layer.

    Attributes:
        recurrent: Shape of its recurrence, None without one. () where no layer has one.
        attends: Whether it has attention. () where all layers have.
    """

    recurrent: tuple[RecurrentShape | None, ...] = ()
    attends: tuple[bool, ...] = ()

    @staticmethod
    def by_kind(kinds: Sequence[str], kind: str, shape: RecurrentShape) -> "Mixers":
        """Gives layers of one kind this recurrence, those with full attention that, and others nothing."""
        return Mixers(tuple(shape if one == kind else None for one in kinds), tuple(one == FULL for one in kinds))


def mixers_of_qwen(fields: Fields, layers: int) -> Mixers:
    """Qwen3-Next and Qwen3.5: most layers have a gated delta rule."""
    shape, every = read_delta_shape(fields), fields.positive("full_attention_interval", 4)
    default = [LINEAR if (layer + 1) % every else FULL for layer in range(layers)]
    kinds = read_kinds(fields, layers, "layer_types", {LINEAR: LINEAR, FULL: FULL}, default)
    return Mixers.by_kind(kinds, LINEAR, shape)


def mixers_of_granite(fields: Fields, layers: int) -> Mixers:
    """Granite 4: a layer has a state-space mixer or attention. In its smallest models all have attention."""
    kinds = read_kinds(fields, layers, _key_of_kinds(fields), MAMBA)
    if LINEAR not in kinds:
        return Mixers()
    return Mixers.by_kind(kinds, LINEAR, _read_mamba_shape(fields))


def mixers_of_falcon_h1(fields: Fields, layers: int) -> Mixers:
    """Falcon-H1: each layer has attention and a state-space mixer, which read the same input."""
    by_expand = fields.values.get("mamba_d_ssm", 1024) is None
    shape = _read_mamba_shape(fields, None if by_expand else fields.positive("mamba_d_ssm", 1024))
    return Mixers((shape,) * layers, (True,) * layers)


def _read_mamba_shape(fields: Fields, width: int | None = None) -> ScanShape:
    """Reads the shape of a state-space mixer, which 'mamba_expand' makes wider than the residual stream.

    Args:
        fields: The model's config.json.
        width: Width of the mixer, where that is another.

    Raises:
        CheckpointError: A field is wrong, or heads do not have this width.
    """
    heads = fields.positive("mamba_n_heads", 128)
    width = width or fields.positive("mamba_expand", 2) * fields.positive("hidden_size")
    named = fields.values.get("mamba_d_head")
    dim = max(1, width // heads) if named in (None, "auto") else fields.positive("mamba_d_head")
    if heads * dim != width:
        raise fields.refuse("mamba_n_heads", f"heads of {dim} elements do not make the mixer's width of {width}")
    groups, states = fields.positive("mamba_n_groups", 1), fields.positive("mamba_d_state", 256)
    shape = ScanShape(heads, groups, dim, states, read_taps(fields, "mamba_d_conv", 4))
    return _checked(fields, "mamba_n_groups", shape)


def _checked(fields: Fields, groups: str, shape: ScanShape, activation: str = "hidden_act") -> ScanShape:
    if shape.heads % shape.groups:
        raise fields.refuse(groups, f"{shape.heads} heads cannot be divided into as many groups")
    if fields.get(activation, str, "silu") not in ("silu", "swish"):
        raise fields.refuse(activation, "must be 'silu', the only activation of state-space mixers that Quire serves")
    return shape


def _key_of_kinds(fields: Fields) -> str:
    return "layers_block_type" if "layers_block_type" in fields else "layer_types"


def mixers_of_lfm2(fields: Fields, layers: int) -> Mixers:
    """LFM2: a layer has a short convolution or attention."""
    attend = fields.get("full_attn_idxs", list, list(range(layers)))
    default = [FULL if layer in attend else CONVOLUTION for layer in range(layers)]
    kinds = read_kinds(fields, layers, "layer_types", {CONVOLUTION: CONVOLUTION, FULL: FULL}, default)
    shape = ConvolutionShape(fields.positive("hidden_size"), read_taps(fields, "conv_L_cache", 3))
    return Mixers.by_kind(kinds, CONVOLUTION, shape)


def said_of_lfm2(fields: Fields) -> Fields:
    """Returns LFM2's config.json in the words of other families.

    The width of its MLPs is computed from what 'intermediate_size' says unless config.json forbids it.
    """
    width = fields.positive("block_ff_dim" if "block_ff_dim" in fields else "intermediate_size", 12288)
    if fields.flag("block_auto_adjust_ff_dim", True):
        width = 2 * width // 3
        if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = fields.positive("block_multiple_of", 256)
            width = int(fields.positive_float("block_ffn_dim_multiplier", 1.0) * width)
            width = multiple * -(-width // multiple)
    return said_of_lfm2_moe(fields).having({"intermediate_size": width})


def said_of_lfm2_moe(fields: Fields) -> Fields:
    """Returns the same of LFM2's mixture of experts, whose widths are as they are said."""
    said: dict[str, Any] = {"rms_norm_eps": fields.positive_float("norm_eps", 1e-5)}
    if "tie_embedding" in fields:
        said["tie_word_embeddings"] = fields.flag("tie_embedding")
    return fields.having(said)


def nemotron_kinds(fields: Fields) -> tuple[str, ...]:
    """Returns the kind of each layer of a Nemotron-H: a recurrence, attention, an MLP or experts.

    Raises:
        CheckpointError: A layer is of no known kind, or none has attention.
    """
    if "hybrid_override_pattern" in fields and _key_of_kinds(fields) not in fields:
        key = "hybrid_override_pattern"
        letters = list(fields.get(key, str))
        fields = fields.having({key: letters})
        return read_kinds(fields, len(letters), key, NEMOTRON_LETTERS)
    key = _key_of_kinds(fields)
    return read_kinds(fields, len(fields.get(key, list)), key, NEMOTRON)


def mixers_of_nemotron(fields: Fields, layers: int) -> Mixers:  # noqa: ARG001 - `nemotron_kinds` knows their number
    """Nemotron-H: a layer is a state-space mixer, attention, an MLP or experts, and nothing beside it."""
    shape = ScanShape(
        fields.positive("mamba_num_heads", 128),
        fields.positive("n_groups", 8),
        fields.positive("mamba_head_dim", 64),
        fields.positive("ssm_state_size", 128),
        read_taps(fields, "conv_kernel", 4),
    )
    return Mixers.by_kind(nemotron_kinds(fields), LINEAR, _checked(fields, "n_groups", shape, "mamba_hidden_act"))


def mixers_of_mamba2(fields: Fields, layers: int) -> Mixers:
    """Mamba-2: each layer is a state-space mixer."""
    width, heads = fields.positive("expand", 2) * fields.positive("hidden_size"), fields.positive("num_heads", 128)
    shape = ScanShape(
        heads,
        fields.positive("n_groups", 8),
        fields.positive("head_dim", 64),
        fields.positive("state_size", 128),
        read_taps(fields, "conv_kernel", 4),
    )
    if shape.values != width:
        raise fields.refuse("num_heads", f"heads of {shape.head_dim} elements do not make the mixer's width of {width}")
    return Mixers((_checked(fields, "n_groups", shape),) * layers, (False,) * layers)


def said_of_mamba2(fields: Fields) -> Fields:
    """Returns Mamba-2's config.json in the words of other families. It says nothing of attention, as it has none."""
    eps = fields.positive_float("layer_norm_epsilon", 1e-5)
    return fields.having({"rms_norm_eps": eps, "num_attention_heads": 1})


def mixers_of_kimi(fields: Fields, layers: int) -> Mixers:
    """Kimi Linear: most layers have Kimi Delta Attention, the others latent attention."""
    linear = fields.section("linear_attn_config") if "linear_attn_config" in fields else fields.having({})
    prefix, taps = (
        ("", "short_conv_kernel_size") if "linear_attn_config" in fields else ("linear_", "linear_conv_kernel_dim")
    )
    heads, dim = linear.positive(f"{prefix}num_heads", 32), linear.positive(f"{prefix}head_dim", 128)
    shape = DeltaShape(heads, heads, dim, dim, read_taps(linear, taps, 4), by_row=True)
    default = [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    if "full_attn_layers" in linear:  # counted from 1
        attend = linear.numbers("full_attn_layers", 1, layers)
        default = [FULL if layer + 1 in attend else LINEAR for layer in range(layers)]
    return Mixers.by_kind(
        read_kinds(fields, layers, "layer_types", {LINEAR: LINEAR, FULL: FULL}, default), LINEAR, shape
    )


KIMI_NAMES = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""Keys of a Kimi Linear's config.json, and those of DeepSeek-V3."""


def said_of_kimi(fields: Fields) -> Fields:
    """Returns Kimi Linear's config.json in the words of DeepSeek-V3.

    Raises:
        CheckpointError: Its attention has positions, or its experts are not chosen by sigmoid.
    """
    if not fields.flag("mla_use_nope", True):
        raise fields.refuse("mla_use_nope", "latent attention with positions is not served in this architecture")
    if fields.get("moe_router_activation_func", str, "sigmoid") != "sigmoid":
        raise fields.refuse("moe_router_activation_func", "must be 'sigmoid'")
    if fields.get("hidden_act", str, "silu") not in ("silu", "swish"):
        raise fields.refuse("hidden_act", "must be 'silu'")
    return fields.having({new: fields.values[old] for old, new in KIMI_NAMES.items() if old in fields})


NEMOTRON_NAMES = {
    "attention_head_dim": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}
"""Other keys of a Nemotron-H's config.json, and those that transformers reads them as."""


def said_of_nemotron(fields: Fields) -> Fields:
    """Returns Nemotron-H's config.json in the words of other families; its kinds of layers are their number."""
    said = {new: fields.values[old] for old, new in NEMOTRON_NAMES.items() if old in fields}
    said["rms_norm_eps"] = fields.positive_float("layer_norm_epsilon", 1e-5)
    return fields.having(said | {"num_hidden_layers": len(nemotron_kinds(fields))})


def read_step_limits(fields: Fields) -> tuple[float, float]:
    """Returns the bounds of a state-space mixer's time steps, from 'time_step_limit'.

    transformers writes an infinite bound as an object, since JSON has no number for it.

    Raises:
        CheckpointError: These are no two numbers, the first below the second.
    """
    key = "time_step_limit"
    limits = fields.get(key, list, [0.0, math.inf])
    values = [one.get("__float__") if isinstance(one, Mapping) else one for one in limits]
    bounds = [math.inf if one == "Infinity" else one for one in values]
    numbers = [float(one) for one in bounds if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(bounds) != 2 or len(numbers) != 2 or not 0 <= numbers[0] < numbers[1]:
        raise fields.refuse(key, "must be two numbers, the first at least 0 and below the second")
    return numbers[0], numbers[1]
