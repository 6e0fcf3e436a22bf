"""Image files that clients in this process name. Their content is checked where they are decoded."""

from os import PathLike
from pathlib import Path

MOST_BYTES = 2**28  # more than a server's default, as one may allow more; no server takes a message of gigabytes

ImageFile = bytes | str | PathLike[str]
"""Content of a PNG or JPEG file, or its path."""


def read_image(image: ImageFile) -> bytes:
    """Returns the content of an image file.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no regular file, or too large.
    """
    if isinstance(image, bytes):
        return image
    path = Path(image)
    size = path.stat().st_size
    if not path.is_file():
        raise ValueError(f"{path} is no regular file")
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size} bytes, an image may have {MOST_BYTES}")
    return path.read_bytes()
