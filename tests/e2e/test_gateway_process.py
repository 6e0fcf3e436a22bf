"""A gateway as a process: clients that leave, servers that die, bounds, SIGTERM, what it passes on, TLS."""

import asyncio
import json
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.rpc.client.test_resuming_async import Scripted, message, serving
from tests.support.forking import run_quire
from tests.support.gateway import RunningGateway, read_answer, running_gateway
from tests.support.server import RunningServer, clean_environment, quire, running_server

PATH = "/v1/completions"
LONG = {"prompt": "ROMEO:", "max_tokens": 900, "ignore_eos": True, "temperature": 1}
EVERYWHERE = "0.0.0.0"  # noqa: S104 - with TLS, or refused
CANCELLED = 'quire_requests_total{cancelled}'  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--kv-cache-memory", str(1024 * 16 * 3072)) as running:
        yield running


@pytest.fixture(scope="module")
def gateway(server: RunningServer) -> Iterator[RunningGateway]:
    flags = ("--read-time", "1", "--max-body-bytes", "64KiB", "--max-calls", "8", "--max-prompts", "4")
    with running_gateway([server.address], *flags) as running:
        yield running


def is_cut_off(stream: socket.socket) -> bool:
    """Whether it ends without its last chunk."""
    came = b""
    with suppress(ConnectionResetError):
        while data := stream.recv(2**20):
            came = came[-10:] + data
    return not came.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(server: RunningServer, gateway: RunningGateway, stream: bool) -> None:
    before = server.metrics()[CANCELLED]
    with gateway.send(PATH, LONG | {"stream": stream, "n": 2}) as opened:
        server.wait_for_metric("quire_num_requests_running", 2)
        if stream:
            assert b"data: " in opened.recv(4096) + opened.recv(4096)
    server.wait_for_metric("quire_num_requests_running", 0)
    assert server.metrics()[CANCELLED] == before + 1
    assert gateway.answer(PATH, LONG | {"max_tokens": 2})[0] == 200


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_cut_off(server: RunningServer) -> None:
    with running_gateway([server.address], "--write-stall", "1") as gateway:
        before = server.metrics()[CANCELLED]
        body = json.dumps(LONG | {"stream": True, "n": 8, "logprobs": 20}).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            silent.connect((gateway.host, gateway.port))
            silent.sendall(head.encode() + body)
            server.wait_for_metric(CANCELLED, before + 1, 60)
            assert is_cut_off(silent)


def test_who_leaves_is_noticed_behind_more_bytes(server: RunningServer, gateway: RunningGateway) -> None:
    before = server.metrics()[CANCELLED]
    with gateway.send(PATH, LONG | {"n": 8}) as opened:
        server.wait_for_metric("quire_num_requests_running", 8)
        opened.sendall(b"G")
    server.wait_for_metric(CANCELLED, before + 1, 10)
    server.wait_for_metric("quire_num_requests_running", 0)  # the engine reports it with a later step


