"""Shapes of recurrent layers, which keep a state of fixed size instead of keys and values. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from cache_manager.states import RecurrentLayer
from model.errors import CheckpointError
from model.fields import Fields

LINEAR, FULL = "linear_attention", "full_attention"
FLOAT_BYTES = 4  # of a number in a state: rounding would add up over the tokens
MOST_TAPS = 16
MOST_SHARED = 16  # groups that ranks share, whose sums of squares are a vector


class RecurrentShape(Protocol):
    """Shape of a recurrent layer."""

    def state(self, layer: int) -> RecurrentLayer:
        """Returns the state of a layer with this number."""

    def of_rank(self, ranks: int) -> Self | None:
        """Returns the shape that each of some ranks has; None where they cannot have equal parts."""


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Shape of a gated delta rule (Yang et al., Gated Delta Networks, 2024).

    Attributes:
        key_heads: Heads of queries and of keys.
        heads: Heads of values, a multiple; as many query and key heads are shared by neighbours.
        key_dim: Elements of a query and of a key.
        value_dim: Elements of a value.
        taps: Tokens that the convolution before it sees.
        by_row: Whether each row of a head's matrix has a decay of its own (Kimi Delta Attention).
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    by_row: bool = False

    @property
    def keys(self) -> int:
        """Elements of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of the values of all heads."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    def state(self, layer: int) -> RecurrentLayer:
        """Returns the state of a layer: the last inputs of its convolution, then a matrix for each head."""
        window = self.channels * (self.taps - 1) * FLOAT_BYTES
        return RecurrentLayer(layer, (window, *[self.key_dim * self.value_dim * FLOAT_BYTES] * self.heads))

    def of_rank(self, ranks: int) -> "DeltaShape | None":
        """Returns the shape with a rank's key heads, and the value heads that share them."""
        if self.key_heads % ranks:
            return None
        return replace(self, key_heads=self.key_heads // ranks, heads=self.heads // ranks)


@dataclass(frozen=True, slots=True)
class ScanShape:
    """Shape of a selective state-space layer (Dao and Gu, Transformers are SSMs, 2024: Mamba-2).

    Attributes:
        heads: Heads of inputs, a multiple of the groups.
        groups: Groups of neighbouring heads that share what writes into their states and what reads them (B and C).
        head_dim: Elements of an input of one head.
        state_dim: Rows of a head's state, each as long as an input.
        taps: Tokens that the convolution before it sees.
    """

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    taps: int

    @property
    def values(self) -> int:
        """Elements of the inputs of all heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of what writes into the states of all groups; as many read them."""
        return self.groups * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs, what writes, what reads."""
        return self.values + 2 * self.keys

    def state(self, layer: int) -> RecurrentLayer:
        """Returns the state of a layer: the last inputs of its convolution, then a matrix for each head."""
        window = self.channels * (self.taps - 1) * FLOAT_BYTES
        return RecurrentLayer(layer, (window, *[self.state_dim * self.head_dim * FLOAT_BYTES] * self.heads))

    def of_rank(self, ranks: int) -> "ScanShape | None":
        """Returns the shape with a rank's groups, or its heads of one group, which as many ranks share each."""
        if self.groups % ranks == 0:
            return replace(self, heads=self.heads // ranks, groups=self.groups // ranks)
        shared = ranks % self.groups == 0 and self.groups <= MOST_SHARED and self.heads % ranks == 0
        return replace(self, heads=self.heads // ranks, groups=1) if shared else None


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """Shape of a layer that mixes tokens by a short convolution alone (LFM2).

    Attributes:
        channels: Channels of the convolution.
        taps: Tokens that it sees.
    """

    channels: int
    taps: int

    def state(self, layer: int) -> RecurrentLayer:
        """Returns the state of a layer: the last inputs of its convolution."""
        return RecurrentLayer(layer, (self.channels * (self.taps - 1) * FLOAT_BYTES,))

    def of_rank(self, ranks: int) -> "ConvolutionShape | None":
        """Returns the shape with a rank's channels."""
        return None if self.channels % ranks else replace(self, channels=self.channels // ranks)


def read_taps(fields: Fields, key: str, default: int) -> int:
    """Returns how many tokens a convolution sees. Raises CheckpointError for numbers out of bounds."""
    taps = fields.positive(key, default)
    if not 2 <= taps <= MOST_TAPS:
        raise fields.refuse(key, f"must be from 2 to {MOST_TAPS}")
    return taps


def read_delta_shape(fields: Fields) -> DeltaShape:
    """Reads the shape of the linear layers of Qwen3-Next and Qwen3.5.

    Raises:
        CheckpointError: A field is wrong, or key heads do not divide value heads.
    """
    shape = DeltaShape(
        fields.positive("linear_num_key_heads", 16),
        fields.positive("linear_num_value_heads", 32),
        fields.positive("linear_key_head_dim", 128),
        fields.positive("linear_value_head_dim", 128),
        read_taps(fields, "linear_conv_kernel_dim", 4),
    )
    if shape.heads % shape.key_heads:
        raise CheckpointError(
            f"{fields.path}: {shape.heads} value heads cannot share {shape.key_heads} key heads evenly"
        )
    return shape


def read_kinds(
    fields: Fields, layers: int, key: str, known: Mapping[str, str], default: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Returns the kind of each layer.

    Args:
        fields: The model's config.json.
        layers: The number of layers.
        key: Key with the kinds.
        known: By name in config.json, the kind that it stands for.
        default: Kinds where config.json says nothing. None: it must say.

    Raises:
        CheckpointError: The key does not name a known kind for each layer, or no layer has full attention.
    """
    named = fields.get(key, list, None if default is None else list(default))
    if len(named) != layers or not all(isinstance(one, str) and one in known for one in named):
        raise fields.refuse(key, f"must name {' or '.join(map(repr, known))} for each of {layers} layers")
    kinds = tuple(known[one] for one in named)
    if FULL not in kinds:
        raise fields.refuse(key, f"a model without a layer of {FULL!r} is not served")
    return kinds
