"""Rotary position embeddings (Su et al., 2021) with rotated halves, as Hugging Face lays out heads.

Includes the rules by which config files stretch them to longer contexts. A cached key keeps the angle with which it was
written, so no angle may depend on the length of the sequence. With rules that let it ('dynamic', 'longrope') the
context ends where they would begin.
"""

import math
from collections.abc import Sequence
from copy import copy

import torch
from torch import Tensor

from model.errors import CheckpointError, shown
from model.families import FULL, SLIDING
from model.fields import LEAST_FLOAT, MOST_FLOAT, Fields
from model.forward import CosSin

MOST_ANGLES = 2**28  # angles of a table, 1 GiB in float32: 4 million positions of heads of 128


class Rope:
    """A table of rotary angles by position.

    Only the first 2 x pairs elements of a head are rotated.

    Attributes:
        axes: Axis that each pair turns by. Empty where all turn by the position in the sequence.
        apart: Elements from the first of a pair to the second.
    """

    def __init__(
        self,
        frequencies: Tensor,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
        scale: float = 1.0,
        first: int = 0,
        apart: int | None = None,
    ) -> None:
        """Computes the table.

        Args:
            frequencies: [pairs] float32. Radians a position.
            context: Positions in the table.
            dtype: Type of the table.
            device: Device of the table.
            scale: Factor of both cosines and sines.
            first: Number of a sequence's first position.
            apart: As the attribute. None: the number of pairs, so that all rotated elements stand together.

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
        self.axes: tuple[int, ...] = ()
        self.apart = apart or len(frequencies)
        self._rows = self._pairs = torch.empty(0, dtype=torch.int64)

    def with_axes(self, axes: Sequence[int]) -> "Rope":
        """Returns the same table, whose pairs turn by these axes (see `Vision.pair_axes`)."""
        other = copy(self)
        other.axes = tuple(axes)
        other._rows = torch.tensor([1 + axis for axis in axes], dtype=torch.int64, device=self._cos.device)
        other._pairs = torch.arange(len(axes), device=self._cos.device)
        return other

    @property
    def tables(self) -> CosSin:
        """The tables of cosines and sines, each [context, pairs]."""
        return self._cos, self._sin

    @property
    def rotated(self) -> int:
        """Elements of a head that are rotated."""
        return 2 * self._cos.shape[1]

    def at(self, positions: Tensor) -> CosSin:
        """Looks up the angles of tokens. See `model.forward.RotaryEmbedding`."""
        if self.axes:
            turned = positions[self._rows].T  # [tokens, pairs]
            return self._cos[turned, self._pairs].unsqueeze(1), self._sin[turned, self._pairs].unsqueeze(1)
        return self._cos[positions[0]].unsqueeze(1), self._sin[positions[0]].unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, apart: int | None = None) -> Tensor:
    """Rotates heads.

    Args:
        x: [tokens, heads, head_dim].
        cos: [tokens, 1, pairs], from `Rope.at`.
        sin: Likewise.
        apart: See `Rope`.
    """
    pairs = cos.shape[-1]
    apart = apart or pairs
    low, high = x[..., :pairs], x[..., apart : apart + pairs]
    between, rest = x[..., pairs:apart], x[..., apart + pairs :]
    return torch.cat((low * cos - high * sin, between, high * cos + low * sin, rest), -1)


def frequencies(dims: int, theta: float) -> Tensor:
    """Returns the plain frequencies of `dims` rotated elements, [dims / 2] float32."""
    return 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32) / dims)


def read_rope(fields: Fields, head_dim: int, theta: float = 10000.0, partial: float = 1.0) -> tuple[Tensor, float]:
    """Reads the `frequencies` and `scale` of a model's `Rope`.

    Reads `Fields.rope`, and 'rope_theta' beside 'rope_scaling'.

    Args:
        fields: The model's config.json.
        head_dim: Elements of a head.
        theta: Base where the config names none.
        partial: Rotated part of a head where the config names none.

    Raises:
        CheckpointError: The rule is not supported, or a value is out of its range.
    """
    rope = fields.rope
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


def read_spread_frequencies(fields: Fields, head_dim: int, theta: float, partial: float) -> Tensor:
    """Reads the frequencies of the rule 'proportional' (Gemma 4, 2026), [rotated pairs] float32.

    They are the first of those that a head which is rotated as a whole has. The elements of a pair are half a head
    apart.

    Args:
        fields: The model's config.json.
        head_dim: Elements of a head.
        theta: As of `read_rope`.
        partial: As of `read_rope`.

    Raises:
        CheckpointError: A value is out of its range.
    """
    rope = fields.rope
    pairs = int(head_dim * rope.positive_float("partial_rotary_factor", partial) // 2)
    if not 1 <= pairs <= head_dim // 2:
        raise rope.refuse("partial_rotary_factor", f"rotates {pairs} pairs of a head of {head_dim} elements")
    theta = rope.positive_float("rope_theta", theta)
    return frequencies(head_dim, theta)[:pairs] / rope.positive_float("factor", 1.0)


def ropes_by_type(fields: Fields, theta: float) -> tuple[Fields, Fields]:
    """Returns the fields that `read_rope` reads for layers without a window, and for those with one.

    Scaling ('rope_scaling') is for layers without a window.

    Args:
        fields: The model's config.json.
        theta: Base of layers with a window, where 'rope_parameters' names none.
    """
    ropes, nothing = fields.section("rope_parameters"), {"rope_scaling": None}
    full = ropes.section(FULL).values | fields.section("rope_scaling").values
    sliding = {"rope_theta": theta} | ropes.section(SLIDING).values
    return fields.having({"rope_parameters": full} | nothing), fields.having({"rope_parameters": sliding} | nothing)


def _default(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    return plain, 1.0


def _linear(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Position interpolation (Chen et al., 2023)."""
    return plain / rope.positive_float("factor"), 1.0


def _dynamic(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Dynamic NTK scaling: it changes nothing up to 'max_position_embeddings' tokens, where the context ends."""
    rope.positive_float("factor")
    return plain, 1.0


def _llama3(fields: Fields, rope: Fields, plain: Tensor, theta: float) -> tuple[Tensor, float]:  # noqa: ARG001
    """Llama 3.1: divides low frequencies by the factor, keeps high ones, and blends those between."""
    factor = rope.positive_float("factor")
    low, high = rope.positive_float("low_freq_factor"), rope.positive_float("high_freq_factor")
    if low > high:
        raise rope.refuse("low_freq_factor", f"must not be above 'high_freq_factor', which is {high}")
    turns = rope.positive("original_max_position_embeddings") * plain / (2 * math.pi)  # over the length of the training
    # Llama 4 has one factor for both, and blends none.
    part = (turns >= low).float() if low == high else ((turns - low) / (high - low)).clamp(0, 1)
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
    "mrope": _default,  # the angles are plain: `model.qwen_vl` reads the axes
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,
}
