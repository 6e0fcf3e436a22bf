"""Decodes images to pixels, within limits that are checked before decoding. Imports no torch.

The pixels are those that transformers' processors convert an image to. The image is turned upright as EXIF says. The
first picture of a JPEG with several counts. Any mode (grey, palette, 16 bits, CMYK) is converted to RGB by Pillow. A
transparent image stands on white, so that the colours that it hides do not count.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from scheduler.invalid import InvalidRequest
from scheduler.settings import ImageLimits

FORMATS = ("PNG", "JPEG")
Pixels = NDArray[np.uint8]
"""[height, width, 3]"""


def decode_images(files: Sequence[bytes], names: Sequence[str], limits: ImageLimits) -> Iterator[Pixels]:
    """Decodes images one after the other, after the headers of all have been checked.

    Args:
        files: PNG or JPEG files.
        names: Name of the request's field of each, for errors.
        limits: Limits of an image, and of all together.

    Raises:
        InvalidRequest: As `decode_image`, or all together have too many pixels.
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
    """Decodes a PNG or JPEG file.

    Pillow's own messages are not passed on: they can hold addresses of this process.

    Args:
        data: The file.
        name: Name of the request's field, for errors.
        limits: Limits of an image.

    Returns:
        [height, width, 3] uint8.

    Raises:
        InvalidRequest: The image is too large, of another format (by content), animated, cut off or broken.
    """
    with _opened(data, name, limits) as image:
        ImageOps.exif_transpose(image, in_place=True)
        return np.asarray(_on_white(image))


def _on_white(image: Image.Image) -> Image.Image:
    """Converts an image to RGB."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


@contextmanager
def _opened(data: bytes, name: str, limits: ImageLimits) -> Iterator[Image.Image]:
    """Opens an image: reads and checks its header, and no pixels.

    Raises:
        InvalidRequest: As `decode_image`, in the body of the `with` too.
    """
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
    """Checks size and format. No pixels have been read yet."""
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


def image_digest(
    pixels: NDArray[np.uint8], grid: Sequence[int] = (), positions: NDArray[np.int32] | None = None, salt: str = ""
) -> bytes:
    """Returns 32 bytes that identify what an encoder and a decoder read of an image, whatever file it came in.

    The shape is part of it: equal bytes in another shape are another image (CVE-2025-46722 was a hash without the
    shape). So are the grid, which the features depend on, and the positions, which the image's keys and all keys after
    it depend on.

    Args:
        pixels: [frames, 3, height, width] uint8.
        grid: Grid of its features.
        positions: [axes, features] int32. Positions of its features, None for a model with one axis.
        salt: Salt of the request. Cached features of an image are shared under the same salt alone.
    """
    key = hashlib.blake2b(salt.encode()).digest()  # a key has at most 64 bytes, tenant and salt may have more
    digest = hashlib.blake2b(digest_size=32, person=b"quire image", key=key)
    axes = None if positions is None else positions.shape
    digest.update(f"{pixels.dtype.str} {pixels.shape} {tuple(grid)} {axes} ".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    if positions is not None:
        digest.update(positions.astype("<i4").tobytes())
    return digest.digest()
