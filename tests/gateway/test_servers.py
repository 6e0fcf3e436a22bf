"""Choice among several servers, the time that each gets, and the cache of their answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc

from rpc.gateway import served as served_module
from rpc.gateway import upstream as upstream_module
from rpc.gateway.served import ServedModels
from rpc.gateway.upstream import Upstream

SERVING = health_pb2.HealthCheckResponse.SERVING


class Server(model_pb_grpc.ModelServiceServicer, health_pb2_grpc.HealthServicer, pb_grpc.GenerationServiceServicer):
    """Ends each question with a code, None for an answer. asked: questions. times: that streams had."""

    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        self.code, self.asked, self.times = code, 0, list[float]()

    async def ListModels(self, request: Any, context: aio.ServicerContext) -> model_pb.ListModelsResponse:  # noqa: N802
        self.asked += 1
        if self.code is not None:
            await context.abort(self.code, "no")
        return model_pb.ListModelsResponse(models=[model_pb.Model(name="m")])

    async def Check(self, request: Any, context: aio.ServicerContext) -> health_pb2.HealthCheckResponse:  # noqa: N802
        return health_pb2.HealthCheckResponse(status=SERVING if self.code is None else SERVING + 1)

    async def StreamGenerate(  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        self.times.append(context.time_remaining())
        yield pb.StreamGenerateResponse(deltas=[pb.SequenceDelta(finish_reason=pb.FINISH_REASON_STOP)])


@asynccontextmanager
async def upstream_of(*services: Server, request_time: float = 5.0) -> AsyncIterator[Upstream]:
    servers, addresses = [], []
    for service in services:
        server = aio.server()
        model_pb_grpc.add_ModelServiceServicer_to_server(service, server)
        health_pb2_grpc.add_HealthServicer_to_server(service, server)
        pb_grpc.add_GenerationServiceServicer_to_server(service, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    upstream = Upstream(addresses, request_time)
    try:
        yield upstream
    finally:
        await upstream.close()
        for server in servers:
            await server.stop(None)


async def ask(upstream: Upstream) -> str:
    request = model_pb.ListModelsRequest()
    answer = await upstream.ask(model_pb_grpc.ModelServiceStub, "ListModels", request, ())
    return str(answer.models[0].name)


async def test_the_one_that_answered_last_is_asked_first() -> None:
    lost, spare = Server(grpc.StatusCode.UNAVAILABLE), Server()
    async with upstream_of(lost, spare) as upstream:
        assert [await ask(upstream) for _ in range(3)] == ["m"] * 3
    assert (lost.asked, spare.asked) == (1, 3)


async def test_an_answer_that_is_an_error_is_the_answer() -> None:
    first, second = Server(grpc.StatusCode.UNAUTHENTICATED), Server()
    async with upstream_of(first, second) as upstream:
        with pytest.raises(grpc.RpcError) as refused:
            await ask(upstream)
    assert (refused.value.code(), second.asked) == (grpc.StatusCode.UNAUTHENTICATED, 0)


@pytest.mark.parametrize(("codes", "healthy"), [([None, None], True), ([None, ...], True), ([...], False)])
async def test_one_that_serves_is_enough(codes: list[Any], healthy: bool) -> None:
    services = [Server(None if code is None else grpc.StatusCode.UNAVAILABLE) for code in codes]
    async with upstream_of(*services) as upstream:
        assert await upstream.healthy() is healthy


async def test_a_server_has_time_to_say_that_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "GRACE", 10_000.0)
    server = Server()
    async with upstream_of(server, request_time=50.0) as upstream:
        request = pb.StreamGenerateRequest()
        assert len([message async for message in upstream.stream(request, ())]) == 1
    (left,) = server.times
    assert request.spec.max_time.ToSeconds() == 50
    assert left > 5000, "what is left of both, however slow this machine is"


class Texts:
    """In the place of servers. asked: detokenizations and lists of models. version: of the model."""

    def __init__(self) -> None:
        self.asked = {"Detokenize": 0, "ListModels": 0}
        self.version = 1

    async def ask(self, stub: type, method: str, request: Any, metadata: object) -> Any:
        self.asked[method] += 1
        if method == "ListModels":
            return model_pb.ListModelsResponse(models=[model_pb.Model(name="m", max_model_length=self.version)])
        return SimpleNamespace(text=f"v{self.version}t{request.token_ids[0]}" * len(request.token_ids))


async def test_texts_are_kept_for_each_version_of_a_model_and_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "MOST_TEXTS", 4)
    servers = Texts()
    served = ServedModels(servers)  # type: ignore[arg-type]
    assert await served.texts([1, 2, 1], "m", "fp_1", ()) == {1: "v1t1", 2: "v1t2"}
    assert await served.texts([2, 1], "m", "fp_1", ()) == {1: "v1t1", 2: "v1t2"}
    assert servers.asked["Detokenize"] == 2
    servers.version = 2
    assert await served.texts([1], "m", "fp_2", ()) == {1: "v2t1"}
    for token in range(50):
        await served.texts([token], "m", "fp_2", ())
    asked = servers.asked["Detokenize"]
    for token in range(50):
        await served.texts([token], "m", "fp_2", ())
    assert servers.asked["Detokenize"] >= asked + 46, "at most four of them were kept"


async def test_a_model_that_changes_is_known_a_minute_later(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(served_module, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0))
    servers = Texts()
    served = ServedModels(servers)  # type: ignore[arg-type]
    name, first = await served.model(None, ())
    servers.version = 2
    now[0] += served_module.FRESH
    assert await served.model("m", ()) == (name, first) == ("m", first)
    now[0] += 1
    assert (await served.model("m", ()))[1] != first
    assert servers.asked["ListModels"] == 2


class Failing:
    """Fails the first `times` calls with a code. live: calls that have not ended."""

    def __init__(self, code: grpc.StatusCode, times: int) -> None:
        self.code, self.times, self.live, self.most = code, times, 0, 0

    async def ask(self, stub: type, method: str, request: Any, metadata: object) -> Any:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            await asyncio.sleep(0)
            if self.times:
                self.times -= 1
                raise aio.AioRpcError(self.code, aio.Metadata(), aio.Metadata())
            if self.code is grpc.StatusCode.INTERNAL:
                await asyncio.Event().wait()
            return SimpleNamespace(text="a" * len(request.token_ids))
        finally:
            self.live -= 1


@pytest.mark.parametrize("code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE])
async def test_a_busy_tokenizer_costs_no_answer(code: grpc.StatusCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_module, "PAUSES", (0.0, 0.0))
    servers = Failing(code, 2 * served_module.AT_ONCE)
    texts = await ServedModels(servers).texts(range(20), "m", "fp_1", ())  # type: ignore[arg-type]
    assert texts == dict.fromkeys(range(20), "a")
    assert servers.most == served_module.AT_ONCE, "others have their turns"
    echoed = ServedModels(Failing(code, 2))  # type: ignore[arg-type]
    assert await echoed.detokenize([1, 2], "m", ()) == "aa"
    with pytest.raises(grpc.RpcError):
        await ServedModels(Failing(code, 10**6)).texts([1], "m", "fp_1", ())  # type: ignore[arg-type]


async def test_after_a_failure_no_call_goes_on() -> None:
    servers = Failing(grpc.StatusCode.INTERNAL, 1)
    with pytest.raises(grpc.RpcError):
        await ServedModels(servers).texts(range(5), "m", "fp_1", ())  # type: ignore[arg-type]
    for _ in range(3):
        await asyncio.sleep(0)
    assert servers.live == 0
