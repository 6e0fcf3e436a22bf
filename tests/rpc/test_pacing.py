"""Large work on the event loop lets others run."""

import asyncio
import time

import numpy as np
import pytest

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.pacing import Pacer, Work
from scheduler.events import End, EndReason, StepOutputs
from scheduler.parameters import Beam, Output, Sampling
from scheduler.spec import Spec
from tests.support.frontends import make_frontend, outputs

SEARCH = Spec("cat", sampling=Sampling(beam=Beam(2), sequence_count=2), output=Output(logprobs=True))
LENGTH = 40


def work(log: list[str], name: str, pieces: int) -> Work[str]:
    for i in range(pieces):
        log.append(f"{name}{i}")
        yield
    return name


async def test_small_work_is_done_in_its_first_turn() -> None:
    log: list[str] = []
    task = asyncio.create_task(Pacer(turn=60).run(work(log, "a", 1000)))
    await asyncio.sleep(0)
    assert task.done()
    assert (await task, len(log)) == ("a", 1000)


async def test_others_run_between_two_turns() -> None:
    log: list[str] = []

    async def others() -> None:
        while True:
            log.append("-")
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    assert await Pacer(turn=0).run(work(log, "a", 5)) == "a"
    running.cancel()
    assert log == ["a0", "-", "a1", "-", "a2", "-", "a3", "-", "a4", "-"]


async def test_one_large_piece_of_work_runs_at_a_time() -> None:
    log: list[str] = []
    pacer = Pacer(turn=0)
    await asyncio.gather(pacer.run(work(log, "a", 4)), pacer.run(work(log, "b", 4)))
    assert log == ["a0", "b0", "a1", "a2", "a3", "b1", "b2", "b3"]


async def test_what_work_raises_is_raised_and_the_next_goes_on() -> None:
    log: list[str] = []
    pacer = Pacer(turn=0)

    def failing() -> Work[None]:
        yield
        raise ValueError("a")

    first, second = await asyncio.gather(pacer.run(failing()), pacer.run(work(log, "b", 3)), return_exceptions=True)
    assert isinstance(first, ValueError)
    assert second == "b"


async def test_work_that_is_cancelled_is_closed_and_the_next_goes_on() -> None:
    log: list[str] = []
    pacer, closed = Pacer(turn=0), asyncio.Event()

    def endless() -> Work[None]:
        try:
            while True:
                yield
        finally:
            closed.set()

    first = asyncio.create_task(pacer.run(endless()))
    second = asyncio.create_task(pacer.run(work(log, "b", 3)))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "b"
    assert closed.is_set()


def found(attempt: int, length: int = LENGTH, reason: EndReason = EndReason.LENGTH) -> StepOutputs:
    """The result of a search: two sequences of this number of tokens, and their ends."""
    step = outputs([(attempt, position, 70 + index) for index in range(2) for position in range(length)])
    indices = np.repeat(np.arange(2, dtype=np.int32), length)
    ends = tuple(End(attempt, reason, index=index, more=index < 1) for index in range(2))
    return StepOutputs(**{f: getattr(step, f) for f in step.__slots__} | {"indices": indices, "ends": ends})


async def test_a_stream_gets_its_token_while_a_search_is_read(tokenizer: Tokenizer) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    frontend.pacer.turn = 0
    async with (
        frontend.open(SEARCH, "search", None, streaming=False) as search,
        frontend.open(Spec("cat"), "plain", None) as plain,
    ):
        first, second = engine.submitted()
        engine.deliver(found(first))
        engine.deliver(outputs([(second, 0, 71)]))
        await plain.wait()
        assert [delta.token_ids for delta in plain.stream.take()] == [[71]]
        assert not search.stream.ended, "it waited for the search"
        await asyncio.sleep(0)
        assert 0 < search.stream.token_count < LENGTH, "a turn reads no more than it has time for"
        await search.wait()
        assert search.stream.ended
        taken = search.stream.take()
        assert [delta.token_ids for delta in taken] == [[70] * LENGTH, [71] * LENGTH]
        assert [len(delta.logprobs) for delta in taken] == [LENGTH, LENGTH]
    assert engine.finished() == [second], "the search had ended"
    value = metrics.registry.get_sample_value
    assert value("quire_generation_tokens_total", {"model_name": "m"}) == 2 * LENGTH + 1
    assert value("quire_requests_total", {"model_name": "m", "outcome": "length"}) == 1


async def test_a_search_has_its_tokens_when_they_came_and_not_when_they_are_read(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    frontend.pacer.turn = 0
    async with frontend.open(SEARCH, "search", None, streaming=False) as search:
        before = time.monotonic()
        engine.deliver(found(engine.submitted()[0]))
        after = time.monotonic()
        await search.wait()
        assert before <= min(search.first_tokens.values()) <= max(search.last_tokens.values()) <= after


async def test_a_client_that_leaves_while_its_search_is_read_harms_nobody(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    frontend, engine, metrics = make_frontend(tokenizer)
    frontend.pacer.turn = 0
    async with frontend.open(SEARCH, "search", None, streaming=False) as search:
        engine.deliver(found(engine.submitted()[0]))
        await asyncio.sleep(0)
        assert not search.stream.ended
    assert (frontend.live_requests, frontend.dispatch.delivery.results_being_read) == (0, 0)
    assert metrics.registry.get_sample_value("quire_requests_total", {"model_name": "m", "outcome": "cancelled"}) == 1
    async with frontend.open(SEARCH, "search", None, streaming=False) as search:
        engine.deliver(found(engine.submitted()[1]))
        await search.wait()
        assert search.stream.ended
    assert caplog.messages == [], "the result of the one that left was read on"
    assert metrics.registry.get_sample_value("quire_generation_tokens_total", {"model_name": "m"}) == 2 * LENGTH


async def test_a_search_that_cannot_be_read_fails_alone(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(SEARCH, "search", None, streaming=False) as search:
        (attempt,) = engine.submitted()
        step = found(attempt)
        step.positions[3] = 9
        engine.deliver(step)
        await search.wait()
        assert search.stream.failure is not None
        assert search.stream.failure.code == "INTERNAL"


async def test_a_search_without_tokens_ends_as_any_request(tokenizer: Tokenizer) -> None:
    frontend, engine, _ = make_frontend(tokenizer)
    async with frontend.open(SEARCH, "search", None, streaming=False) as search:
        (attempt,) = engine.submitted()
        engine.deliver(found(attempt, length=0, reason=EndReason.FAULT))
        await search.wait()
        assert search.stream.failure is not None
