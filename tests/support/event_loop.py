"""Event loops of tests: an event of gRPC that comes after its loop was closed harms no other test.

grpcio has one completion queue and one poller thread for all event loops of a process. A call that is cancelled, or a
server that is stopped, may leave an event that reaches the queue after its loop was closed. The loop that runs then
takes it from the queue, and hands it to the closed one: `RuntimeError`, out of a callback of a test that has nothing
to do with it.
"""

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any


class TestLoop(asyncio.SelectorEventLoop):
    """Drops events of gRPC once it is closed. Other late calls raise, as they do with any loop."""

    __test__ = False

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed() and getattr(callback, "__module__", "") == "grpc._cython.cygrpc":
            return asyncio.Handle(callback, args, self, context)  # never run: no future of this loop is awaited
        return super().call_soon_threadsafe(callback, *args, context=context)


class TestLoopPolicy(asyncio.DefaultEventLoopPolicy):
    """Makes `TestLoop`s, for `asyncio.run` and for tests that are coroutines."""

    __test__ = False

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return TestLoop()
