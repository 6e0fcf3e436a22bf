"""The service over an engine that a test plays, with a client that reads when it likes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
import pytest
from grpc import aio

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.frontend import Frontend
from rpc.services.inference import pb
from rpc.services.inference.service import InferenceService
from scheduler.events import EndReason, Submit
from tests.rpc.inference.messages import request
from tests.support.frontends import PuppetEngine, make_frontend, outputs

ROWS = 8  # of a PuppetEngine


class Client:
    """Enough of grpc.aio's ServicerContext.

    Attributes:
        messages: Those that it has read.
        writes: How many writes the service has begun.
        asked: How many requests the service has taken.
        reads: Cleared where it takes no more messages.
    """

    def __init__(self) -> None:
        self.messages: list[pb.ModelStreamInferResponse] = []
        self.writes = self.asked = 0
        self.reads = asyncio.Event()
        self.reads.set()
        self.code: grpc.StatusCode | None = None
        self.said = ""

    def invocation_metadata(self) -> tuple:
        return ()

    async def requests(self, *messages: pb.ModelInferRequest) -> AsyncIterator[pb.ModelInferRequest]:
        for message in messages:
            self.asked += 1
            yield message

    def time_remaining(self) -> None:
        return None

    async def write(self, message: pb.ModelStreamInferResponse) -> None:
        self.writes += 1
        await self.reads.wait()
        self.messages.append(message)

    async def abort(self, code: grpc.StatusCode, details: str, _trailing: object) -> None:
        self.code, self.said = code, details
        raise aio.AbortError


def streamed(number: int, **parameters: int) -> pb.ModelInferRequest:
    message = request(text_input=[b"cat"], stream=True)
    message.id = str(number)
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    return message


def attempts_by_max_tokens(engine: PuppetEngine) -> dict[int, int]:
    """Returns the engine's attempts by their request. Threads prepare requests, so they are submitted in any order."""
    return {event.request.max_tokens: event.attempt for event in engine.sent if isinstance(event, Submit)}


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not what():
            await asyncio.sleep(0.001)


def play(tokenizer: Tokenizer, scene: Callable[..., Awaitable[None]], **settings: float) -> None:
    """scene: gets the service, its frontend, the engine and a client."""

    async def played() -> None:
        frontend, engine, _ = make_frontend(tokenizer, **settings)
        await scene(InferenceService(frontend), frontend, engine, Client())

    asyncio.run(asyncio.wait_for(played(), 30))


def statistics(service: InferenceService) -> tuple[int, int]:
    stats = service.statistics.message("m").inference_stats
    return stats.success.count, stats.fail.count


def test_a_stream_has_no_more_requests_in_the_engine_than_run_at_once(tokenizer: Tokenizer) -> None:
    async def scene(service: InferenceService, _: Frontend, engine: PuppetEngine, client: Client) -> None:
        count = 3 * ROWS
        call = asyncio.create_task(
            service.ModelStreamInfer(client.requests(*(streamed(i) for i in range(count))), client)
        )
        for ended in range(count):
            await until(lambda: len(engine.submitted()) == min(ended + ROWS, count))  # noqa: B023 - it is awaited here
            assert client.asked <= ended + ROWS + 1
            attempt = engine.submitted()[ended]
            engine.deliver(outputs([(attempt, 0, 70)], [(attempt, EndReason.LENGTH)], starts=[attempt], age=0.0))
            await until(lambda: len(client.messages) == ended + 1)  # noqa: B023
        await call
        assert {message.infer_response.id for message in client.messages} == {str(i) for i in range(count)}
        assert statistics(service) == (count, 0)
        assert service.statistics.queue.ns > 0

    play(tokenizer, scene)


def test_tokens_that_come_during_a_write_go_into_one_answer(tokenizer: Tokenizer) -> None:
    async def scene(service: InferenceService, _: Frontend, engine: PuppetEngine, client: Client) -> None:
        call = asyncio.create_task(service.ModelStreamInfer(client.requests(streamed(1)), client))
        await until(engine.submitted)
        (attempt,) = engine.submitted()
        client.reads.clear()
        engine.deliver(outputs([(attempt, 0, 70)]))
        await until(lambda: client.writes)
        for position in range(1, 4):
            engine.deliver(outputs([(attempt, position, 70 + position)]))
            await asyncio.sleep(0)
        engine.deliver(outputs([(attempt, 4, 74)], [(attempt, EndReason.LENGTH)]))
        client.reads.set()
        await call
        texts = [message.infer_response.raw_output_contents[0][4:].decode() for message in client.messages]
        assert len(texts) == 2
        assert "".join(texts) == tokenizer.decode(list(range(70, 75)), True)
        finals = [message.infer_response.parameters["triton_final_response"].bool_param for message in client.messages]
        assert finals == [False, True]

    play(tokenizer, scene)


