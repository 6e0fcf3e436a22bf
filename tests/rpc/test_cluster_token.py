"""A server checks a Ray cluster before it joins it, here a stand-in for its control service."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from model.parallel.sockets import host_port
from rpc.cluster.token import check_cluster
from rpc.settings import EngineSettings
from tests.support.ranks import needs_ipv6

each = pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])


class Control(grpc.GenericRpcHandler):
    """Lets in callers that show this token; all callers where there is none."""

    def __init__(self, token: str) -> None:
        self._wanted = f"Bearer {token}" if token else ""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        assert details.method == "/ray.rpc.NodeInfoGcsService/CheckAlive"
        shown = dict(details.invocation_metadata).get("authorization", "")

        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            if self._wanted and shown != self._wanted:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def control(host: str, token: str) -> Iterator[str]:
    """Its address, as --ray-address takes it."""
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Control(token)])
    port = server.add_insecure_port(host_port(host, 0))
    server.start()
    try:
        yield host_port(host, port)
    finally:
        server.stop(None).wait()


@each
def test_a_cluster_is_asked_at_an_address_of_either_kind(host: str, tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("secret\n")
    with control(host, "secret") as address:
        assert EngineSettings(ray_address=address).ray_address == address
        check_cluster(address, str(file))
    with control(host, "another") as address, pytest.raises(ValueError, match="refuses the token of"):
        check_cluster(address, str(file))
    with control(host, "") as address, pytest.raises(ValueError, match="asks for no token"):
        check_cluster(address, str(file))


@each
def test_where_no_cluster_is_that_is_said(host: str, tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("secret\n")
    address = host_port(host, 1)
    with pytest.raises(ValueError, match=r"no Ray cluster answers there \(unavailable\)"):
        check_cluster(address, str(file), 2.0)


def test_a_server_that_is_no_ray_cluster_is_said_to_be_none(tmp_path: Path) -> None:
    (file := tmp_path / "token").write_text("secret\n")
    server = grpc.server(ThreadPoolExecutor(1))
    address = host_port("127.0.0.1", server.add_insecure_port("127.0.0.1:0"))
    server.start()
    try:
        with pytest.raises(ValueError, match=r"no Ray cluster answers there \(unimplemented\)"):
            check_cluster(address, str(file))
    finally:
        server.stop(None).wait()


def test_a_proxy_of_the_environment_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token would go there. Nothing listens at its address, so `check_cluster` would raise."""
    (file := tmp_path / "token").write_text("secret\n")
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with control("127.0.0.1", "secret") as address:
        check_cluster(address, str(file), 5.0)


@pytest.mark.parametrize("address", ["::1:6379", "::1", "[::1]", "host", "http://host:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        EngineSettings(ray_address=address)
