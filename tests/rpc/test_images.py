"""Costs of images for a frontend are bounded: time until a refusal, memory while they are served, others' threads."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from model.inputs.images import Pixels
from model.inputs.tokenizer import Tokenizer
from model.inputs.vision.inputs import ImageInputs
from model.inputs.vision.processed import ProcessedImage
from model.inputs.vision.prompts import Repeated
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from scheduler.events import Submit
from scheduler.spec import Spec
from tests.model.vision.pictures import encoded, picture
from tests.support.frontends import PuppetEngine, make_frontend

PLACEHOLDER, TILE = 7, np.zeros((1, 3, 8, 8), np.uint8)
FILE = encoded(picture(8, 8))


def spec(images: int, tokens: int = 2) -> Spec:
    return Spec((1, *[PLACEHOLDER] * (tokens * images), 2), images=(FILE,) * images)


def seeing(
    tokenizer: Tokenizer, cut: Sequence[str], tokens: int = 2, **settings: float
) -> tuple[Frontend, PuppetEngine]:
    """cut: gets the name of the thread that cuts an image. tokens: of an image."""
    frontend, engine, _ = make_frontend(tokenizer, **settings)

    def to_tiles(pixels: Pixels) -> ProcessedImage:
        cut.append(threading.current_thread().name)
        return ProcessedImage(TILE, (1, tokens))

    images = ImageInputs(to_tiles, Repeated("<image>"), PLACEHOLDER)
    frontend.preparer = replace(frontend.preparer, images=images)
    return frontend, engine


async def test_images_are_decoded_in_threads_of_their_own(tokenizer: Tokenizer) -> None:
    cut: list[str] = []
    frontend, engine = seeing(tokenizer, cut)
    async with frontend.open(spec(2), "a", None):
        (event,) = engine.sent
        assert isinstance(event, Submit)
        assert event.request.image_bytes == 2 * TILE.nbytes
    assert len(cut) == 2
    assert all(name.startswith("quire-prepare-images") for name in cut)


async def test_images_that_cannot_fit_are_not_all_decoded(tokenizer: Tokenizer) -> None:
    cut: list[str] = []
    frontend, engine = seeing(tokenizer, cut, tokens=100)  # of the 256 of the context
    with pytest.raises(RequestFailed, match=r"images\[2\] is 'token 300 of the images': .* in 256 tokens"):
        async with frontend.open(spec(8), "a", None):
            pass
    assert len(cut) == 3
    assert engine.sent == []


async def test_memory_of_images_is_bounded_and_freed(tokenizer: Tokenizer) -> None:
    frontend, _ = seeing(tokenizer, [], image_memory=3 * TILE.nbytes)
    async with frontend.open(spec(2), "a", None):
        async with frontend.open(spec(1), "b", None), frontend.open(Spec("no image"), "c", None):
            with pytest.raises(RequestFailed, match="576 bytes of images are held, the limit is 576") as refused:
                async with frontend.open(spec(1), "d", None):
                    pass
            assert (refused.value.reason, refused.value.retry_after) == ("QUEUE_FULL", 1.0)
        async with frontend.open(spec(1), "d", None):
            pass
    with pytest.raises(RequestFailed, match="images is '768 bytes in memory': at most 576 bytes"):
        async with frontend.open(spec(4), "e", None):
            pass
    async with frontend.open(spec(3), "e", None):
        pass


async def test_no_tenant_has_more_than_half_of_the_memory_of_images(tokenizer: Tokenizer) -> None:
    frontend, _ = seeing(tokenizer, [], image_memory=4 * TILE.nbytes)
    async with frontend.open(replace(spec(2), tenant="ann"), "a", None):
        with pytest.raises(RequestFailed, match="384 bytes of images are held for 'ann', the limit for one") as full:
            async with frontend.open(replace(spec(1), tenant="ann"), "b", None):
                pass
        assert (full.value.reason, full.value.retry_after) == ("QUEUE_FULL", 1.0)
        async with frontend.open(replace(spec(2), tenant="bob"), "a", None):
            pass
    with pytest.raises(RequestFailed, match="at most 384 bytes"):
        async with frontend.open(replace(spec(3), tenant="ann"), "c", None):
            pass


async def test_what_is_kept_of_an_image_is_shared_within_a_tenant_and_salt_alone(tokenizer: Tokenizer) -> None:
    """Its digest names pages of KV and encoded features: a hit would show that another tenant sent the same picture."""
    frontend, engine = seeing(tokenizer, [])
    scopes = [("ann", ""), ("bob", ""), ("ann", "s"), ("ann", "t"), ("ann", "s" * 64), ("a" * 64, "s" * 64)]
    digests = {}
    for tenant, salt in [*scopes, *scopes]:
        engine.sent.clear()
        async with frontend.open(replace(spec(1), tenant=tenant, cache_salt=salt), "a", None):
            event = engine.sent[0]
            assert isinstance(event, Submit)
            (image,) = event.request.images
            assert digests.setdefault((tenant, salt), image.digest) == image.digest
            assert event.request.scope.images == (image.span,)
    assert len(set(digests.values())) == len(scopes)
