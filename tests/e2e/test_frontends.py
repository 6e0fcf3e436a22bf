"""Several frontends over the same engines, as processes: streams outlive engines, frontends and servers."""

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from quire.v1 import generation_service_pb2 as pb

from rpc.client import Client
from tests.support.forking import run_quire
from tests.support.processes import tree
from tests.support.server import RunningServer, running_frontend, running_server, stream_request
from tests.support.watching_client import histories_of, outputs_of, until_running, watching

STREAMS, TOKENS = 4, 400
ENGINE = "rpc.engines.engine_process"


@contextmanager
def serving(address: str, replicas: int = 2) -> Iterator[RunningServer]:
    flags = ["--replicas", str(replicas), "--kv-cache-memory", "64MiB", "--join-address", address]
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"unix:{tmp_path_factory.mktemp('join')}/table"


@pytest.fixture(scope="module")
def frontends(address: str) -> Iterator[tuple[RunningServer, RunningServer]]:
    """The server, and one that has joined it."""
    with serving(address) as server, running_frontend(address) as guest:
        yield server, guest


@pytest.fixture(scope="module")
def expected(frontends: tuple[RunningServer, RunningServer]) -> list[dict]:
    """Results of undisturbed streams."""
    process = watching(frontends[0].address, STREAMS, TOKENS)
    until_running(process)
    return outputs_of(histories_of(process, STREAMS))


def engines(server: RunningServer) -> list[psutil.Process]:
    return [process for process in tree(server.process.pid) if ENGINE in process.cmdline()]


@pytest.mark.slow
def test_streams_of_all_frontends_outlive_an_engine(
    frontends: tuple[RunningServer, RunningServer], expected: list[dict]
) -> None:
    server, _ = frontends
    processes = [watching(one.address, STREAMS, TOKENS) for one in frontends]
    for process in processes:
        until_running(process)
    engines(server)[1].kill()
    for process in processes:
        assert outputs_of(histories_of(process, STREAMS)) == expected
    for one in frontends:
        one.wait_for_metric("quire_replicas", 2)
    assert "quire_kv_pages_used" not in frontends[1].metrics(), "engines are shown once"
    assert [one.metrics()["quire_replicas_wanted"] for one in frontends] == [2, 0], "by this dashboards count them once"


def test_streams_of_a_frontend_outlive_a_restart_of_an_engine(
    frontends: tuple[RunningServer, RunningServer], expected: list[dict]
) -> None:
    server, guest = frontends
    process = watching(guest.address, STREAMS, TOKENS)
    until_running(process)
    assert run_quire("admin", "restart", "0", "--server", server.admin).returncode == 0
    assert outputs_of(histories_of(process, STREAMS)) == expected


@pytest.mark.slow
def test_a_client_whose_frontend_dies_goes_on_with_another(
    frontends: tuple[RunningServer, RunningServer], address: str
) -> None:
    server, guest = frontends
    request = stream_request("ROMEO:", 1000, temperature=0.9, seed=5)
    expected = [
        token for message in Client(guest.address, timeout=60).stream_request(request) for token in ids_of(message)
    ]
    with running_frontend(address) as dying:
        stream, found = Client([dying.address, server.address], timeout=60).stream_request(request), []
        for message in stream:
            found += ids_of(message)
            if len(found) > 20 and dying.process.poll() is None:
                dying.process.kill()
                dying.process.wait()
    assert found == expected
    assert stream.server == server.address
    server.wait_for_metric("quire_num_requests_running", 0)  # the engines have let go of what the dead one had


def ids_of(message: pb.StreamGenerateResponse) -> list[int]:
    return [token for delta in message.deltas for token in delta.token_ids]


def test_streams_of_a_frontend_outlive_the_server(tmp_path: Path, expected: list[dict]) -> None:
    """Another one comes to the place of its table."""
    address = f"unix:{tmp_path}/table"
    with ExitStack() as stack:
        first = stack.enter_context(serving(address, replicas=1))
        guest = stack.enter_context(running_frontend(address))
        process = watching(guest.address, STREAMS, TOKENS)
        until_running(process)
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(60)
        stack.enter_context(serving(address, replicas=1))
        assert outputs_of(histories_of(process, STREAMS)) == expected


def test_a_frontend_says_what_keeps_it_from_serving(tmp_path: Path) -> None:
    def refusal(*flags: str) -> str:
        ended = run_quire("frontend", "--port", "0", "--metrics-port", "0", "--admin-port", "0", *flags)
        assert ended.returncode == 1
        return ended.stderr

    assert "--join is missing" in refusal()
    assert "give a --join-token-file" in refusal("--join", "127.0.0.1:7")
    said = refusal("--join", f"unix:{tmp_path}/nobody", "--engine-start-timeout", "1")
    assert "cannot be followed, trying again: unavailable" in said
    assert f"no engine of the server at unix:{tmp_path}/nobody could be reached within 1 s" in said


@pytest.mark.slow
def test_a_table_on_a_port_asks_for_its_token(tmp_path: Path) -> None:
    token, other = tmp_path / "token", tmp_path / "other"
    for path in (token, other):
        path.write_text(path.name)
        path.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--join-address", f"127.0.0.1:{port}", "--join-token-file", str(token)]
    with running_server("--kv-cache-memory", "64MiB", *flags):
        with running_frontend(f"127.0.0.1:{port}", "--join-token-file", str(token)) as guest:
            with grpc.insecure_channel(guest.address) as channel:
                messages = list(guest.stub(channel).StreamGenerate(stream_request("ROMEO:", 3)))
            assert len([token for message in messages for token in ids_of(message)]) == 3
        ended = run_quire("frontend", "--join", f"127.0.0.1:{port}", "--join-token-file", str(other))
        assert "refuses this frontend" in ended.stderr
        assert "Traceback" not in ended.stderr
