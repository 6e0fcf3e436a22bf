"""Which keys the tokens of a step see."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cache_manager.layout import MOST_TOKENS
from model.attention.backend import StepShape


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """The keys that each token of a step sees, for layers with the same window: first, and the one after the last,
    int32 [tokens].
    """

    first: NDArray[np.int32]
    last: NDArray[np.int32]

    @staticmethod
    def of(shape: StepShape, window: int | None) -> "Seen":
        positions = shape.positions
        first = np.maximum(positions + 1 - (window or MOST_TOKENS), 0)
        last = positions + 1
        if shape.whole.any():
            whole = shape.whole.repeat(shape.slices[:, 2])
            inside = positions < whole
            first, last = np.where(inside, 0, first), np.where(inside, whole, last)
        return Seen(first.astype(np.int32), last.astype(np.int32))
