"""Bytes of an image to its pixels, within limits that are checked before anything is decoded. Imports no torch.

The pixels are those that transformers loads from a file: turned upright as EXIF says, the first picture where a camera
has put several into one JPEG, any mode (grey, palette, 16 bits, CMYK) converted to RGB by Pillow, transparency dropped.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from scheduler.request import InvalidRequest
from scheduler.settings import ImageLimits

FORMATS = ("PNG", "JPEG")
Pixels = NDArray[np.uint8]
"""[height, width, 3]"""


def decode_images(files: Sequence[bytes], names: Sequence[str], limits: ImageLimits) -> Iterator[Pixels]:
    """One after the other, as `decode_image` does; not even the first before the headers of all have been checked.

    names: of the request's fields, for errors.
    """
    total = 0
    for data, name in zip(files, names, strict=True):
        with _opened(data, name, limits) as image:
            total += image.width * image.height
        if total > limits.request_pixels:
            reason = f"all images of a request may have at most {limits.request_pixels} together"
            raise InvalidRequest(name, f"pixel {total} of the request", reason)
    for data, name in zip(files, names, strict=True):
        yield decode_image(data, name, limits)


def decode_image(data: bytes, name: str, limits: ImageLimits) -> Pixels:
    """uint8 [height, width, 3] of a PNG or JPEG file. name: of the request's field, for errors.

    Raises InvalidRequest for what is too large, of another format (by content), animated, cut off or broken. What
    Pillow says of it is not passed on: it can hold addresses of this process.
    """
    with _opened(data, name, limits) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return np.asarray(image.convert("RGB"))


@contextmanager
def _opened(data: bytes, name: str, limits: ImageLimits) -> Iterator[Image.Image]:
    """With its header read and checked, and no pixels. Raises as `decode_image`, for what is done with it too."""
    if len(data) > limits.image_bytes:
        raise InvalidRequest(name, f"{len(data)} bytes", f"at most {limits.image_bytes} bytes")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            _check_header(image, name, limits)
            yield image
    except (InvalidRequest, MemoryError):
        raise
    except UnidentifiedImageError:
        raise InvalidRequest(name, f"{len(data)} bytes", "is no image in PNG or JPEG format") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest(name, f"{len(data)} bytes", f"at most {limits.image_pixels} pixels") from None
    except Exception:  # Pillow's parsers raise whatever they meet in broken files
        raise InvalidRequest(name, f"{len(data)} bytes", "is broken or cut off, and cannot be decoded") from None


def _check_header(image: Image.Image, name: str, limits: ImageLimits) -> None:
    """Nothing of the pixels has been read yet."""
    width, height = image.size
    shown = f"{width} x {height} pixels"
    if width < 1 or height < 1:
        raise InvalidRequest(name, shown, "must have pixels")
    if width * height > limits.image_pixels:
        raise InvalidRequest(name, shown, f"at most {limits.image_pixels} pixels")
    if max(width, height) > limits.image_ratio * min(width, height):
        raise InvalidRequest(name, shown, f"one side may be at most {limits.image_ratio} times the other")
    if image.format == "PNG" and getattr(image, "is_animated", False):
        raise InvalidRequest(name, f"{getattr(image, 'n_frames', 0)} frames", "must not be animated")


def image_digest(pixels: NDArray[np.uint8], salt: str = "") -> bytes:
    """32 bytes that name these pixels in this shape, whatever file they came in. Two images whose pixels are the same
    bytes in another shape have different ones (CVE-2025-46722 was a hash without the shape).

    salt: of the request. What is kept of an image is shared under the same one alone.
    """
    key = hashlib.blake2b(salt.encode()).digest()  # a key has at most 64 bytes, a tenant and a salt have more
    digest = hashlib.blake2b(digest_size=32, person=b"quire image", key=key)
    digest.update(f"{pixels.dtype.str} {pixels.shape} ".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()
