"""Positions of several rotary axes, by batch row (M-RoPE, Wang et al., Qwen2-VL, 2024).

A token of text has the same position on all axes. The features of an image have positions of their own, counted from
the position that a token of text would have there. The text after them goes on behind the largest. So from the end of
the prompt on, positions differ from those in the sequence by a constant.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scheduler.request import PromptImage

Positions = NDArray[np.int64]


class RotaryRows:
    """Rotary positions of each batch row.

    Invariant: a row's positions follow from its prompt and its images alone, whatever was computed of it before.
    """

    def __init__(self, rows: int, axes: int) -> None:
        self._axes = axes
        self._delta = np.zeros(rows, np.int64)  # rotary position after the prompt - position in the sequence
        self._prompts: dict[int, Positions] = {}  # [axes, tokens of the prompt], of rows with images

    def join(self, row: int, prompt_count: int, images: Sequence[PromptImage]) -> None:
        """Takes in the prompt of the sequence that takes the row."""
        self._prompts.pop(row, None)
        self._delta[row] = 0
        if images:
            self._prompts[row], self._delta[row] = prompt_positions(prompt_count, images, self._axes)

    def pack(self, slices: NDArray[np.int32], positions: Positions, row_of: Positions, first: Positions) -> Positions:
        """Returns [1 + axes, tokens]: positions in the sequences, then those on each axis.

        Args:
            slices: [n, 3] int32. Slices of the step.
            positions: [tokens] int64. Positions in the sequences.
            row_of: [tokens] int64. Row of each token.
            first: [n] int64. Packed offset of each slice's first token.
        """
        packed = np.empty((1 + self._axes, len(positions)), np.int64)
        packed[0], packed[1:] = positions, positions + self._delta[row_of]
        for (row, start, count), at in zip(slices.tolist(), first.tolist(), strict=True):
            prompt = self._prompts.get(row)
            if prompt is not None and start < prompt.shape[1]:
                here = prompt[:, start : start + count]
                packed[1:, at : at + here.shape[1]] = here
        return packed


def prompt_positions(prompt_count: int, images: Sequence[PromptImage], axes: int) -> tuple[Positions, int]:
    """Returns the rotary positions of a prompt.

    Args:
        prompt_count: The number of its tokens.
        images: Its images, in order. One without positions of its own stands like text.
        axes: The number of axes.

    Returns:
        [axes, prompt_count] int64, and what is added to the position in the sequence from the end of the prompt on.
    """
    # Text goes on behind everything before it: each token's position is the one before it and 1, unless an image says.
    made, following, done = np.empty((axes, prompt_count), np.int64), 0, 0
    for image in images:
        if image.positions is None:
            continue
        for begin, end in _runs(image.places):
            first, count = int(image.places[begin]), end - begin
            made[:, done:first] = following + np.arange(first - done)
            following += first - done
            here = image.positions[:, begin:end]
            made[:, first : first + count] = following + here
            following, done = following + int(here.max()) + 1, first + count
    made[:, done:] = following + np.arange(prompt_count - done)
    return made, following - done


def _runs(places: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Returns the runs of neighbouring places: index of each run's first, and the index after its last."""
    ends = [*(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
