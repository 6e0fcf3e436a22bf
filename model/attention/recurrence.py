"""Contract of recurrent layers: what they compute token by token, over states that a back end keeps in its pages."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from model.attention.backend import AttentionBackend

L2_EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True, slots=True, eq=False)
class LinearRecurrence:
    """Linear attention with decay: a matrix for each head, which each token fades, adds to and then reads.

    A head's matrix M, [key_dim, value_dim], becomes ``kept * M + outer(key, written)``. Its result is ``query @ M``.
    What is written is ``rate * value``, or ``rate * (value - key @ (kept * M))`` by the delta rule (Yang et al., Gated
    Delta Networks, 2024). Without it this is Mamba-2's scan (Dao and Gu, Transformers are SSMs, 2024).

    Attributes:
        queries: [tokens, groups, key_dim] float32. As many neighbouring heads share each as there are heads a group.
        keys: Likewise.
        values: [tokens, heads, value_dim] float32.
        kept: [tokens, heads, 1 or key_dim] float32. The part of a head's matrix that is kept, or of each of its rows.
        rates: [tokens, heads] float32. Factor of what is written.
        delta: Whether what the matrix has for a key is taken from the value.
        scale: Factor of queries; they and the keys are divided by their lengths then. None: they are as they are.
        skip: [heads] float32. Factor of the values that are added to the result; None adds none.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    kept: Tensor
    rates: Tensor
    delta: bool
    scale: float | None = None
    skip: Tensor | None = None


@runtime_checkable
class StateBackend(Protocol):
    """A back end whose pool has the states of recurrent layers too.

    Both operations go on from the states before the step's tokens, and keep those after its segments
    (`StateSegments`). All is float32, and the bits of a token depend on its sequence alone.
    """

    def convolve(self, layer: int, x: Tensor, taps: Tensor, bias: Tensor | None, activated: bool, plan: Any) -> Tensor:
        """Convolves each channel of a step's tokens with the tokens before it. Keeps the last inputs.

        Args:
            layer: Index of the layer in the model.
            x: [tokens, channels] float32, the elements of a token side by side.
            taps: [channels, taps] float32. Weights, the oldest token first.
            bias: [channels] float32. None without one.
            activated: Whether SiLU follows.
            plan: The plan of the step.

        Returns:
            [tokens, channels] float32.
        """

    def recur(self, layer: int, recurrence: LinearRecurrence, plan: Any) -> Tensor:
        """Runs a recurrence over a step's tokens. Keeps the matrices.

        Args:
            layer: Index of the layer in the model.
            recurrence: What is computed.
            plan: The plan of the step.

        Returns:
            [tokens, heads, value_dim] float32.
        """


def states_of(attention: AttentionBackend) -> StateBackend:
    """Returns the back end as one with states. Raises TypeError where it has none."""
    if not isinstance(attention, StateBackend):
        raise TypeError(f"the back end {attention.name} has no states of recurrent layers")
    return attention


def no_states(layer: int) -> ValueError:
    """Returns the error of a recurrent layer in a step without segments."""
    return ValueError(f"layer {layer} is recurrent, but the layout of the KV cache has no states")
