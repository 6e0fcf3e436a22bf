"""WatchLoad to one who does not read."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from quire.v1 import admin_service_pb2 as pb

from rpc.services import admin
from rpc.services.load import duration


class Unread:
    """Enough of grpc.aio's ServicerContext: takes no message before `reads` is set."""

    def __init__(self) -> None:
        self.ended: grpc.StatusCode | None = None
        self.reads = asyncio.Event()

    async def write(self, _message: object) -> None:
        await self.reads.wait()

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.ended = code
        raise grpc.RpcError

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize("leaves", [False, True])
async def test_who_does_not_read_the_load_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    monkeypatch.setattr(admin, "load_of", lambda *_: pb.Load())
    frontend: Any = SimpleNamespace(settings=SimpleNamespace(write_stall=0.05))
    client = Unread()
    context: Any = client
    call = asyncio.create_task(admin.AdminService(frontend, None).WatchLoad(pb.WatchLoadRequest(), context))
    async with asyncio.timeout(60):
        while not caplog.messages:
            await asyncio.sleep(0.01)
        assert client.ended is None, "gRPC takes no status before the message that waits is read"
        if leaves:
            call.cancel()
        else:
            client.reads.set()
        with pytest.raises(asyncio.CancelledError if leaves else grpc.RpcError):
            await call
    assert client.ended is (None if leaves else grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert caplog.messages == ["a client read nothing for 0.05 s: its call ends"]


class Refused(Exception):
    """Raised by a call that is aborted."""


class Aborting:
    """Enough of a context to be refused."""

    said = ""

    async def abort(self, code: grpc.StatusCode, details: str, *_: object) -> None:
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        self.said = details
        raise Refused


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("ListRequests", pb.ListRequestsRequest(max_count=admin.MOST_REQUESTS + 1), "max_count"),
        ("WatchLoad", pb.WatchLoadRequest(interval=duration(0.9 * admin.LEAST_INTERVAL)), "interval"),
    ],
)
async def test_what_would_be_too_much_is_refused(method: str, request_: Any, field: str) -> None:
    context = Aborting()
    frontend: Any = SimpleNamespace(settings=SimpleNamespace(write_stall=1.0))
    service: Any = admin.AdminService(frontend, None)
    with pytest.raises(Refused):
        await getattr(service, method)(request_, context)
    assert context.said.startswith(f"{field} is ")
