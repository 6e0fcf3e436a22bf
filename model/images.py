"""Features of images on the device: encoded when a step first needs one, and kept for others that show the same."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.forward import ImageEncoder, ImageFeatures
from scheduler.request import PromptImage


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """What a step computes of an image. offsets: [n] packed offsets of these of its features."""

    image: PromptImage
    offsets: NDArray[np.int64]
    features: NDArray[np.int64]


class ImageStore:
    """Least recently used contents leave when their features take more than `limit` bytes. encoded: calls of the
    encoder.
    """

    def __init__(self, encoder: ImageEncoder, device: torch.device, limit: int) -> None:
        self._encoder, self._device, self._limit = encoder, device, limit
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0

    def of_step(self, parts: Sequence[ImagePart]) -> ImageFeatures | None:
        """What stands in the places of these parts; None where there are none."""
        if not parts:
            return None
        features = [self._features(part.image)[torch.from_numpy(part.features).to(self._device)] for part in parts]
        places = torch.from_numpy(np.concatenate([part.offsets for part in parts])).to(self._device)
        return ImageFeatures(places, torch.cat(features))

    def _features(self, image: PromptImage) -> Tensor:
        """[features, hidden]."""
        found = self._kept.get(image.digest)
        if found is None:
            self.encoded += 1
            found = self._encoder(torch.from_numpy(np.array(image.pixels)).to(self._device))
            self._kept[image.digest] = found
        self._kept.move_to_end(image.digest)
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        return found
