"""Files of images: what is decoded, to which pixels, and what is refused before or while decoding."""

import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from model.inputs.images import decode_image, decode_images, image_digest
from scheduler.invalid import InvalidRequest
from scheduler.settings import ImageLimits
from tests.model.vision.pictures import encoded, picture

pytestmark = pytest.mark.sample(3)

LIMITS = ImageLimits()


def refusal(data: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        decode_image(data, "images[3]", limits)
    assert caught.value.field == "images[3]"
    assert "0x" not in str(caught.value)  # no addresses of this process
    return str(caught.value)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def test_png_is_exact() -> None:
    pixels = picture(13, 29)
    decoded = decode_image(encoded(pixels), "image", LIMITS)
    assert decoded.dtype == np.uint8
    assert np.array_equal(decoded, pixels)


def deep() -> Image.Image:
    return Image.fromarray(np.arange(0, 40 * 30 * 50, 50, dtype=np.uint16).reshape(30, 40))


def palette_with_hole() -> Image.Image:
    return Image.fromarray(picture(20, 30)).quantize(8)


def rgba() -> Image.Image:
    image = Image.fromarray(picture(20, 30)).convert("RGBA")
    image.putalpha(Image.fromarray(picture(20, 30, 1)[:, :, 0]))
    return image


FILES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(picture(33, 44), "JPEG", quality=80),
    "progressive jpeg": lambda: encoded(picture(33, 44), "JPEG", progressive=True),
    "grey": lambda: encoded(picture(20, 30)[:, :, 0]),
    "grey jpeg": lambda: encoded(picture(20, 30)[:, :, 0], "JPEG"),
    "one bit": lambda: saved(Image.fromarray(picture(20, 30)).convert("1")),
    "16 bits": lambda: saved(deep()),
    "palette": lambda: saved(palette_with_hole()),
    "palette with transparency": lambda: saved(palette_with_hole(), transparency=0),
    "transparency": lambda: saved(rgba()),
    "grey and transparency": lambda: saved(rgba().convert("LA")),
    "cmyk jpeg": lambda: saved(Image.fromarray(picture(20, 30)).convert("CMYK"), "JPEG"),
    **{
        f"orientation {turn}": lambda turn=turn: encoded(picture(20, 30), "JPEG", exif=orientation(turn))  # type: ignore[misc]
        for turn in range(1, 9)
    },
}


