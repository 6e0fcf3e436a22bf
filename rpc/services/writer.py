"""Writes a stream's messages, and gives up on a client that does not read them."""

import asyncio
from types import TracebackType
from typing import Any, Protocol

from grpc import aio

from rpc.frontend.errors import RequestFailed


class Sink(Protocol):
    """What is written to: a call's context, or a connection."""

    async def write(self, message: Any) -> None:
        """Returns as soon as the next one may be written."""


class Writer:
    """Of one call, in `async with`. stall: seconds that one message may wait for its reader; longer ones end the block
    with RequestFailed.

    One timer for many messages: it is set when one is written and none runs, and looks when it is due whether that is
    the message which is still being written. An `asyncio.timeout` for each cost 5 us a message.
    """

    def __init__(self, sink: Sink, stall: float) -> None:
        self._sink, self._stall = sink, stall
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None  # when the message that is being written was begun

    async def __aenter__(self) -> "Writer":
        await self._limit.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, trace)
        except TimeoutError:
            message = f"the client read nothing for {self._stall:.0f} s"
            raise RequestFailed("RESOURCE_EXHAUSTED", "SLOW_READER", message) from None

    async def write(self, message: object) -> None:
        """One at a time. Raises CancelledError where the client has gone, as the call itself is about to do."""
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._began + self._stall, self._look)
        try:
            await self._sink.write(message)
        except aio.InternalError:
            raise asyncio.CancelledError from None
        self._began = None

    def _look(self) -> None:
        self._timer = None
        if self._began is None:
            return
        due = self._began + self._stall
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        else:
            self._limit.reschedule(due)
