"""A case's requests with and without images, and the tokens that transformers generates for each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from model.settings import ModelSettings
from rpc.frontend.prepare import Preparer, load_preparer
from scheduler.limits import Limits
from scheduler.parameters import Sampling, Stopping
from scheduler.request import Request
from scheduler.spec import Spec
from tests.model.vision import reference
from tests.model.vision.cases import BY_NAME, Case
from tests.model.vision.conftest import Shelf
from tests.model.vision.pictures import encoded, picture

T = TypeVar("T")

NEW = 10
SIZES = ((32, 32), (70, 110), (40, 20))
PROMPTS = (("<image>the cat sat", (0,)), ("that <image>sat <image>\non", (1, 2)), ("the cat sat on the <image>", (0,)))
"""Text, and which images it has."""
TEXTS = ("the cat sat on the mat", "sat")
BOTH_WAYS = (BY_NAME["paligemma"], BY_NAME["paligemma2"])


class Seen:
    """A case's requests, and what transformers generates for each, one token after the other without a cache."""

    def __init__(self, case: Case, shelf: Shelf) -> None:
        self.directory: Path = shelf.checkpoint(case)
        self.preparer: Preparer = load_preparer(ModelSettings(model=str(self.directory)))
        self.images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
        model, processor = shelf.reference(case), shelf.processor(case)
        self.expected: list[list[int]] = []
        for text, which in PROMPTS:
            values = reference.inputs(processor, text, [self.images[i] for i in which])
            self.expected.append(greedy(model, values))
        for text in TEXTS:
            ids = torch.tensor([self.preparer.tokenizer.encode(text, True)])
            both = {"token_type_ids": torch.zeros_like(ids)} if case.kind is BOTH_WAYS[0].kind else {}
            self.expected.append(greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | both))

    def spec(self, i: int, **more: Any) -> Spec:
        text, which = (*PROMPTS, *((text, ()) for text in TEXTS))[i]
        files = tuple(encoded(self.images[image]) for image in which)
        given = {"sampling": Sampling(temperature=0.0), "stopping": Stopping(max_tokens=NEW, ignore_eos=True)}
        return Spec(text, files, **(given | more))

    def request(self, limits: Limits, i: int, **more: Any) -> Request:
        return self.preparer.prepare(self.spec(i, **more), limits)


@torch.inference_mode()
def greedy(model: nn.Module, values: dict[str, torch.Tensor]) -> list[int]:
    """Decodes without a KV cache. The images are encoded once: they are the same for each token."""
    tokens: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "get_image_features", remembered(model.model.get_image_features), raising=False)
        for _ in range(NEW):
            tokens.append(int(model(**values, use_cache=False).logits[0, -1].argmax()))
            last = torch.tensor([tokens[-1:]])
            ones = torch.ones_like(last)
            grown = {"input_ids": last, "attention_mask": ones, "token_type_ids": ones, "mm_token_type_ids": ones - 1}
            values = values | {key: torch.cat([values[key], more], 1) for key, more in grown.items() if key in values}
    return tokens


def remembered(encode: Callable[..., T]) -> Callable[..., T]:
    """Calls `encode` the first time, and returns that result again each later time."""
    made: list[T] = []

    def first(*args: object, **kwargs: object) -> T:
        if not made:
            made.append(encode(*args, **kwargs))
        return made[0]

    return first
