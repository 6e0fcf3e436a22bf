"""Computes the range of keys that each token of a step sees."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import MOST_TOKENS
from model.attention.backend import StepShape


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """Ranges of keys that tokens see, for layers with the same window. Both ends grow with a token's position.

    Attributes:
        first: [tokens] int32. First position.
        last: [tokens] int32. Position after the last.
    """

    first: NDArray[np.int32]
    last: NDArray[np.int32]

    @staticmethod
    def of(shape: StepShape, window: int | None, chunked: bool = False) -> "VisibleKeys":
        """Computes the ranges.

        Args:
            shape: The step.
            window: Tokens that a layer sees, with the token itself. None sees all.
            chunked: See `LayerGroup`.
        """
        positions = shape.positions
        first = first_seen(positions, window, chunked)
        last = positions + 1
        if shape.bidirectional.any():
            prefix = shape.bidirectional.repeat(shape.slices[:, 2])
            inside = positions < prefix
            first, last = np.where(inside, 0, first), np.where(inside, prefix, last)
        return VisibleKeys(first.astype(np.int32), last.astype(np.int32))


def first_seen(positions: NDArray[np.integer], window: int | None, chunked: bool) -> NDArray[np.integer]:
    """Returns the position of the first key that tokens at these positions see; arguments as `VisibleKeys.of`."""
    if window is not None and chunked:
        return positions // window * window
    return np.maximum(positions + 1 - (window or MOST_TOKENS), 0)
