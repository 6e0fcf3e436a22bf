"""TokenizationService turns text into ids and back, bounded, and beside the loop."""

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from quire.v1 import tokenization_service_pb2 as pb
from tokenizers.processors import TemplateProcessing

from model.inputs.tokenizer import Tokenizer
from rpc.access.tokens import Principal
from rpc.frontend.errors import RequestFailed
from rpc.frontend.prepare import Preparer
from rpc.services.tokenization import TokenizationService
from scheduler.limits import Limits, ModelDefaults
from tests.support.checkpoints import byte_tokenizer
from tests.support.frontends import make_frontend

LIMITS = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)


@pytest.fixture(scope="module")
def preparer() -> Preparer:
    """Makes the preparer of a tokenizer that starts each text with its special token."""
    library = byte_tokenizer()
    library.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    return Preparer("m", Tokenizer(library), ModelDefaults())


@pytest.mark.parametrize("text", ["", "the cat", " two  spaces ", "naïve — 日本語 👩‍👩‍👧", "a\x00b\r\n", "<|end|>"])
def test_text_comes_back(preparer: Preparer, text: str) -> None:
    ids = preparer.tokenize(text, False, "m", LIMITS)
    assert preparer.detokenize(ids, False, "", LIMITS) == text
    assert preparer.tokenize(text, True, "", LIMITS) == [0, *ids]


def test_special_tokens_are_skipped_or_shown(preparer: Preparer) -> None:
    ids = preparer.tokenize("cat<|end|>", True, "", LIMITS)
    assert ids[0] == ids[-1] == 0
    assert preparer.detokenize(ids, True, "", LIMITS) == "cat"
    assert preparer.detokenize(ids, False, "", LIMITS) == "<|end|>cat<|end|>"


def test_half_a_character_becomes_a_replacement_character(preparer: Preparer) -> None:
    ids = preparer.tokenize("é", False, "", LIMITS)
    assert len(ids) == 2
    assert preparer.detokenize(ids[:1], True, "", LIMITS) == "\ufffd"


@pytest.mark.parametrize(
    ("ids", "field", "limit"),
    [
        ([1, 320], "token_ids[1]", "must be in [0, 320)"),
        ([2**32 - 1], "token_ids[0]", "must be in [0, 320)"),
        ([-1], "token_ids[0]", "must be in [0, 320)"),
        ([1] * 257, "token_ids", "at most 256"),
    ],
)
def test_bad_ids_are_named(preparer: Preparer, ids: list[int], field: str, limit: str) -> None:
    with pytest.raises(RequestFailed, match=r"token_ids") as refused:
        preparer.detokenize(ids, True, "", LIMITS)
    assert (refused.value.code, refused.value.field) == ("INVALID_ARGUMENT", field)
    assert limit in refused.value.message


def test_bad_text_is_named(preparer: Preparer) -> None:
    for text, limit in (("x" * (2**16 + 1), "at most 65536 bytes"), ("\ud800", "is no Unicode text")):
        with pytest.raises(RequestFailed) as refused:
            preparer.tokenize(text, True, "", LIMITS)
        assert refused.value.field == "text"
        assert limit in refused.value.message


def test_another_model_is_not_found(preparer: Preparer) -> None:
    for call in (
        lambda: preparer.tokenize("a", True, "gpt-5", LIMITS),
        lambda: preparer.detokenize([1], True, "gpt-5", LIMITS),
    ):
        with pytest.raises(RequestFailed) as refused:
            call()
        assert (refused.value.code, refused.value.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")


async def test_work_is_done_beside_the_loop_bounded_and_not_while_draining(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer, max_preparing=1)
    release = threading.Event()
    waiting = asyncio.create_task(frontend.in_worker(lambda given: (given, release.wait(10))))
    await asyncio.sleep(0)
    with pytest.raises(RequestFailed) as refused:
        await frontend.in_worker(lambda _: None)
    assert refused.value.reason == "QUEUE_FULL"
    release.set()
    assert await waiting == (engine.info.limits, True)
    name = await frontend.in_worker(lambda _: threading.current_thread().name)
    assert name.startswith("quire-prepare")
    frontend.draining = True
    with pytest.raises(RequestFailed) as refused:
        await frontend.in_worker(lambda _: None)
    assert refused.value.reason == "DRAINING"
    assert await frontend.in_worker(lambda _: 1, of_live=True) == 1, "answers that are being given need texts"
    frontend.draining = False
    frontend.detach()
    assert await frontend.in_worker(lambda limits: limits) == engine.info.limits, "it takes no engine"
    frontend.shutdown()


class AnnsDoor:
    """Knows every caller as one tenant."""

    def authenticate(self, _context: object) -> Principal:
        return Principal("ann")


@pytest.mark.parametrize("method", ["Tokenize", "Detokenize"])
async def test_a_question_counts_as_its_caller_s(preparer: Preparer, method: str) -> None:
    tenants = list[str]()

    async def in_worker(task: Callable[[Limits], Any], tenant: str, **_: bool) -> Any:
        tenants.append(tenant)
        return task(LIMITS)

    frontend: Any = SimpleNamespace(preparer=preparer, in_worker=in_worker)
    door: Any = AnnsDoor()
    service = TokenizationService(frontend, door)
    request = pb.TokenizeRequest(text="cat") if method == "Tokenize" else pb.DetokenizeRequest(token_ids=[70])
    await getattr(service, method)(request, None)
    assert tenants == ["ann"]
