"""Rotary position embeddings (Su et al., 2021), halves rotated, as Hugging Face lays out heads, and the ways in which
config files stretch them to longer contexts.

A key keeps the angle with which it was written, so nothing here depends on how long a sequence is: where a model's
own rule does ('dynamic', and 'longrope' past the length of its training), it is refused, or the context ends there.
"""

import math

import torch
from torch import Tensor

from model.errors import CheckpointError, shown
from model.fields import LEAST_FLOAT, MOST_FLOAT, Fields
from model.forward import CosSin

MOST_ANGLES = 2**28  # of a table, 1 GiB in float32: 4 million positions of heads of 128


class Rope:
    """Angles by position. frequencies: float32 [pairs], radians a position. scale: of both cos and sin. first: what the
    first position of a sequence counts as.

    Only the first 2 x pairs elements of a head are rotated. Raises CheckpointError for a table that is too large.
    """

    def __init__(
        self,
        frequencies: Tensor,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
        first: int = 0,
    ) -> None:
        if context * len(frequencies) > MOST_ANGLES:
            raise CheckpointError(
                f"config.json: 'max_position_embeddings' is {context} with {len(frequencies)} rotated pairs in a head; "
                f"their product may be at most {MOST_ANGLES}"
            )
        angles = torch.outer(torch.arange(first, first + context, dtype=torch.float32), frequencies)
        self._cos = (angles.cos() * scale).to(device, dtype)
        self._sin = (angles.sin() * scale).to(device, dtype)

    @property
    def tables(self) -> CosSin:
        """cos and sin, each [context, pairs]."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> CosSin:
        """See `model.forward.RotaryEmbedding`. Turns by the position in the sequence alone, axis 0."""
        return self._cos[positions[0]].unsqueeze(1), self._sin[positions[0]].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [tokens, heads, head_dim], cos and sin from `Rope.at`."""
    pairs = cos.shape[-1]
    low, high, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def frequencies(dims: int, theta: float) -> Tensor:
    """float32 [dims / 2]."""
    return 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)


def read_rope(fields: Fields, head_dim: int, theta: float = 10000.0, partial: float = 1.0) -> tuple[Tensor, float]:
    """`frequencies` and `scale` of a model's `Rope`, from 'rope_parameters' (transformers 5), or from 'rope_theta' and
    'rope_scaling', which wins where both are there. theta, partial: where nothing is said. Raises CheckpointError.
    """
    rope = fields.section("rope_scaling")
    rope = rope if rope.values else fields.section("rope_parameters")
    theta = (rope if "rope_theta" in rope else fields).positive_float("rope_theta", theta)
    holder = rope if "partial_rotary_factor" in rope else fields
    dims = int(head_dim * holder.positive_float("partial_rotary_factor", partial))
    if dims % 2 or not 2 <= dims <= head_dim:
        raise CheckpointError(
            f"{fields.path}: {dims} of the {head_dim} elements of a head are to be rotated; must be an even number"
        )
    kind = rope.get("rope_type", str, rope.get("type", str, "default"))
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise CheckpointError(f"{fields.path}: rope type {shown(kind)} is not supported; supported: {known}")
    return KINDS[kind](fields, rope, frequencies(dims, theta), theta)


def _default(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    return plain, 1.0


def _linear(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Chen et al., Position Interpolation, 2023."""
    return plain / rope.positive_float("factor"), 1.0


def _llama3(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Llama 3.1: slow turns are stretched, fast ones are not, those between in part."""
    factor = rope.positive_float("factor")
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low >= high:
        raise rope.refuse("low_freq_factor", f"must be below 'high_freq_factor', which is {high}")
    turns = rope.positive("original_max_position_embeddings") * plain / (2 * math.pi)  # over the length of the training
    part = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * part + plain / factor * (1 - part), 1.0


def _yarn(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:
    """Peng et al., YaRN, 2023, with the names and defaults of transformers."""
    trained = rope.positive("original_max_position_embeddings", fields.positive("max_position_embeddings"))
    factor = rope.positive_float("factor", fields.positive("max_position_embeddings") / trained)
    dims = 2 * len(plain)
    if theta <= 1:
        raise CheckpointError(f"{fields.path}: 'rope_theta' is {theta}, with 'yarn' it must be above 1")

    def place(turns: float) -> float:
        """Which pair makes so many turns over the length of the training."""
        return dims * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(rope.positive_float("beta_fast", 32.0)), place(rope.positive_float("beta_slow", 1.0))
    if rope.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dims - 1)
    stretched = ((torch.arange(len(plain), dtype=torch.float32) - first) / max(last - first, 0.001)).clamp(0, 1)
    scale = rope.values.get("attention_factor")
    if scale is None and "mscale" in rope and "mscale_all_dim" in rope:
        above, below = rope.positive_float("mscale"), rope.positive_float("mscale_all_dim")
        return plain / factor * stretched + plain * (1 - stretched), _warmth(factor, above) / _warmth(factor, below)
    scale = _warmth(factor) if scale is None else rope.positive_float("attention_factor")
    return plain / factor * stretched + plain * (1 - stretched), scale


def _warmth(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Ding et al., LongRoPE, 2024: its short factors. `ModelConfig.context` ends where the long ones would begin."""
    short = rope.numbers("short_factor", LEAST_FLOAT, MOST_FLOAT)
    if len(short) != len(plain):
        raise rope.refuse("short_factor", f"must be {len(plain)} numbers above 0")
    context = fields.positive("max_position_embeddings")
    holder = fields if "original_max_position_embeddings" in fields else rope
    trained = holder.positive("original_max_position_embeddings", context)
    factor = rope.positive_float("factor", context / trained)
    warm = math.sqrt(1 + math.log(factor) / math.log(max(trained, 2))) if factor > 1 else 1.0
    return plain / torch.tensor(short, dtype=torch.float32), rope.positive_float("attention_factor", warm)


KINDS = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