def test_of_requests_that_do_not_wait_the_first_is_answered(gateway: RunningGateway) -> None:
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.settimeout(20)
        silent.connect((gateway.host, gateway.port))
        with suppress(ConnectionError):
            silent.sendall(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n" * 10**5)
            came = b""
            while data := silent.recv(2**20):
                came += data
            assert came.count(b"HTTP/1.1 200") == 1


def test_a_stream_goes_on_with_the_next_server() -> None:
    asked: dict[str, Any] = {
        "prompt": "ROMEO:", "model": "quire-demo", "max_tokens": 600, "seed": 5, "temperature": 0.9,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    with (
        running_server() as first,
        running_server() as second,
        running_gateway([first.address, second.address]) as gateway,
        gateway.client() as client,
    ):
        with running_gateway([second.address]) as alone, alone.client() as other:
            expected = other.completions.create(**asked).choices[0].text
        text = ""
        for i, chunk in enumerate(client.completions.create(stream=True, **asked)):
            text += chunk.choices[0].text if chunk.choices else ""
            if i == 20:
                first.process.send_signal(signal.SIGKILL)
        assert text == expected
        first.process.wait()
        assert client.models.list().data[0].id == "quire-demo"
        stream = client.completions.create(stream=True, n=2, **asked)
        next(stream)
        second.process.send_signal(signal.SIGKILL)
        second.process.wait()
        with pytest.raises(openai.APIError, match="no server answers") as lost:
            list(stream)
        assert lost.value.type == "server_error"
        with pytest.raises(openai.InternalServerError) as gone:
            client.completions.create(**asked)
        assert gone.value.status_code == 503
        with pytest.raises(urllib.error.HTTPError) as unhealthy:
            urllib.request.urlopen(f"{gateway.url}/health", timeout=10)  # noqa: S310
        assert unhealthy.value.code == 503


def test_health_is_the_servers(gateway: RunningGateway) -> None:
    with urllib.request.urlopen(f"{gateway.url}/health", timeout=10) as answer:  # noqa: S310
        assert (answer.status, answer.read()) == (200, b"")


def test_sigterm_drains(server: RunningServer) -> None:
    with running_gateway([server.address]) as gateway, gateway.client() as client:
        stream = client.completions.create(
            model="quire-demo", prompt="A", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        gateway.process.terminate()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert gateway.process.wait(10) == 0
        with pytest.raises(ConnectionRefusedError):
            gateway.connect()


def test_what_takes_longer_than_the_drain_is_cut_off(server: RunningServer) -> None:
    before = server.metrics()[CANCELLED]
    with running_gateway([server.address], "--drain-time", "1") as gateway:
        waiting = gateway.send(PATH, LONG | {"n": 8})
        streaming = gateway.send(PATH, LONG | {"n": 8, "stream": True})
        server.wait_for_metric("quire_num_requests_running", 16)
        gateway.process.terminate()
        status, _, said = read_answer(waiting.makefile("rb").read())
        assert (status, said["error"]["message"]) == (503, "the gateway is shutting down")
        assert is_cut_off(streaming)
        assert gateway.process.wait(10) == 0
        waiting.close()
        streaming.close()
    server.wait_for_metric(CANCELLED, before + 2, 5)


def raw(gateway: RunningGateway, data: bytes, seconds: float = 10) -> bytes:
    """All that is answered to these bytes."""
    with gateway.connect() as opened:
        opened.settimeout(seconds)
        opened.sendall(data)
        return opened.makefile("rb").read()


POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"


def test_bounds_of_what_is_read(gateway: RunningGateway) -> None:
    status, _, said = gateway.answer(PATH, b'{"prompt": "' + b"a" * 70_000 + b'"}')
    assert (status, "--max-body-bytes" in said["error"]["message"]) == (413, True)
    assert gateway.answer(PATH, b"[" * 1000)[0] == 400
    assert gateway.answer(PATH, b"[1]")[2]["error"]["message"] == "the body must be a JSON object"
    assert gateway.answer(PATH, {"prompt": ["a"] * 5})[2]["error"]["param"] == "prompt"
    assert raw(gateway, b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 40_000).startswith(b"HTTP/1.1 431")
    assert raw(gateway, b"\x16\x03\x01 nonsense\r\n\r\n").startswith(b"HTTP/1.1 400")
    with gateway.connect() as silent, gateway.connect() as slow:
        slow.sendall(b"POST /v1/")
        for opened in (silent, slow):
            opened.settimeout(60)
            assert opened.recv(1) == b""
    assert raw(gateway, POST + b"content-length: 9\r\n\r\n{").startswith(b"HTTP/1.1 408")
    chunked = POST + b"transfer-encoding: chunked\r\n\r\n" + b"10000\r\n" + b" " * 65536 + b"\r\n1\r\n \r\n0\r\n\r\n"
    assert raw(gateway, chunked).startswith(b"HTTP/1.1 413")


def test_calls_are_bounded(gateway: RunningGateway, server: RunningServer) -> None:
    opened = [gateway.send(PATH, LONG | {"prompt": ["A"] * 4, "stream": True}) for _ in range(2)]
    server.wait_for_metric("quire_num_requests_running", 8)
    status, headers, said = gateway.answer(PATH, LONG)
    assert (status, headers["retry-after"], said["error"]["code"]) == (503, "1", "overloaded")
    for one in opened:
        one.close()
    server.wait_for_metric("quire_num_requests_running", 0)
    assert gateway.answer(PATH, LONG | {"max_tokens": 1})[0] == 200


def test_a_full_queue_says_when_to_come_again() -> None:
    flags = ("--max-sequences", "1", "--max-queue", "1", "--max-batched-tokens", "64")
    with running_server(*flags) as server, running_gateway([server.address]) as gateway:
        opened = []
        for number in (1, 2):
            opened.append(gateway.send(PATH, LONG | {"stream": True}))
            server.wait_until(lambda m: m["quire_num_requests_running"] + m["quire_num_requests_waiting"], number)
        status, headers, said = gateway.answer(PATH, LONG)
        assert (status, said["error"]["type"], said["error"]["code"]) == (429, "rate_limit_error", "queue_full")
        assert int(headers["retry-after"]) >= 1
        for one in opened:
            one.close()
        server.wait_for_metric("quire_num_requests_running", 0)


def test_what_no_path_takes(gateway: RunningGateway) -> None:
    def told(first: bytes, *more: bytes) -> tuple[int, dict[str, str], Any]:
        return read_answer(raw(gateway, b"\r\n".join([first + b" HTTP/1.1", b"host: a", *more, b"", b""])))

    end = b"connection: close"
    status, headers, said = told(b"GET /v1/nothing", end, b"x-request-id: mine")
    assert (status, headers["x-request-id"], said["error"]["code"]) == (404, "mine", "unknown_url")
    status, headers, said = told(b"GET /v1/completions", end)
    assert (status, headers["allow"], len(headers["x-request-id"])) == (405, "POST", 32)
    assert said["error"]["type"] == "invalid_request_error"
    assert told(b"GET /health/", end)[0] == 404
    status, headers, said = told(b"GET /health", end, b"x-request-id: a b")
    assert (status, len(headers["x-request-id"]), said["error"]["param"]) == (400, 32, "x-request-id")
    for name in (b"authorization", b"traceparent"):
        assert told(b"GET /v1/models", end, name + b":")[0] == 200
    for path, header in ((b"/health", b"x: " + b"a" * 2**14), (b"/v1/models", b"authorization: " + b"a" * 2**12)):
        status, _, said = told(b"GET " + path, end, header)
        assert (status, said["error"]["type"]) == (431, "invalid_request_error")
    both = POST.replace(b"connection: close\r\n", b"") + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
    named = both.replace(b"host: a", b"host: a\r\nx-request-id: a b")
    for asked, param in ((both, "content-length"), (named, "x-request-id")):
        status, headers, said = read_answer(raw(gateway, asked + b"0\r\n\r\n"))
        assert (status, headers["connection"], said["error"]["param"]) == (400, "close", param)
    status, _, said = read_answer(raw(gateway, POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n"))
    assert (status, said["error"]["type"]) == (400, "invalid_request_error")


def test_one_connection_too_many_is_told(server: RunningServer) -> None:
    with running_gateway([server.address], "--max-connections", "1") as gateway, gateway.connect() as held:
        ask = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
        held.sendall(ask)
        assert held.recv(4096).startswith(b"HTTP/1.1 200")
        with gateway.connect() as other, other.makefile("rb") as file:
            status, headers, said = read_answer(file.read())
        assert (status, headers["retry-after"], said["error"]["code"]) == (503, "1", "overloaded")
        held.sendall(ask[:-2] + b"connection: close\r\n\r\n")
        assert b"HTTP/1.1 200" in held.makefile("rb").read()


async def test_what_is_passed_on_and_comes_back() -> None:
    service = Scripted([message(1, end=True)], [message(1, end=True)])
    async with serving(service) as (addresses, _):

        def ask() -> None:
            with running_gateway(addresses) as gateway:
                headers = {"authorization": "Bearer abc", "traceparent": "00-ab-cd-01", "x_request_id": "mine/1"}
                status, sent, _ = gateway.answer(PATH, {"prompt": [1]}, **headers)
                assert (status, sent["x-request-id"]) == (200, "mine/1")
                status, sent, _ = gateway.answer(PATH, {"prompt": [1]})
                assert (status, len(sent["x-request-id"])) == (200, 32)
                for bad in ("a b", "ü", "a" * 97):
                    status, sent, said = gateway.answer(PATH, {"prompt": [1]}, x_request_id=bad)
                    assert (status, said["error"]["param"]) == (400, "x-request-id")
                status, _, said = gateway.answer(PATH, {"prompt": [1]}, authorization="Bearer ü")
                assert (status, said["error"]["param"]) == (400, "authorization")

        await asyncio.to_thread(ask)
    first, second = service.metadata
    assert (first["authorization"], first["traceparent"]) == ("Bearer abc", "00-ab-cd-01")
    assert "authorization" not in second
    assert service.asked[0].request_id.startswith("mine/1.0.")
    assert len({one.request_id for one in service.asked}) == 2


def test_wrong_addresses_end_the_start_and_torch_is_not_loaded() -> None:
    def fails(*flags: str) -> str:
        done = quire("gateway", "--port", "0", *flags)
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr
        return done.stderr

    assert "--host 0.0.0.0 can be reached from other machines, and there is no TLS" in fails("--host", EVERYWHERE)
    assert "the server's address is 'x', must be HOST:PORT" in fails("--server", "x")
    assert "--allow-origin is 'page.example', must be *, https://HOST" in fails("--allow-origin", "page.example")
    assert "--tls-key needs --tls-cert" in fails("--tls-key", "x")
    for remote in ("10.0.0.4:50051", "model:50051", "[fd00::4]:50051"):
        said = fails("--server", "127.0.0.1:50051", "--server", remote)
        assert f"--server {remote} is on another machine, and there is no TLS" in said
        assert "insist with --plaintext-token" in said
    assert "--tls-cert x with its key cannot be read" in fails("--tls-cert", "x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot be opened" in fails("--port", str(taken.getsockname()[1]))
    loaded = (
        "import sys, rpc.gateway.process; print(sorted({'torch', 'ray', 'triton', 'tokenizers'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_servers_elsewhere_that_may_be_asked() -> None:
    elsewhere = ["192.0.2.1:50051"]
    for flags in (("--plaintext-token",), ("--server-tls",)):
        with running_gateway(elsewhere, *flags) as gateway:
            assert gateway.health() == (503, None), "it has started, and its server does not exist"


def test_tls(server: RunningServer, tmp_path: Path) -> None:
    key, certificate, tokens = tmp_path / "key.pem", tmp_path / "cert.pem", tmp_path / "tokens"
    write_certificate(key, certificate)
    tokens.touch(0o600)
    tokens.write_text(f"ann {'a' * 20}\n")
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key), "--host", EVERYWHERE)
    open_door = run_quire("gateway", "--server", server.address, "--port", "0", *flags, env=clean_environment())
    assert open_door.returncode == 1
    assert "its servers ask for no token" in open_door.stderr
    with running_server("--token-file", str(tokens)) as guarded, running_gateway([guarded.address], *flags) as gateway:
        models = f"https://127.0.0.1:{gateway.port}/v1/models"
        known = urllib.request.Request(models, headers={"Authorization": f"Bearer {'a' * 20}"})
        trusting = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(known, timeout=10, context=trusting) as told:  # noqa: S310 - our own port
            assert told.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(models, timeout=10, context=trusting)
        assert gateway.scheme == "https"
        context = ssl.create_default_context(cafile=str(certificate))
        url = f"https://127.0.0.1:{gateway.port}/health"
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:
            assert answer.status == 200
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(url, timeout=10)


def write_certificate(key: Path, certificate: Path) -> None:
    """Writes a self-signed certificate of 127.0.0.1."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=quire", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
