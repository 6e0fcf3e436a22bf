"""The HTTP server of the metrics bounds the count of readers, and the time of each."""

import socket
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from rpc.observe.metrics_http import MOST_READERS, MetricsHandler, serve_metrics


@pytest.fixture
def port() -> Iterator[int]:
    server = serve_metrics(0, CollectorRegistry())
    yield server.server_port
    server.shutdown()
    server.server_close()


def silent(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return answer.status


def is_hung_up_on(reader: socket.socket) -> bool:
    try:
        return reader.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_is_one_too_many_is_hung_up_on(port: int) -> None:
    readers = [silent(port) for _ in range(MOST_READERS)]
    assert is_hung_up_on(silent(port))
    for reader in readers:
        reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        while reader.recv(2**16):
            pass
    assert read(port) == 200


def test_who_says_nothing_makes_room(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MetricsHandler, "timeout", 0.1)
    for reader in [silent(port) for _ in range(MOST_READERS)]:
        assert is_hung_up_on(reader)
    assert read(port) == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_any_name_of_this_machine_will_do(host: str) -> None:
    server = serve_metrics(0, CollectorRegistry(), host)
    bracketed = f"[{host}]" if ":" in host else host
    with urllib.request.urlopen(f"http://{bracketed}:{server.server_port}/metrics", timeout=30) as answer:
        assert answer.status == 200
    server.shutdown()
    server.server_close()
