"""Every rpc that is served has a policy, and what has none is closed."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpc.access.authentication import AuthenticationInterceptor
from rpc.access.policies import POLICIES, Policy
from rpc.access.tokens import AccessTokens
from rpc.observe.metrics import Metrics
from rpc.server import Server
from rpc.settings import ListenSettings
from rpc.web.process import DashboardServer
from scheduler.settings import ImageLimits
from tests.rpc.access.test_tokens import ANN, OPS, write
from tests.support.server import details

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
REQUEST = health_pb2.HealthCheckRequest()


class Health(health_pb2_grpc.HealthServicer):
    """Says whose calls come in."""

    def __init__(self) -> None:
        self.came: list[str] = []

    async def Check(self, request: object, context: aio.ServicerContext) -> health_pb2.HealthCheckResponse:  # noqa: N802
        self.came.append("Check")
        return health_pb2.HealthCheckResponse()

    async def Watch(self, request: object, context: aio.ServicerContext) -> None:  # noqa: N802
        self.came.append("Watch")
        await context.write(health_pb2.HealthCheckResponse())


def called(
    door: AuthenticationInterceptor, method: str, *metadata: tuple[str, str]
) -> tuple[grpc.StatusCode, str, list[str]]:
    """The code and reason of a call through the door, and what came in."""

    async def run() -> tuple[grpc.StatusCode, str, list[str]]:
        server, health = aio.server(interceptors=[door]), Health()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                try:
                    if method == "Check":
                        await stub.Check(REQUEST, metadata=metadata, timeout=20)
                    else:
                        async for _ in stub.Watch(REQUEST, metadata=metadata, timeout=20):
                            pass
                except grpc.RpcError as error:
                    found = details(error) if error.code() is not grpc.StatusCode.UNIMPLEMENTED else {}
                    return error.code(), getattr(found.get("ErrorInfo"), "reason", ""), health.came
                return grpc.StatusCode.OK, "", health.came
        finally:
            await server.stop(0)

    return asyncio.run(run())


@pytest.fixture
def tokens(tmp_path: Path) -> AccessTokens:
    return AccessTokens(write(tmp_path / "tokens", f"ann {ANN}", f"ops {OPS} operator"))


def authorization(token: str) -> tuple[str, str]:
    return "authorization", f"Bearer {token}"


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_what_has_no_policy_is_closed_to_everybody(tokens: AccessTokens, method: str) -> None:
    denied = list[str]()
    for door in (
        AuthenticationInterceptor(None, denied.append, {}),
        AuthenticationInterceptor(tokens, denied.append, {}),
    ):
        code, reason, came = called(door, method, authorization(OPS))
        assert (code, reason, came) == (grpc.StatusCode.PERMISSION_DENIED, "NO_POLICY", [])
    assert denied == ["no_policy", "no_policy"]


@pytest.mark.parametrize(
    ("policy", "token", "reason"),
    [
        (Policy.OPEN, "", ""),
        (Policy.CLIENT, "", "NO_TOKEN"),
        (Policy.CLIENT, ANN[:-1], "NO_TOKEN"),
        (Policy.CLIENT, ANN, ""),
        (Policy.CLIENT, OPS, ""),
        (Policy.OPERATOR, "", "NO_TOKEN"),
        (Policy.OPERATOR, ANN, "NO_OPERATOR"),
        (Policy.OPERATOR, OPS, ""),
    ],
)
@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_policy_holds(tokens: AccessTokens, policy: Policy, token: str, reason: str, method: str) -> None:
    denied = list[str]()
    door = AuthenticationInterceptor(tokens, denied.append, {CHECK: policy, WATCH: policy})
    code, found, came = called(door, method, *([authorization(token)] if token else []))
    codes = {"": "OK", "NO_TOKEN": "UNAUTHENTICATED", "NO_OPERATOR": "PERMISSION_DENIED"}
    assert (code.name, found) == (codes[reason], reason)
    assert came == ([] if reason else [method]), "the handler hears of it when it was let in, and only then"
    assert denied == ([reason.lower()] if reason else [])


def test_without_tokens_everybody_comes_in() -> None:
    door = AuthenticationInterceptor(None, lambda _: None, {CHECK: Policy.OPERATOR})
    assert called(door, "Check")[0] is grpc.StatusCode.OK


def test_probes_need_no_token_and_operators_alone_use_the_admin_service() -> None:
    assert [path for path, policy in POLICIES.items() if policy is Policy.OPEN] == [CHECK]
    of_admin = {policy for path, policy in POLICIES.items() if "AdminService" in path}
    assert of_admin == {Policy.OPERATOR}


class Registered:
    """In place of gRPC's server: takes note of what is served."""

    def __init__(self, interceptors: tuple[aio.ServerInterceptor, ...] = (), **_rest: object) -> None:
        self.paths, self.interceptors = set[str](), interceptors

    def add_registered_method_handlers(self, service: str, handlers: dict[str, object]) -> None:
        self.paths |= {f"/{service}/{method}" for method in handlers}

    def add_generic_rpc_handlers(self, made: tuple[tuple[str, dict[str, object]], ...]) -> None:
        for service, handlers in made:
            self.add_registered_method_handlers(service, handlers)


def test_each_rpc_that_is_served_has_a_policy_and_none_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.server.aio.server", Registered)
    monkeypatch.setattr(grpc, "method_handlers_generic_handler", lambda service, handlers: (service, handlers))
    frontend = SimpleNamespace(health=lambda: True, preparer=SimpleNamespace(images=None, name="m", context=100))
    server = Server(
        ListenSettings(reflection=True), ImageLimits(), frontend, Metrics("m"), SimpleNamespace(), DashboardServer
    )
    served = [server.public_services(), server.admin_services()]
    assert set.union(*(one.paths for one in served)) == POLICIES.keys()
    assert all(isinstance(one.interceptors[0], AuthenticationInterceptor) for one in served)
