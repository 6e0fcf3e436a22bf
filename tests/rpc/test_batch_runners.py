"""Requests of a batch job to a server, over real channels: how they are packed into calls, and what a job waits for."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc

import rpc.batch.runners as runners
from rpc.batch.retries import JobStoppedError, RetryPolicy
from rpc.batch.runners import CALL_BYTES, CALL_ENTRIES, LocalRunner, ServerRunner, server_runner
from rpc.client.errors import QuireError, UnavailableError
from rpc.client.security import OPEN, Security
from rpc.frontend.errors import RequestFailed
from rpc.status import abort

FULL = RequestFailed("RESOURCE_EXHAUSTED", "QUEUE_FULL", "full", retry_after=0.25)
AWAY = RequestFailed("UNAVAILABLE", "", "connection reset")  # as gRPC itself says it, without details
STARTING = RequestFailed("UNAVAILABLE", "STARTING", "no engine yet", retry_after=1.0)


class Service(pb_grpc.GenerationServiceServicer, model_pb_grpc.ModelServiceServicer):
    """Answers each prompt with itself; says `failures` first, one a call."""

    def __init__(self, *failures: RequestFailed) -> None:
        self.calls: list[pb.BatchGenerateRequest] = []
        self.failures = list(failures)
        self.tokens: list[str] = []
        self.left_out: set[str] = set()

    async def BatchGenerate(self, request: pb.BatchGenerateRequest, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.calls.append(request)
        self._note(context)
        if self.failures:
            await abort(context, self.failures.pop(0))
        for position, one in enumerate(request.requests):
            if one.spec.text in self.left_out:
                continue
            result = pb.GenerateResponse(sequences=[pb.SequenceResult(text=one.spec.text)])
            yield pb.BatchGenerateResponse(position=position, response=result)

    def _note(self, context: Any) -> None:
        self.tokens.append(dict(context.invocation_metadata()).get("authorization", ""))

    async def ListModels(self, request: Any, context: Any) -> model_pb.ListModelsResponse:  # noqa: N802
        self._note(context)
        if self.failures:
            await abort(context, self.failures.pop(0))
        return model_pb.ListModelsResponse(models=[model_pb.Model(name="m")])


@asynccontextmanager
async def serving(service: Service | None) -> AsyncIterator[str]:
    """The address of a server that has this service, or none."""
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    if service is not None:
        pb_grpc.add_GenerationServiceServicer_to_server(service, server)
        model_pb_grpc.add_ModelServiceServicer_to_server(service, server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@asynccontextmanager
async def running(service: Service, security: Security = OPEN) -> AsyncIterator[ServerRunner]:
    async with serving(service) as address, server_runner(address, RetryPolicy(), security) as runner:
        yield runner


def request(text: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(spec=pb.GenerationSpec(text=text))


async def ask_models(runner: ServerRunner) -> list[str]:
    stub = model_pb_grpc.ModelServiceStub
    answer = await runner.ask(stub, "ListModels", model_pb.ListModelsRequest(), ())
    return [model.name for model in answer.models]


async def test_no_call_is_larger_than_every_server_takes() -> None:
    texts = [f"{i:04}" + i % 7 * 1500 * "x" for i in range(300)]
    service = Service()
    async with running(service) as runner:
        answers = await asyncio.gather(*(runner.run(request(text)) for text in texts))
    assert [answer.sequences[0].text for answer in answers] == texts
    assert sum(len(call.requests) for call in service.calls) == len(texts)
    sizes = [call.ByteSize() for call in service.calls]
    assert max(sizes) <= CALL_BYTES
    assert sorted(sizes)[len(sizes) // 2] > CALL_BYTES // 2, "calls are filled"


async def test_a_request_that_is_larger_than_a_call_goes_alone() -> None:
    texts, service = ["a", "x" * 2 * CALL_BYTES, "b"], Service()
    async with running(service) as runner:
        answers = await asyncio.gather(*(runner.run(request(text)) for text in texts))
    assert [answer.sequences[0].text for answer in answers] == texts
    assert [len(call.requests) for call in service.calls] == [1, 1, 1]


async def test_no_call_has_more_entries_than_a_server_runs_at_once() -> None:
    service = Service()
    async with running(service) as runner:
        await asyncio.gather(*(runner.run(request("a")) for _ in range(2 * CALL_ENTRIES + 1)))
    assert max(len(call.requests) for call in service.calls) == CALL_ENTRIES


async def test_a_call_that_is_refused_is_taken_apart() -> None:
    service = Service()
    async with running(service) as runner:
        service.failures = [RequestFailed("INVALID_ARGUMENT", "INVALID_FIELD", "too many", field="requests")]
        answers = await asyncio.gather(*(runner.run(request(text)) for text in "abc"))
    assert [answer.sequences[0].text for answer in answers] == ["a", "b", "c"]
    assert [len(call.requests) for call in service.calls] == [3, 1, 1, 1]


async def test_a_refused_call_of_one_request_says_what_the_server_says() -> None:
    service = Service()
    async with running(service) as runner:
        service.failures = [FULL]
        with pytest.raises(RequestFailed) as failed:
            await runner.run(request("a"))
    assert (failed.value.code, failed.value.reason, failed.value.retry_after) == (FULL.code, FULL.reason, 0.25)


async def test_an_entry_that_a_server_leaves_out_fails() -> None:
    service = Service()
    service.left_out = {"b"}
    async with running(service) as runner, asyncio.timeout(60):
        answers = await asyncio.gather(*(runner.run(request(text)) for text in "abc"), return_exceptions=True)
    assert [isinstance(answer, RequestFailed) for answer in answers] == [False, True, False]
    assert isinstance(answers[1], RequestFailed)
    assert answers[1].reason == "NOT_ANSWERED"


async def test_every_call_has_the_token() -> None:
    service = Service()
    async with running(service, Security("a" * 20)) as runner:
        await runner.run(request("a"))
        await ask_models(runner)
    assert service.tokens == ["Bearer " + "a" * 20] * 3


async def test_an_engine_of_the_job_s_own_runs_no_more_requests_than_it_has_places_for() -> None:
    """A line of several prompts has several requests."""
    running_now = most = 0

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[Any]:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        try:
            await asyncio.sleep(0)
            raise FULL
            yield
        finally:
            running_now -= 1

    limits = SimpleNamespace(sequences=2)
    frontend: Any = SimpleNamespace(info=SimpleNamespace(limits=limits), open=opened)
    runner = LocalRunner(frontend)
    ended = await asyncio.gather(*(runner.run(request("a")) for _ in range(50)), return_exceptions=True)
    assert ended == [FULL] * 50
    assert most == runner.in_flight == 4


async def test_what_a_server_says_of_itself_is_no_absence(caplog: pytest.LogCaptureFixture) -> None:
    """A server may load a model for longer than an absence is waited for."""
    service = Service()
    async with running(service) as runner:
        for failure in (STARTING, FULL):
            service.failures = [failure]
            with pytest.raises(RequestFailed, match=failure.message):
                await ask_models(runner)
            service.failures = [failure]
            ended = await asyncio.gather(*(runner.run(request(text)) for text in "abc"), return_exceptions=True)
            assert {type(end) for end in ended} == {RequestFailed}, "a call that may be tried again is not split"
        assert len(service.calls) == 2
    assert not caplog.messages


async def test_a_server_that_is_away_is_waited_for_and_one_that_is_full_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "PAUSE", 0.0)
    service = Service()
    async with running(service) as runner:
        service.failures = [AWAY] * 3
        assert await ask_models(runner) == ["m"]
        service.failures = [AWAY] * 3
        assert (await runner.run(request("a"))).sequences[0].text == "a"
        service.failures = [FULL]
        with pytest.raises(RequestFailed, match="full"):
            await ask_models(runner)
    assert [message.partition(" ")[2] for message in caplog.messages] == [
        "does not answer: connection reset; waiting for it, 60 s at most"
    ] * 2


async def test_a_server_that_stays_away_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "PAUSE", 0.0)
    monkeypatch.setattr("rpc.batch.retries.AWAY", 0.02)
    service = Service()
    async with running(service) as runner:
        service.failures = [AWAY] * 10**6
        with pytest.raises(JobStoppedError, match="nothing has succeeded"):
            await ask_models(runner)
        with pytest.raises(JobStoppedError, match="nothing has succeeded"):
            await runner.run(request("a"))


async def start(address: str) -> None:
    """Until the server has answered, however long a machine takes that is busy."""
    async with asyncio.timeout(60), server_runner(address, RetryPolicy()):
        pass


async def test_a_refused_connection_is_told_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "CONNECT", 10**6)
    with closing(socket.socket()) as bound:
        bound.bind(("127.0.0.1", 0))  # and not listening
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no server answers at {address}"):
            await start(address)


async def test_a_silent_server_is_missed_before_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runners, "SILENT", 0.01)
    monkeypatch.setattr(runners, "CONNECT", 0.1)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent, caplog.at_level(logging.WARNING):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=f"no server answers at {address}"):
            await start(address)
    assert caplog.messages == [f"{address} has not answered yet; giving up after 0.1 s"]


async def test_a_server_that_has_no_engine_yet_is_a_server() -> None:
    async with running(Service(STARTING)) as runner:
        assert (await runner.run(request("a"))).sequences[0].text == "a"


@pytest.mark.parametrize(
    ("service", "code"),
    [
        (None, grpc.StatusCode.UNIMPLEMENTED),
        (Service(RequestFailed("UNAUTHENTICATED", "NO_TOKEN", "a token is needed")), grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_a_server_that_takes_no_requests_stops_the_job(service: Service | None, code: grpc.StatusCode) -> None:
    async with serving(service) as address:
        with pytest.raises(QuireError) as refused:
            await start(address)
    assert refused.value.code is code
