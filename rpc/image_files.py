"""Files of images, as clients in this process name them. What is in them is checked where they are decoded."""

from os import PathLike
from pathlib import Path

MOST_BYTES = 2**28  # a server may allow more than the default, none takes a message of gigabytes

ImageFile = bytes | str | PathLike[str]
"""What a PNG or JPEG file holds, or its path."""


def read_image(image: ImageFile) -> bytes:
    """Raises OSError, ValueError for what is no regular file or too large."""
    if isinstance(image, bytes):
        return image
    path = Path(image)
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, an image may have {MOST_BYTES}")
    return path.read_bytes()
