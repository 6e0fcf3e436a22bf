"""Features of images on the device, encoded when a step first needs them and cached by content."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.forward import EncoderInput, ImageEncoder, ImageFeatures
from scheduler.request import PromptImage


@dataclass(frozen=True, slots=True, eq=False)
class ImagePart:
    """The features of one image that a step needs.

    Attributes:
        image: The image.
        offsets: [n] int64. Packed offset of each feature's place in the step.
        features: [n] int64. Index of each among the image's features.
    """

    image: PromptImage
    offsets: NDArray[np.int64]
    features: NDArray[np.int64]


class ImageStore:
    """Least-recently-used cache of features, by digest of the image.

    Attributes:
        encoded: The number of images encoded so far.
    """

    def __init__(self, encoder: ImageEncoder, device: torch.device, limit: int) -> None:
        """Makes an empty cache.

        Args:
            encoder: Makes features of pixels.
            device: Device of the features.
            limit: Bytes above which the least recently used features are dropped. One image's features are always kept.
        """
        self._encoder, self._device, self._limit = encoder, device, limit
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.encoded = 0

    def of_step(self, parts: Sequence[ImagePart]) -> ImageFeatures | None:
        """Returns the features of a step's parts, None without parts."""
        if not parts:
            return None
        found = self._find({part.image.digest: part.image for part in parts})
        features = [found[part.image.digest][:, torch.from_numpy(part.features).to(self._device)] for part in parts]
        places = torch.from_numpy(np.concatenate([part.offsets for part in parts])).to(self._device)
        return ImageFeatures(places, torch.cat(features, 1))

    def _find(self, images: Mapping[bytes, PromptImage]) -> dict[bytes, Tensor]:
        """Returns features [depths, features, hidden] of images by digest, from the cache or the encoder."""
        missing = [image for digest, image in images.items() if digest not in self._kept]
        if missing:
            self._kept |= zip((image.digest for image in missing), self._encode(missing), strict=True)
        found = {}
        for digest in images:
            found[digest] = self._kept[digest]
            self._kept.move_to_end(digest)
        # After the step's images were found: all of them are needed, whatever the limit.
        while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept.values()) > self._limit:
            self._kept.popitem(last=False)
        return found

    def _encode(self, images: Sequence[PromptImage]) -> Sequence[Tensor]:
        """Encodes images.

        Raises:
            ValueError: An image has another number of features than its grid says.
        """
        inputs = [
            EncoderInput(torch.from_numpy(np.array(image.pixels)).to(self._device), image.grid) for image in images
        ]
        made = self._encoder(inputs)
        for image, features in zip(images, made, strict=True):
            if features.shape[1] != image.features:
                raise ValueError(
                    f"the encoder made {features.shape[1]} features of an image whose grid is {image.grid}"
                )
        self.encoded += len(images)
        return made
