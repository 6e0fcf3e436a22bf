"""Rotary position embeddings (Su et al., 2021) with rotated halves, as Hugging Face lays out heads.

Includes the rules by which config files stretch them to longer contexts. A cached key keeps the angle with which it was
written, so no angle may depend on the length of the sequence. Rules that do are refused ('dynamic'), or the context
ends where they begin ('longrope').
"""

import math

import torch
from torch import Tensor

from model.errors import CheckpointError, shown
from model.fields import LEAST_FLOAT, MOST_FLOAT, Fields
from model.forward import CosSin

MOST_ANGLES = 2**28  # angles of a table, 1 GiB in float32: 4 million positions of heads of 128


class Rope:
    """A table of rotary angles by position.

    Only the first 2 x pairs elements of a head are rotated.
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
        """Computes the table.

        Args:
            frequencies: [pairs] float32. Radians a position.
            context: Positions in the table.
            dtype: Type of the table.
            device: Device of the table.
            scale: Factor of both cosines and sines.
            first: Number of a sequence's first position.

        Raises:
            CheckpointError: The table has more than `MOST_ANGLES` angles.
        """
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
        """The tables of cosines and sines, each [context, pairs]."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> CosSin:
        """Looks up angles by axis 0, the position in the sequence. See `model.forward.RotaryEmbedding`."""
        return self._cos[positions[0]].unsqueeze(1), self._sin[positions[0]].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads.

    Args:
        x: [tokens, heads, head_dim].
        cos: [tokens, 1, pairs], from `Rope.at`.
        sin: Likewise.
    """
    pairs = cos.shape[-1]
    low, high, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def frequencies(dims: int, theta: float) -> Tensor:
    """Returns the plain frequencies of `dims` rotated elements, [dims / 2] float32."""
    return 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)


def read_rope(fields: Fields, head_dim: int, theta: float = 10000.0, partial: float = 1.0) -> tuple[Tensor, float]:
    """Reads the `frequencies` and `scale` of a model's `Rope`.

    Reads 'rope_parameters' (transformers 5), or 'rope_theta' and 'rope_scaling', which wins where both exist.

    Args:
        fields: The model's config.json.
        head_dim: Elements of a head.
        theta: Base where the config names none.
        partial: Rotated part of a head where the config names none.

    Raises:
        CheckpointError: The rule is not supported, or a value is out of its range.
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
    """Position interpolation (Chen et al., 2023)."""
    return plain / rope.positive_float("factor"), 1.0


def _llama3(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Llama 3.1: divides low frequencies by the factor, keeps high ones, and blends those between."""
    factor = rope.positive_float("factor")
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low >= high:
        raise rope.refuse("low_freq_factor", f"must be below 'high_freq_factor', which is {high}")
    turns = rope.positive("original_max_position_embeddings") * plain / (2 * math.pi)  # over the length of the training
    part = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * part + plain / factor * (1 - part), 1.0


def _yarn(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023), with the names and defaults of transformers."""
    trained = rope.positive("original_max_position_embeddings", fields.positive("max_position_embeddings"))
    factor = rope.positive_float("factor", fields.positive("max_position_embeddings") / trained)
    dims = 2 * len(plain)
    if theta <= 1:
        raise CheckpointError(f"{fields.path}: 'rope_theta' is {theta}, with 'yarn' it must be above 1")

    def place(turns: float) -> float:
        """Returns the pair that makes `turns` turns over the length of the training."""
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
    """Returns YaRN's attention factor ('mscale')."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """LongRoPE (Ding et al., 2024), its short factors. `ModelConfig.context` ends where the long ones would begin."""
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
