"""Positions of several axes: what stands where, by hand."""

import numpy as np
import pytest

from model.rotary_rows import RotaryRows, prompt_positions
from scheduler.request import PromptImage

PIXELS = np.zeros((1, 3, 2, 2), np.uint8)


def image(places: list[int], positions: list[list[int]] | None) -> PromptImage:
    there = None if positions is None else np.array(positions, np.int32)
    return PromptImage(PIXELS, b"", np.array(places, np.int32), (len(places),), there)


WIDE = [[0, 0, 0], [0, 0, 0], [0, 1, 2]]
TALL = [[0, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("prompt", "images", "rows", "columns", "delta"),
    [
        pytest.param(4, [], [0, 1, 2, 3], [0, 1, 2, 3], 0, id="text alone"),
        pytest.param(5, [image([1, 2, 3], WIDE)], [0, 1, 1, 1, 4], [0, 1, 2, 3, 4], 0, id="a row of features"),
        pytest.param(4, [image([0, 1], TALL)], [0, 1, 2, 3], [0, 0, 2, 3], 0, id="an image at the beginning"),
        pytest.param(3, [image([1, 2], [[0, 0]] * 3)], [0, 1, 1], [0, 1, 1], -1, id="an image at the end"),
        pytest.param(
            5, [image([0, 1, 2], WIDE), image([3, 4], TALL)], [0, 0, 0, 3, 4], [0, 1, 2, 3, 3], 0, id="two neighbours"
        ),
        pytest.param(
            6, [image([1, 2, 4], [[0, 0, 0]] * 3)], [0, 1, 1, 2, 3, 4], [0, 1, 1, 2, 3, 4], -1, id="text between frames"
        ),
        pytest.param(4, [image([1, 2], None)], [0, 1, 2, 3], [0, 1, 2, 3], 0, id="an image without positions"),
    ],
)
def test_features_stand_where_their_image_says(
    prompt: int, images: list[PromptImage], rows: list[int], columns: list[int], delta: int
) -> None:
    positions, found = prompt_positions(prompt, images, 3)
    assert (positions[1].tolist(), positions[2].tolist(), found) == (rows, columns, delta)


def test_a_slice_may_begin_and_end_anywhere() -> None:
    """Rows 2 and 0: one goes from an image into its output, the other has text alone."""
    batch = RotaryRows(3, 3)
    batch.join(2, 4, [image([1, 2, 3], [[0, 0, 0], [0, 0, 1], [0, 1, 0]])])
    slices = np.array([[2, 2, 4], [0, 7, 1]], np.int32)
    positions, row_of = np.array([2, 3, 4, 5, 7]), np.array([2, 2, 2, 2, 0])
    packed = batch.pack(slices, positions, row_of, np.array([0, 4]))
    assert packed.tolist() == [[2, 3, 4, 5, 7], [1, 1, 3, 4, 7], [1, 2, 3, 4, 7], [2, 1, 3, 4, 7]]


def test_a_row_keeps_nothing_of_its_last_sequence() -> None:
    batch = RotaryRows(1, 3)
    batch.join(0, 3, [image([0, 1, 2], WIDE)])
    batch.join(0, 4, [])
    one = np.zeros(1, np.int64)
    packed = batch.pack(np.array([[0, 3, 1]], np.int32), one + 3, one, one)
    assert packed[:, 0].tolist() == [3] * 4
