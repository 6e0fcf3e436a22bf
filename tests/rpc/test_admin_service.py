"""WatchLoad to one who does not read."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from quire.v1 import admin_service_pb2 as pb

from rpc.services import admin


class Unread:
    """Enough of grpc.aio's ServicerContext: no message is ever taken."""

    ended: grpc.StatusCode | None = None

    async def write(self, _message: object) -> None:
        await asyncio.Event().wait()

    async def abort(self, code: grpc.StatusCode, *_: object) -> None:
        self.ended = code
        raise grpc.RpcError

    def __getattr__(self, _name: str) -> Any:
        return lambda *_: None


def test_who_does_not_read_the_load_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "load_of", lambda *_: pb.Load())
    frontend: Any = SimpleNamespace(settings=SimpleNamespace(write_stall=0.05))
    context: Any = Unread()
    with pytest.raises(grpc.RpcError):
        asyncio.run(asyncio.wait_for(admin.AdminService(frontend, None).WatchLoad(pb.WatchLoadRequest(), context), 20))
    assert context.ended is grpc.StatusCode.RESOURCE_EXHAUSTED
