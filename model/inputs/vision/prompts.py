"""How each model writes its images into a prompt. A prompt names each image by its marker, the text of the placeholder
token; the model's own string for that image takes its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.inputs.vision.tiles import Tiles
from scheduler.request import InvalidRequest


class Prompt(Protocol):
    """marker: what stands for an image in a prompt. special_tokens: whether the tokenizer's own may be put around the
    expanded text. leads: the placeholders are no part of that text, but stand before it.
    """

    @property
    def marker(self) -> str: ...

    @property
    def special_tokens(self) -> bool: ...

    @property
    def leads(self) -> bool: ...

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        """The text with each marker replaced. Raises InvalidRequest for another number of markers than of images."""


def pieces(text: str, marker: str, images: int) -> list[str]:
    """What stands around the markers, one piece more than images. Raises InvalidRequest."""
    parts = text.split(marker)
    if len(parts) != images + 1:
        raise InvalidRequest(
            "prompt", f"a text with {len(parts) - 1} {marker}", f"needs {images}, one for each of its images"
        )
    return parts


def interleaved(parts: Sequence[str], strings: Sequence[str]) -> str:
    return "".join(part + string for part, string in zip(parts, [*strings, ""], strict=True))


@dataclass(frozen=True, slots=True)
class Repeated:
    """LLaVA: the placeholder, as often as the image has features."""

    marker: str
    special_tokens: bool = True
    leads: bool = False

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        return interleaved(pieces(text, self.marker, len(images)), [self.marker * image.tokens for image in images])


@dataclass(frozen=True, slots=True)
class ImagesFirst:
    """PaliGemma: images, the token that begins a text, the text, a new line. A text without markers has its images
    before it.
    """

    marker: str
    beginning: str
    special_tokens: bool = False
    leads: bool = False

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        if self.marker not in text:
            text = self.marker * len(images) + text
        *before, last = pieces(text, self.marker, len(images))
        strings = [self.marker * image.tokens for image in images]
        return interleaved([*before, self.beginning + last + "\n"], strings)


@dataclass(frozen=True, slots=True)
class TiledStrings:
    """Idefics3 and SmolVLM: a line for each row of tiles, each tile named, then the whole image."""

    marker: str
    border: str = "<fake_token_around_image>"
    overview: str = "<global-img>"
    special_tokens: bool = True
    leads: bool = False

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        return interleaved(pieces(text, self.marker, len(images)), [self._string(image) for image in images])

    def _string(self, image: Tiles) -> str:
        one = self.marker * (image.tokens // len(image.pixels))
        rows = [
            "".join(f"{self.border}<row_{row + 1}_col_{column + 1}>{one}" for column in range(image.columns))
            for row in range(image.rows)
        ]
        lines = "".join(f"{row}\n" for row in rows) + ("\n" if rows else "")
        return f"{lines}{self.border}{self.overview}{one}{self.border}"


@dataclass(frozen=True, slots=True)
class NanoStrings:
    """nanoVLM: the whole image, then its tiles, each named, all in one line; with several images each has its number.

    overview: the token before the whole image, None for a model that has none and is given tiles alone. names: of
    tiles, by row and column from 1. split False: the model knows no tiles, and an image is its placeholders alone.
    """

    marker: str
    split: bool
    overview: str | None
    names: dict[tuple[int, int], str]
    special_tokens: bool = True
    leads: bool = False

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        parts = pieces(text, self.marker, len(images))
        strings = [self._string(image) for image in images]
        if self.split and len(images) > 1:
            strings = [f"<image: {number}>{string}" for number, string in enumerate(strings)]
        return interleaved(parts, strings)

    def _string(self, image: Tiles) -> str:
        one = self.marker * (image.tokens // len(image.pixels))
        if not self.split:
            return one
        whole = "" if self.overview is None else self.overview + one
        if self.overview is not None and len(image.pixels) == 1:
            return whole
        places = [(row + 1, column + 1) for row in range(image.rows) for column in range(image.columns)]
        return whole + "".join(self._name(*place) + one for place in places)

    def _name(self, row: int, column: int) -> str:
        name = self.names.get((row, column))
        if name is None:
            raise InvalidRequest("images", f"an image of {row} x {column} tiles", "the model has no names for so many")
        return name


@dataclass(frozen=True, slots=True)
class Leading:
    """The first nanoVLM: its vocabulary has no placeholder, the one image stands before the text. A marker there counts
    as nothing, wherever it is.
    """

    marker: str = "<image>"
    special_tokens: bool = True
    leads: bool = True

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        if len(images) > 1:
            raise InvalidRequest("images", f"{len(images)} images", "the model takes one image")
        return text.replace(self.marker, "", 1)
