"""What a frontend does with the images of a prompt: cut them, write them into the text, check the placeholders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.inputs.images import Pixels
from model.inputs.tokenizer import Tokenizer
from model.inputs.vision.prompts import Prompt
from model.inputs.vision.tiles import Tiles
from scheduler.request import InvalidRequest


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Of one model. cut: makes tiles of an image [height, width, 3]. token_id: the placeholder, which stands in a
    prompt once for each feature of an image. tile_tokens: features of a tile.
    """

    cut: Callable[[Pixels], Tiles]
    prompt: Prompt
    token_id: int
    tile_tokens: int

    @property
    def marker(self) -> str:
        """What names an image in a text; the first one names the first image."""
        return self.prompt.marker

    def expand(self, text: str, images: Sequence[Tiles]) -> str:
        """The text with the model's own string for each image. Raises InvalidRequest for too many or few markers."""
        return self.prompt.expand(text, images)

    def encode(
        self, text: str, images: Sequence[Tiles], tokenizer: Tokenizer, add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of a prompt with at least one image (a text without is encoded as any other), checked.

        Raises InvalidRequest.
        """
        ids = tokenizer.encode(self.expand(text, images), add_special_tokens and self.prompt.special_tokens)
        if self.prompt.leads:
            ids = [self.token_id] * sum(image.tokens for image in images) + ids
        self.check(ids, images)
        return ids

    def check(self, ids: Sequence[int], images: Sequence[Tiles]) -> None:
        """For ids that a client has made: as many placeholders as its images have features, in order of the images.

        Raises InvalidRequest.
        """
        found, needed = ids.count(self.token_id), [image.tokens for image in images]
        if found != sum(needed):
            each = f" ({' + '.join(map(str, needed))})" if len(needed) > 1 else ""
            raise InvalidRequest(
                "prompt",
                f"{found} image placeholders (token {self.token_id})",
                f"needs {sum(needed)}{each} for {len(needed)} images",
            )
