"""A server's ports are open while its engines start, and answer that they do."""

import asyncio
import re
import socket
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import admin_service_pb2 as admin_pb
from quire.v1 import admin_service_pb2_grpc as admin_pb_grpc
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc
from quire.v1 import model_service_pb2 as model_pb
from quire.v1 import model_service_pb2_grpc as model_pb_grpc
from quire.v1 import tokenization_service_pb2 as tokenization_pb
from quire.v1 import tokenization_service_pb2_grpc as tokenization_pb_grpc

from model.inputs.tokenizer import Tokenizer
from rpc.frontend.frontend import Frontend
from rpc.frontend.prepare import Preparer
from rpc.frontend.settings import FrontendSettings
from rpc.observe.metrics import Metrics
from rpc.server import Server
from rpc.services.health import LIVENESS
from rpc.settings import ListenSettings
from rpc.web.process import DashboardServer
from scheduler.limits import ModelDefaults
from scheduler.settings import ImageLimits
from scheduler.spec import Spec
from tests.support.frontends import PuppetEngine
from tests.support.links import eventually
from tests.support.server import READY, details, stream_request

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
FREE = {"port": 0, "metrics_port": 0, "admin_port": 0, "dashboard_port": 0}


class SlowFleet:
    """Two engines, the second of which comes when the test says so."""

    summary = ""

    def __init__(self, frontend: Frontend) -> None:
        self.frontend, self.goes_on, self.asked = frontend, asyncio.Event(), False

    async def start(self) -> None:
        self.asked = True
        self.frontend.attach(PuppetEngine(), 0)
        await self.goes_on.wait()
        self.frontend.attach(PuppetEngine(), 1)

    async def stop(self) -> None:
        self.frontend.close()


@asynccontextmanager
async def started(tokenizer: Tokenizer, **listen: int) -> AsyncIterator[tuple[Server, SlowFleet]]:
    metrics = Metrics("m")
    frontend = Frontend(Preparer("m", tokenizer, ModelDefaults(), context=256), FrontendSettings(), metrics)
    fleet = SlowFleet(frontend)
    server = Server(ListenSettings(**(FREE | listen)), ImageLimits(), frontend, metrics, fleet, DashboardServer)
    try:
        yield server, fleet
    finally:
        await server.close()


async def refusal(call: aio.UnaryUnaryCall) -> tuple[grpc.StatusCode, str, int]:
    """Its code, reason, and after how many seconds a client may come again."""
    with pytest.raises(aio.AioRpcError) as refused:
        await call
    found = details(as_call(refused.value))
    return refused.value.code(), found["ErrorInfo"].reason, found["RetryInfo"].retry_delay.seconds


def as_call(error: aio.AioRpcError) -> SimpleNamespace:
    return SimpleNamespace(
        code=error.code, details=error.details, trailing_metadata=lambda: tuple(error.trailing_metadata())
    )


async def test_until_it_is_ready_it_answers_that_it_starts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tokenizer) as (server, fleet):
        said = list[str]()
        opened = server.open_ports

        async def noted() -> str:
            said.append(await opened())
            return said[0]

        monkeypatch.setattr(server, "open_ports", noted)
        starting = asyncio.create_task(server.start())
        await eventually(lambda: fleet.asked)
        _, address, metrics, admin, page = READY.search(f"quire: ready: model m (), {said[0]}").groups()
        async with aio.insecure_channel(address) as channel, aio.insecure_channel(admin) as of_admin:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            assert (await watch.read()).status == NOT_SERVING
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
            assert (await health.Check(health_pb2.HealthCheckRequest(service=LIVENESS))).status == SERVING
            spec = stream_request("cat", 1).spec
            for call in (
                pb_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(spec=spec)),
                tokenization_pb_grpc.TokenizationServiceStub(channel).Tokenize(
                    tokenization_pb.TokenizeRequest(text="cat")
                ),
            ):
                assert await refusal(call) == (grpc.StatusCode.UNAVAILABLE, "STARTING", 1)
            replicas = await admin_pb_grpc.AdminServiceStub(of_admin).ListReplicas(admin_pb.ListReplicasRequest())
            assert [replica.number for replica in replicas.replicas] == [0]
            for url, shown in ((metrics, "quire_replicas{"), (page, "<html")):
                assert shown in await asyncio.to_thread(read, url)
            assert not starting.done()
            fleet.goes_on.set()
            assert (await starting).endswith(said[0])
            assert (await watch.read()).status == SERVING
            models = await model_pb_grpc.ModelServiceStub(channel).ListModels(model_pb.ListModelsRequest())
            assert [model.name for model in models.models] == ["m"]


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310 - our own loopback port
        text: str = answer.read().decode()
        return text


@pytest.mark.parametrize("name", sorted(FREE))
async def test_a_port_in_use_ends_the_start_before_an_engine_is_started(tokenizer: Tokenizer, name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with started(tokenizer, **{name: port}) as (server, fleet):
            flag = "--" + name.replace("_", "-")
            with pytest.raises(
                OSError, match=f"^{re.escape(flag)} {port} on 127.0.0.1 cannot be opened: Address already"
            ):
                await server.start()
            assert not fleet.asked


async def test_an_address_of_another_machine_is_reported_as_such(tokenizer: Tokenizer) -> None:
    metrics = Metrics("m")
    frontend = Frontend(Preparer("m", tokenizer, ModelDefaults()), FrontendSettings(), metrics)
    listen = ListenSettings("192.0.2.1", 0, 0, allow_insecure_bind=True, admin_port=0)
    server = Server(listen, ImageLimits(), frontend, metrics, SlowFleet(frontend), DashboardServer)
    with pytest.raises(OSError, match=r"^--port 0 on 192\.0\.2\.1 cannot be opened: Cannot assign requested address$"):
        await server.start()
    await server.close()


async def test_a_drain_tells_how_to_cut_off_and_a_second_signal_does(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "quire.server")
    async with started(tokenizer) as (server, fleet):
        fleet.goes_on.set()
        await server.start()
        async with fleet.frontend.open(Spec("cat"), "r", None):
            server.stop()
            draining = asyncio.create_task(server.drain())
            await eventually(lambda: caplog.messages)
            assert caplog.messages == ["draining: 1 requests are live, SIGTERM or Ctrl-C once more cuts them off"]
            assert not draining.done()
            server.stop()
            await draining
        assert caplog.messages[1:] == ["cutting off 1 requests that did not end in time"]
