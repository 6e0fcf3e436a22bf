"""WatchLoad to one who does not read."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from quire.v1 import admin_service_pb2 as pb

from rpc.services import admin


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
