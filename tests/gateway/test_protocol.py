"""A connection's end: with clients that do not read, do not wait for their answers, leave, or are too many."""

import asyncio
import json
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from rpc.gateway.protocol import MOST_DROPPED, BoundedProtocol
from rpc.gateway.settings import LARGEST_HEADERS

GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: a\r\n"
SECONDS = 10


class Transport:
    """The transport of a client that reads as much as the test says."""

    def __init__(self) -> None:
        self.written, self.waiting = b"", 0
        self.is_reading, self.closed = True, False
        self.cut = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True
        self.cut.set()


class Application:
    """Answers when it may. started: requests."""

    def __init__(self) -> None:
        self.may, self.started = asyncio.Event(), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.started += 1
        await self.may.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


class Connection:
    """state: of the server, which all of its connections share."""

    def __init__(self, state: ServerState, app: Any, most: int = 8, stall: float = 0.02) -> None:
        config = uvicorn.Config(app, log_config=None, lifespan="off", h11_max_incomplete_event_size=LARGEST_HEADERS)
        self.transport = Transport()
        self.protocol = BoundedProtocol(config, state, {}, read_time=SECONDS, write_stall=stall, most=most)
        self.protocol.connection_made(self.transport)

    def send(self, data: bytes) -> None:
        self.protocol.data_received(data)

    async def answered(self, times: int = 1) -> list[str]:
        """Returns the first lines of this number of answers."""
        async with asyncio.timeout(SECONDS):
            while self.transport.written.count(b"HTTP/1.1 ") < times:
                await asyncio.sleep(0)
        return [line for line in self.transport.written.decode().split("\r\n") if "HTTP/1.1 " in line]


@pytest.fixture
def state() -> ServerState:
    return ServerState()


@pytest.fixture
def app() -> Application:
    return Application()


@pytest.mark.parametrize("behind", [b"G", GET, b"\r\n", GET * 1000])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("upgrade", [b"", b"connection: upgrade\r\nupgrade: h2c\r\n", b"connection: close\r\n"])
async def test_what_comes_behind_a_request_is_dropped_and_reading_goes_on(
    behind: bytes, together: bool, upgrade: bytes, state: ServerState, app: Application
) -> None:
    opened = Connection(state, app)
    first = GET[:-2] + upgrade + b"\r\n"
    for data in (first + behind,) if together else (first, behind):
        opened.send(data)
    for _ in range(3):
        assert opened.transport.is_reading
        opened.send(behind)
    app.may.set()
    assert await opened.answered() == ["HTTP/1.1 200 OK"]
    assert opened.transport.closed
    assert b"connection: close" in opened.transport.written.lower()
    assert (app.started, opened.transport.written.endswith(b"ok")) == (1, True)


async def test_requests_that_wait_for_their_answers_share_a_connection(state: ServerState, app: Application) -> None:
    opened = Connection(state, app)
    app.may.set()
    for times in (1, 2, 3):
        opened.send(GET)
        await opened.answered(times)
    assert not opened.transport.closed
    assert b"connection: close" not in opened.transport.written


async def test_who_reads_nothing_is_cut_off_whatever_is_written(state: ServerState, app: Application) -> None:
    opened = Connection(state, app)
    app.may.set()
    opened.transport.waiting = 70_000  # of earlier answers
    opened.protocol.pause_writing()
    opened.send(GET)
    async with asyncio.timeout(SECONDS):
        await opened.transport.cut.wait()
    assert opened.transport.written == b""
    opened.protocol.connection_lost(None)


async def test_who_reads_is_waited_for(state: ServerState, app: Application) -> None:
    """While it goes on; one that stops in the middle of a connection's last answer is cut off too."""
    opened = Connection(state, app)
    opened.transport.waiting = 10**6
    opened.protocol.pause_writing()
    app.may.set()
    opened.send(GET + GET)
    looks: list[int] = []

    def waiting() -> int:  # it reads a little whenever it is looked at
        looks.append(opened.transport.waiting)
        opened.transport.waiting -= 1000
        return opened.transport.waiting

    opened.transport.get_write_buffer_size = waiting  # type: ignore[method-assign]
    async with asyncio.timeout(SECONDS):
        while len(looks) < 20:
            await asyncio.sleep(0)
    assert not opened.transport.cut.is_set()
    opened.transport.get_write_buffer_size = lambda: 1000  # type: ignore[method-assign]
    opened.protocol.resume_writing()
    await opened.answered()
    async with asyncio.timeout(SECONDS):
        await opened.transport.cut.wait()


def error(data: bytes) -> tuple[int, str | None]:
    """Status and code of an answer in OpenAI's form."""
    head, _, body = data.partition(b"\r\n\r\n")
    said = json.loads(body)["error"]
    assert said["message"]
    assert b"content-type: application/json" in head
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), said["code"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"\x16\x03\x01 nonsense\r\n\r\n", 400),
        (POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n", 400),
        (POST + b"content-length: a\r\n\r\n", 400),
        (GET[:-2] + b"x: " + b"a" * LARGEST_HEADERS, 431),
        (POST + b"transfer-encoding: chunked\r\n\r\nxyz\r\n", 400),
    ],
)
async def test_what_is_no_request(request_: bytes, status: int, state: ServerState, app: Application) -> None:
    opened = Connection(state, app)
    opened.send(request_)
    opened.send(b"and more")
    assert error(opened.transport.written) == (status, None)
    assert opened.transport.closed
    app.may.set()
    await asyncio.sleep(0)
    assert opened.transport.written.count(b"HTTP/1.1 ") == 1


async def test_so_many_connections_and_no_more(state: ServerState, app: Application) -> None:
    first, second = (Connection(state, app, most=2) for _ in range(2))
    third = Connection(state, app, most=2)
    assert error(third.transport.written) == (503, "overloaded")
    assert b"retry-after: 1" in third.transport.written
    assert third.transport.closed
    app.may.set()
    for opened in (first, second):
        opened.send(GET)
        assert await opened.answered() == ["HTTP/1.1 200 OK"]
    first.protocol.connection_lost(None)
    third.protocol.connection_lost(None)
    assert not Connection(state, app, most=2).transport.closed


@pytest.mark.parametrize(
    "first",
    [
        pytest.param(GET, id="behind a request"),
        pytest.param(POST + b"content-length: 1000000000\r\n\r\n", id="of a body whose request is answered"),
        pytest.param(b"nonsense\r\n\r\n", id="behind what is no request"),
    ],
)
async def test_what_is_dropped_has_a_bound(first: bytes, state: ServerState, app: Application) -> None:
    opened = Connection(state, app)
    opened.send(first)
    if first.startswith(b"POST"):
        app.may.set()
        await opened.answered()
    part = bytes(2**20)
    for _ in range(MOST_DROPPED // len(part)):
        opened.send(part)
    assert not opened.transport.cut.is_set()
    opened.send(b"x")
    assert opened.transport.cut.is_set()
    opened.protocol.connection_lost(None)