def orientation(turn: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = turn
    return exif


@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_that_transformers_converts_to(name: str, tmp_path: Path) -> None:
    """Its `load_image` drops transparency instead, where nothing else differs."""
    file = tmp_path / "image"
    file.write_bytes(FILES[name]())
    ours = decode_image(file.read_bytes(), "image", LIMITS)
    with Image.open(file) as image:
        assert np.array_equal(ours, convert_to_rgb(ImageOps.exif_transpose(image), return_numpy=True))
    assert np.array_equal(ours, np.asarray(load_image(str(file)))) == ("transparency" not in name)


def test_turned_images_stand_upright() -> None:
    decoded = decode_image(encoded(picture(20, 30), exif=orientation(6)), "image", LIMITS)
    assert np.array_equal(decoded, np.rot90(picture(20, 30), -1))


def test_two_pictures_in_one_jpeg_are_the_first() -> None:
    """Cameras write such files; they are no animations."""
    first, second = (Image.fromarray(picture(16, 24, seed)) for seed in (0, 1))
    data = saved(first, "MPO", save_all=True, append_images=[second])
    assert np.array_equal(decode_image(data, "image", LIMITS), decode_image(saved(first, "JPEG"), "image", LIMITS))


@pytest.mark.parametrize("kind", ["GIF", "BMP", "WEBP", "TIFF", "ICO", "PPM"])
def test_other_formats_are_refused_by_content(kind: str) -> None:
    assert "PNG or JPEG" in refusal(encoded(picture(16, 16), kind))


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"hello" * 100], ids=repr)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    refusal(data)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_cut_off_anywhere_is_refused(kind: str) -> None:
    data = encoded(picture(40, 40), kind)
    for end in range(0, len(data) - 20, max(1, len(data) // 60)):
        refusal(data[:end])


def test_a_flipped_byte_is_refused_or_changes_nothing_of_the_shape() -> None:
    data = encoded(picture(24, 24))
    for place in range(8, len(data) - 12, max(1, len(data) // 80)):
        try:
            pixels = decode_image(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :], "image", LIMITS)
        except InvalidRequest:
            continue
        assert pixels.ndim == 3


def test_animations_are_refused() -> None:
    frames = [Image.fromarray(picture(16, 16, seed)) for seed in range(3)]
    assert "animated" in refusal(saved(frames[0], save_all=True, append_images=frames[1:]))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes whose header promises this number of pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [6_400, 10_000, 20_000, 60_000, 2**31 - 1])
def test_bombs_are_refused_by_their_header(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    assert "40000000 pixels" in refusal(bomb(side, side))


def test_lines_are_refused() -> None:
    """A side of 336 for the shorter edge of 1 x 100,000 pixels would be 34 million pixels high."""
    assert "100 times" in refusal(bomb(1, 100_000))
    assert "100 times" in refusal(bomb(100_000, 1))
    assert decode_image(encoded(picture(100, 1)), "image", LIMITS).shape == (100, 1, 3)


def test_limits_are_exact() -> None:
    data = encoded(picture(10, 20))
    decode_image(data, "image", ImageLimits(image_bytes=len(data), image_pixels=200, image_ratio=2))
    assert "bytes" in refusal(data, ImageLimits(image_bytes=len(data) - 1))
    assert "pixels" in refusal(data, ImageLimits(image_pixels=199))
    assert "times" in refusal(data, ImageLimits(image_ratio=1))


def test_pixels_of_all_images_are_counted_before_the_first_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [encoded(picture(10, 20))] * 2 + [bomb(10, 21)]
    shapes = [pixels.shape for pixels in decode_images(files, "abc", ImageLimits(request_pixels=610))]
    assert shapes == [(10, 20, 3), (10, 20, 3), (21, 10, 3)]
    monkeypatch.setattr(Image.Image, "load", lambda _: pytest.fail("decoded"))
    with pytest.raises(InvalidRequest, match=r"c is 'pixel 610 of the request': .* at most 609 together"):
        list(decode_images(files, "abc", ImageLimits(request_pixels=609)))


def test_memory_that_is_not_there_is_no_broken_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: Image.Image) -> None:
        raise MemoryError

    data = encoded(picture(10, 20))
    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", load)
    with pytest.raises(MemoryError):
        decode_image(data, "image", LIMITS)


def test_limits_are_checked() -> None:
    wrong = ({"image_bytes": 0}, {"image_pixels": 0}, {"image_pixels": 178_956_971}, {"image_ratio": 0}, {"images": -1})
    for values in wrong:
        with pytest.raises(ValueError, match="--max-image"):
            ImageLimits(**values)
    with pytest.raises(ValueError, match="--max-request-pixels is 0"):
        ImageLimits(request_pixels=0)


def test_digest_is_of_pixels_and_shape() -> None:
    pixels = picture(12, 18)

    def other(pixels: NDArray[np.uint8]) -> bytes:
        return image_digest(pixels)

    assert image_digest(pixels) == image_digest(decode_image(encoded(pixels), "image", LIMITS))
    assert image_digest(pixels) == image_digest(np.asfortranarray(pixels))
    assert image_digest(pixels) != other(pixels.reshape(18, 12, 3))
    assert image_digest(pixels) != other(pixels.reshape(24, 9, 3))
    changed = pixels.copy()
    changed[5, 5, 1] ^= 1
    assert image_digest(pixels) != other(changed)
    assert len(image_digest(pixels)) == 32
    assert len({image_digest(pixels, salt=salt) for salt in ("", "a", "b", "x" * 64, "x" * 200)}) == 5


def test_digest_is_of_grid_and_positions() -> None:
    """Equal pixels may be other features, or stand at other positions."""
    pixels = picture(12, 18)
    flat, rows = np.arange(6, dtype=np.int32).reshape(1, 6), np.arange(6, dtype=np.int32).reshape(3, 2)
    digests = [
        image_digest(pixels, grid, positions)
        for grid in ((6,), (1, 2, 3), (1, 3, 2))
        for positions in (None, flat, flat[:, ::-1], rows)
    ]
    assert len(set(digests)) == len(digests)
    assert image_digest(pixels, (6,), rows.astype(np.int64)) == image_digest(pixels, (6,), rows)  # type: ignore[arg-type]
