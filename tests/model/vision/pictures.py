"""Images to look at, and files of them."""

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def picture(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Coarse colours with some noise on them, so that a tile or a row in another's place shows."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = rng.integers(-20, 21, (height, width, 3))
    return np.clip(np.asarray(coarse).astype(int) + noise, 0, 255).astype(np.uint8)


def encoded(pixels: NDArray[np.generic], kind: str = "PNG", mode: str | None = None, **options: object) -> bytes:
    file = BytesIO()
    Image.fromarray(pixels, mode).save(file, kind, **options)
    return file.getvalue()
