"""Writes images into prompts, as each model wants them.

A prompt names each image by its marker, the text of the placeholder token. The model's own string for the image takes
the marker's place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from model.inputs.vision.processed import ProcessedImage
from scheduler.invalid import InvalidRequest


class Prompt(Protocol):
    """Writes images into prompts.

    Attributes:
        marker: Text that stands for an image in a prompt.
        special_tokens: Whether the tokenizer's special tokens may be put around the expanded text.
        leads: Whether the placeholders stand before the text instead of in it.
    """

    @property
    def marker(self) -> str: ...

    @property
    def special_tokens(self) -> bool: ...

    @property
    def leads(self) -> bool: ...

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """Returns the text with each marker replaced.

        Raises:
            InvalidRequest: The number of markers is not that of the images.
        """


def pieces(text: str, marker: str, images: int) -> list[str]:
    """Returns the text around the markers, one piece more than images.

    Raises:
        InvalidRequest: The number of markers is not that of the images.
    """
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
    """LLaVA: repeats the placeholder for each feature of the image."""

    marker: str
    special_tokens: bool = True
    leads: bool = False

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        return interleaved(pieces(text, self.marker, len(images)), [self.marker * image.tokens for image in images])


@dataclass(frozen=True, slots=True)
class Enclosed:
    """Gemma 4: repeats the placeholder for each feature of the image, between two tokens."""

    marker: str
    before: str
    after: str
    special_tokens: bool = True
    leads: bool = False

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        strings = [f"{self.before}{self.marker * image.tokens}{self.after}" for image in images]
        return interleaved(pieces(text, self.marker, len(images)), strings)


@dataclass(frozen=True, slots=True)
class ImagesFirst:
    """PaliGemma: images, the token that begins a text, the text, a new line.

    A text without markers has its images before it.
    """

    marker: str
    beginning: str
    special_tokens: bool = False
    leads: bool = False

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
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

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        return interleaved(pieces(text, self.marker, len(images)), [self._string(image) for image in images])

    def _string(self, image: ProcessedImage) -> str:
        one = self.marker * image.grid[-1]
        rows = [
            "".join(f"{self.border}<row_{row + 1}_col_{column + 1}>{one}" for column in range(image.columns))
            for row in range(image.rows)
        ]
        lines = "".join(f"{row}\n" for row in rows) + ("\n" if rows else "")
        return f"{lines}{self.border}{self.overview}{one}{self.border}"


@dataclass(frozen=True, slots=True)
class NanoStrings:
    """NanoVLM: the whole image, then its tiles, each named, all in one line. Each of several images has its number.

    Attributes:
        split: Whether the model knows tiles. If not, an image is its placeholders alone.
        overview: Token before the whole image. None for a model without one, which is given tiles alone.
        names: Names of tiles, by row and column from 1.
    """

    marker: str
    split: bool
    overview: str | None
    names: dict[tuple[int, int], str]
    special_tokens: bool = True
    leads: bool = False

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        parts = pieces(text, self.marker, len(images))
        strings = [self._string(image) for image in images]
        if self.split and len(images) > 1:
            strings = [f"<image: {number}>{string}" for number, string in enumerate(strings)]
        return interleaved(parts, strings)

    def _string(self, image: ProcessedImage) -> str:
        one = self.marker * image.grid[-1]
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
            raise InvalidRequest("images", f"an image of {row} x {column} tiles", "the model has names for fewer")
        return name


@dataclass(frozen=True, slots=True)
class Leading:
    """The first nanoVLM: its vocabulary has no placeholder, and the one image stands before the text.

    The first marker in the text is removed.
    """

    marker: str = "<image>"
    special_tokens: bool = True
    leads: bool = True

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        if len(images) > 1:
            raise InvalidRequest("images", f"{len(images)} images", "the model takes one image")
        return text.replace(self.marker, "", 1)
