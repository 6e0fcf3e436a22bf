"""Prepares the images of a prompt on a frontend: processes them, writes them into the text, checks placeholders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from model.inputs.images import Pixels
from model.inputs.tokenizer import Tokenizer
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.prompts import Prompt
from scheduler.invalid import InvalidRequest


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """Image inputs of one model.

    Attributes:
        process: Makes an image [height, width, 3] what the encoder takes.
        prompt: Writes images into a prompt.
        token_id: Id of the placeholder, which stands in a prompt once for each feature of an image.
    """

    process: Callable[[Pixels], ProcessedImage]
    prompt: Prompt
    token_id: int

    @property
    def marker(self) -> str:
        """Text that stands for an image in a prompt; the first one stands for the first image."""
        return self.prompt.marker

    def expand(self, text: str, images: Sequence[ProcessedImage]) -> str:
        """Returns the text with the model's own string for each image.

        Raises:
            InvalidRequest: The text has too many or too few markers.
        """
        return self.prompt.expand(text, images)

    def encode(
        self, text: str, images: Sequence[ProcessedImage], tokenizer: Tokenizer, add_special_tokens: bool = True
    ) -> list[int]:
        """Encodes a prompt with at least one image, and checks it. Prompts without images are encoded as any text.

        Args:
            text: The prompt, with a marker for each image.
            images: The images.
            tokenizer: The model's tokenizer.
            add_special_tokens: Whether the request asks for special tokens.

        Raises:
            InvalidRequest: Markers or placeholders do not fit the images.
        """
        ids = tokenizer.encode(self.expand(text, images), add_special_tokens and self.prompt.special_tokens)
        if self.prompt.leads:
            ids = [self.token_id] * sum(image.tokens for image in images) + ids
        self.check(ids, images)
        return ids

    def check(self, ids: Sequence[int], images: Sequence[ProcessedImage]) -> None:
        """Checks ids of a client's own: there must be one placeholder for each feature of the images, in their order.

        Raises:
            InvalidRequest: There are more or fewer.
        """
        found, needed = ids.count(self.token_id), [image.tokens for image in images]
        if found != sum(needed):
            each = f" ({' + '.join(map(str, needed))})" if len(needed) > 1 else ""
            raise InvalidRequest(
                "prompt",
                f"{found} image placeholders (token {self.token_id})",
                f"needs {sum(needed)}{each} for {len(needed)} images",
            )
