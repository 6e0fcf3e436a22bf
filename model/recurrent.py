"""Shapes of recurrent layers, which keep a state of fixed size instead of keys and values. Imports no torch."""

from dataclasses import dataclass, replace

from cache_manager.states import RecurrentLayer
from model.errors import CheckpointError
from model.fields import Fields

LINEAR, FULL = "linear_attention", "full_attention"
FLOAT_BYTES = 4  # of a number in a state: rounding would add up over the tokens
MOST_TAPS = 16


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Shape of a gated delta rule (Yang et al., Gated Delta Networks, 2024).

    Attributes:
        key_heads: Heads of queries and of keys.
        heads: Heads of values, a multiple; as many query and key heads are shared by neighbours.
        key_dim: Elements of a query and of a key.
        value_dim: Elements of a value.
        taps: Tokens that the convolution before it sees.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int

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

    def divided(self, size: int) -> "DeltaShape":
        """Returns the part of one of `size` ranks."""
        return replace(self, key_heads=self.key_heads // size, heads=self.heads // size)


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
        fields.positive("linear_conv_kernel_dim", 4),
    )
    if shape.heads % shape.key_heads:
        raise CheckpointError(
            f"{fields.path}: {shape.heads} value heads cannot share {shape.key_heads} key heads evenly"
        )
    if not 2 <= shape.taps <= MOST_TAPS:
        raise fields.refuse("linear_conv_kernel_dim", f"must be from 2 to {MOST_TAPS}")
    return shape


def read_linear_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Returns whether each layer is a linear one.

    Raises:
        CheckpointError: 'layer_types' does not name a known type for each layer, or no layer has full attention.
    """
    every = fields.positive("full_attention_interval", 4)
    kinds = fields.get("layer_types", list, [LINEAR if (i + 1) % every else FULL for i in range(layers)])
    if len(kinds) != layers or not all(kind in (LINEAR, FULL) for kind in kinds):
        raise fields.refuse("layer_types", f"must name {LINEAR!r} or {FULL!r} for each of {layers} layers")
    if FULL not in kinds:
        raise fields.refuse("layer_types", f"a model without a layer of {FULL!r} is not served")
    return tuple(kind == LINEAR for kind in kinds)