def test_a_reader_who_stops_ends_the_call_and_all_that_it_has_in_the_engine(tokenizer: Tokenizer) -> None:
    async def scene(service: InferenceService, frontend: Frontend, engine: PuppetEngine, client: Client) -> None:
        client.reads.clear()
        messages = client.requests(*(streamed(i) for i in range(3)))
        call = asyncio.create_task(service.ModelStreamInfer(messages, client))
        await until(lambda: len(engine.submitted()) == 3)
        engine.deliver(outputs([(attempt, 0, 70) for attempt in engine.submitted()]))
        await until(lambda: not frontend.live_requests)
        assert not call.done(), "gRPC takes no status before the message that waits is read"
        client.reads.set()
        with pytest.raises(aio.AbortError):
            await call
        assert client.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "read nothing" in client.said
        assert sorted(engine.finished()) == sorted(engine.submitted())
        assert statistics(service) == (0, 3)

    play(tokenizer, scene, write_stall=0.2)


def test_a_backlog_fails_its_request_alone(tokenizer: Tokenizer) -> None:
    async def scene(service: InferenceService, _: Frontend, engine: PuppetEngine, client: Client) -> None:
        messages = client.requests(streamed(1, max_tokens=100), streamed(2, max_tokens=101))
        call = asyncio.create_task(service.ModelStreamInfer(messages, client))
        await until(lambda: len(engine.submitted()) == 2)
        by_max_tokens = attempts_by_max_tokens(engine)
        greedy, other = by_max_tokens[100], by_max_tokens[101]
        client.reads.clear()
        for position in range(9):
            engine.deliver(outputs([(greedy, position, 70)]))
        assert engine.finished() == [greedy]
        client.reads.set()
        await until(lambda: client.messages)
        engine.deliver(outputs([(other, 0, 70)], [(other, EndReason.LENGTH)]))
        await call
        failed, answered = client.messages
        assert "wait for this client to read them" in failed.error_message
        assert failed.infer_response.parameters["quire_error_reason"].string_param == "SLOW_READER"
        assert failed.infer_response.parameters["triton_final_response"].bool_param
        assert (failed.infer_response.id, answered.infer_response.id) == ("1", "2")
        assert not answered.error_message

    play(tokenizer, scene, backlog_tokens=8)


def test_requests_that_fail_say_so_and_the_stream_lives_on(tokenizer: Tokenizer) -> None:
    async def scene(service: InferenceService, _: Frontend, engine: PuppetEngine, client: Client) -> None:
        bad, other = streamed(2, top_k=-2), streamed(3)
        other.model_name = "m" * 5000
        call = asyncio.create_task(service.ModelStreamInfer(client.requests(bad, other, streamed(4)), client))
        await until(lambda: engine.submitted() and len(client.messages) == 2)
        engine.deliver(outputs(ends=[(engine.submitted()[0], EndReason.QUEUE_FULL)]))
        await call
        failures = {
            message.infer_response.id: {
                name.removeprefix("quire_error_"): value.string_param
                for name, value in message.infer_response.parameters.items()
                if name.startswith("quire_error_") and value.string_param
            }
            for message in client.messages
        }
        assert all(message.error_message for message in client.messages)
        assert failures["2"] == {"code": "INVALID_ARGUMENT", "reason": "INVALID_FIELD", "field": "top_k"}
        assert failures["3"] == {"code": "NOT_FOUND", "reason": "MODEL_NOT_FOUND", "field": "m" * 1000}
        assert failures["4"] == {"code": "RESOURCE_EXHAUSTED", "reason": "QUEUE_FULL"}
        assert statistics(service) == (0, 3)

    play(tokenizer, scene)


def test_a_cancelled_call_ends_its_requests(tokenizer: Tokenizer) -> None:
    async def scene(service: InferenceService, frontend: Frontend, engine: PuppetEngine, client: Client) -> None:
        unary = asyncio.create_task(service.ModelInfer(streamed(1), client))
        messages = client.requests(streamed(2), streamed(3))
        call = asyncio.create_task(service.ModelStreamInfer(messages, client))
        await until(lambda: len(engine.submitted()) == 3)
        for task in (unary, call):
            task.cancel()
        assert [type(e) for e in await asyncio.gather(unary, call, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 2
        assert sorted(engine.finished()) == sorted(engine.submitted())
        assert frontend.live_requests == 0
        assert statistics(service) == (0, 3)

    play(tokenizer, scene)
