"""Input of an engine: a request that can be served."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cache_manager.block_hash import ImageSpan, Scope
from scheduler.controls import Controls
from scheduler.parameters import Beam


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt, resized and cut as the model's encoder takes it.

    Attributes:
        pixels: uint8 [frames, 3, height, width]. Frames are tiles, or one image in a resolution of its own.
        digest: Hash of pixels, grid and positions.
        places: int32 [features]. Positions of its placeholders in the prompt, ascending.
        grid: Shape of its features; their number is the product.
        positions: int32 [axes, features], 0 to features - 1. Rotary positions of its features, counted from the first
            placeholder of each run of neighbouring ones. None for a model with one axis.
    """

    pixels: NDArray[np.uint8]
    digest: bytes
    places: NDArray[np.int32]
    grid: tuple[int, ...]
    positions: NDArray[np.int32] | None = None

    @property
    def features(self) -> int:
        """The number of its features."""
        return math.prod(self.grid)

    @property
    def span(self) -> ImageSpan:
        return ImageSpan(int(self.places[0]), int(self.places[-1]) + 1, self.digest)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Request:
    """A request that can be served. prompt: int32 token ids. stop_ids: end tokens and stop tokens that end it.

    images: of the prompt, in order. queue_timeout: seconds it may wait in the queue; None leaves it to the queue's own
    limit. scope: with whom it shares the prefix cache. count: sequences that come of the prompt. beam: they are the
    best that a search finds. priority: as in `Spec`. deadline: seconds from its submission to an engine until nobody
    waits for its output any more; None: somebody waits as long as it takes.
    """

    prompt: NDArray[np.int32]
    max_tokens: int
    stop_ids: tuple[int, ...]
    controls: Controls
    queue_timeout: float | None = None
    scope: Scope = field(default_factory=Scope)
    count: int = 1
    beam: Beam | None = None
    images: tuple[PromptImage, ...] = ()
    priority: int = 0
    deadline: float | None = None

    @property
    def image_bytes(self) -> int:
        """Bytes of its images' pixels."""
        return sum(image.pixels.nbytes for image in self.images)

    def closes_at(self, submitted: float) -> float:
        """Returns the time at which a constrained output should be complete; infinity where it need not be.

        Args:
            submitted: Seconds on the engine's clock.
        """
        closes = self.controls.logits_params.grammar_tokens > 0
        return submitted + self.deadline if closes and self.deadline is not None else math.inf

    @property
    def drawing(self) -> Controls:
        """Controls of its draws. A beam search chooses among twice as many alternatives as it is wide."""
        if self.beam is None:
            return self.controls
        return replace(self.controls, top_logprobs=max(2 * self.beam.width, self.controls.top_logprobs))
