"""The store of features: an encoder is called once for each content that is kept."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.forward import EncoderInput
from model.images import ImagePart, ImageStore
from model.inputs.images import image_digest
from scheduler.request import PromptImage
from tests.model.vision.pictures import picture

DEPTHS, FEATURES, HIDDEN = 2, 4, 8
BYTES = DEPTHS * FEATURES * HIDDEN * 4


class Encoder:
    """Features that tell images apart; keeps what it was called with."""

    def __init__(self) -> None:
        self.images: list[float] = []

    def __call__(self, images: Sequence[EncoderInput]) -> list[Tensor]:
        means = [image.pixels.double().mean() for image in images]
        self.images += map(float, means)
        plain = torch.arange(DEPTHS * FEATURES * HIDDEN).view(DEPTHS, FEATURES, HIDDEN)
        return [(plain + mean).float() for mean in means]


def image(seed: int, grid: tuple[int, ...] = (2, 2)) -> PromptImage:
    pixels: NDArray[np.uint8] = np.ascontiguousarray(picture(6, 5, seed).transpose(2, 0, 1)[None])
    return PromptImage(pixels, image_digest(pixels, grid), np.arange(FEATURES, dtype=np.int32), grid)


def part(of: PromptImage, first: int, *features: int) -> ImagePart:
    return ImagePart(of, np.arange(first, first + len(features)), np.array(features))


def make(limit: int = 2**20) -> tuple[Encoder, ImageStore]:
    encoder = Encoder()
    return encoder, ImageStore(encoder, torch.device("cpu"), limit)


def test_each_content_is_encoded_once_whoever_shows_it() -> None:
    encoder, store = make()
    for _ in range(3):
        store.of_step([part(image(1), 0, 0, 1, 2, 3), part(image(2), 9, 0, 1), part(image(1), 20, 2, 3)])
    assert len(encoder.images) == store.encoded == 2


def test_a_part_has_its_own_features_in_its_places() -> None:
    encoder, store = make()
    found = store.of_step([part(image(1), 3, 1, 2), part(image(2), 7, 3)])
    assert found is not None
    assert found.places.tolist() == [3, 4, 7]
    first, second = encoder.images
    expected = torch.arange(DEPTHS * FEATURES * HIDDEN).view(DEPTHS, FEATURES, HIDDEN).double()
    assert torch.allclose(
        found.features.double(), torch.cat([expected[:, [1, 2]] + first, expected[:, [3]] + second], 1)
    )
    assert store.of_step([]) is None


def test_the_one_that_was_not_used_for_longest_leaves() -> None:
    encoder, store = make(limit=2 * BYTES)
    for seed in (1, 2, 1, 3, 1, 2):
        store.of_step([part(image(seed), 0, 0)])
    assert store.encoded == len(encoder.images) == 4, "1, 2, 3, and 2 again"


def test_one_that_is_larger_than_the_limit_serves_its_step() -> None:
    _, store = make(limit=1)
    for _ in range(2):
        found = store.of_step([part(image(1), 0, 0, 1), part(image(2), 5, 0)])
        assert found is not None
        assert len(found.places) == 3
    assert store.encoded == 3, "2 was kept from the first step"


def test_an_image_whose_grid_says_otherwise_is_an_error() -> None:
    _, store = make()
    with pytest.raises(ValueError, match=r"4 features of an image whose grid is \(2, 3\)"):
        store.of_step([part(image(1, (2, 3)), 0, 0)])
    assert store.encoded == 0
