"""A server as the child of a Ray Serve replica, without Ray: a script says what `quire serve` would."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rpc.ray_serve import sidecar
from rpc.ray_serve.hosted import AnswerCutError, HostedGateway
from rpc.ray_serve.sidecar import ServerSidecar, command_of
from tests.support.processes import wait_until

READY = 'print("quire: ready: model m (bfloat16, cpu), gRPC 127.0.0.1:4711, metrics http://x", flush=True)\n'
SLEEP = "import time; time.sleep(600)"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Servers are scripts: give it one as LAUNCH."""
    monkeypatch.setattr(sidecar, "STOP_SECONDS", 5.0)
    before = set(psutil.Process().children(recursive=True))  # the fork server of other tests of this worker
    yield monkeypatch
    assert set(psutil.Process().children(recursive=True)) <= before


def test_its_flags_are_the_callers_and_where_it_listens_is_not() -> None:
    words = command_of("10.0.0.4:6379", {"model": "demo", "no-prefix-cache": "true", "metrics-port": "9464"})
    assert words[:4] == ["serve", "--ray-address=10.0.0.4:6379", "--host=127.0.0.1", "--port=0"]
    assert {"--model=demo", "--no-prefix-cache", "--metrics-port=9464", "--admin-port=0"} == set(words[4:])
    for name in sidecar.OWN_FLAGS:
        with pytest.raises(ValueError, match=f"^{name} cannot be given"):
            command_of("10.0.0.4:6379", {name: "1"})


async def test_it_is_there_until_it_is_stopped(script: pytest.MonkeyPatch) -> None:
    """And goes on where it writes more than a pipe holds."""
    script.setattr(sidecar, "LAUNCH", READY + "print('x' * 2**20, flush=True)\nprint('end')\n" + SLEEP)
    server = await ServerSidecar.start("10.0.0.4:6379", {})
    assert server.address == "127.0.0.1:4711"
    server.check()
    await server.stop()
    with pytest.raises(RuntimeError, match="has ended with code -15"):
        server.check()


async def test_one_that_does_not_start_says_its_code(script: pytest.MonkeyPatch) -> None:
    script.setattr(sidecar, "LAUNCH", "raise SystemExit(7)")
    with pytest.raises(RuntimeError, match="ended with code 7 before it was ready"):
        await ServerSidecar.start("10.0.0.4:6379", {})


async def test_one_that_is_given_up_while_it_starts_is_killed(script: pytest.MonkeyPatch) -> None:
    script.setattr(sidecar, "LAUNCH", SLEEP)
    starting = asyncio.create_task(ServerSidecar.start("10.0.0.4:6379", {}))
    before = len(psutil.Process().children())
    while len(psutil.Process().children()) == before:
        await asyncio.sleep(0.01)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting


async def test_one_that_does_not_end_is_killed(script: pytest.MonkeyPatch) -> None:
    script.setattr(sidecar, "STOP_SECONDS", 0.1)
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    script.setattr(sidecar, "LAUNCH", ignore + READY + SLEEP)
    server = await ServerSidecar.start("10.0.0.4:6379", {})
    await server.stop()
    with pytest.raises(RuntimeError, match="code -9"):
        server.check()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its parent on Linux alone")
def test_it_ends_with_a_parent_that_is_killed() -> None:
    """LAUNCH as it is, but for the server that it would run."""
    launch = sidecar.LAUNCH.rpartition("from rpc.cli.main")[0] + READY + SLEEP
    code = f"""
import asyncio, time
from rpc.ray_serve import sidecar
sidecar.LAUNCH = {launch!r}
async def main():
    server = await sidecar.ServerSidecar.start("10.0.0.4:6379", {{}})
    print(server._process.pid, flush=True)
    time.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of the server")


# The gateway in a server that is not its own


async def call(hosted: HostedGateway, scope: dict, *events: str) -> list[str]:
    """Types of the events that it sends."""
    coming, sent = [{"type": event} for event in events], []

    async def receive() -> dict:
        return coming.pop(0)

    async def send(event: dict) -> None:
        sent.append(event["type"])

    await hosted(scope, receive, send)  # type: ignore[arg-type]
    return sent


async def nothing() -> None:
    pass


async def test_a_life_begins_and_ends_with_a_close() -> None:
    closed = []

    async def close() -> None:
        closed.append(1)

    hosted = HostedGateway(lambda *_: nothing(), close)
    sent = await call(hosted, {"type": "lifespan"}, "lifespan.startup", "lifespan.shutdown")
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert closed == [1]


async def test_an_answer_that_is_cut_ends_the_connection() -> None:
    """Ray Serve ends it where the application raises; without that a client would take the answer for whole."""

    async def app(scope: dict, *_: object) -> None:
        assert scope["state"]["theirs"] == 1
        if scope["path"] == "/cut":
            scope["state"]["cut"]()

    hosted = HostedGateway(app, nothing)  # type: ignore[arg-type]
    request = {"type": "http", "state": {"theirs": 1}}
    await call(hosted, request | {"path": "/whole"})
    with pytest.raises(AnswerCutError):
        await call(hosted, request | {"path": "/cut"})
    assert request["state"] == {"theirs": 1}


async def test_it_speaks_http_alone() -> None:
    with pytest.raises(ValueError, match="this is websocket"):
        await call(HostedGateway(lambda *_: nothing(), nothing), {"type": "websocket"})
