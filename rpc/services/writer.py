"""Writes a stream's messages, and gives up on a client that does not read them."""

import asyncio
from types import TracebackType

from grpc import aio

from rpc.frontend.errors import RequestFailed


class Writer:
    """Of one call, in `async with`. stall: seconds that one message may wait for its reader; longer ones end the block
    with RequestFailed.

    One timer for many messages: it is set when one is written and none runs, and looks when it is due whether that is
    the message which is still being written. An `asyncio.timeout` for each cost 5 us a message.
    """

    def __init__(self, context: aio.ServicerContext, stall: float) -> None:
        self._context, self._stall = context, stall
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
        """One at a time."""
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._began + self._stall, self._look)
        await self._context.write(message)
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
