"""Writes a stream's messages, and gives up on a client that does not read them."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from grpc import aio

from rpc.frontend.errors import RequestFailed

log = logging.getLogger("quire.rpc")


class Sink(Protocol):
    """What is written to: a call's context, or a connection."""

    async def write(self, message: Any) -> None:
        """Returns as soon as the next one may be written."""


class SlowReader(RequestFailed):
    """The client does not read.

    Attributes:
        writing: Ends when the client has read the message that waits for it, or has left. Until then gRPC takes no
            other operation of the call, its status included.
    """

    def __init__(self, stall: float, writing: asyncio.Task[None]) -> None:
        super().__init__("RESOURCE_EXHAUSTED", "SLOW_READER", f"the client read nothing for {stall:g} s")
        self.writing = writing


class Writer:
    """Writes the messages of one call, inside `run`.

    One timer serves many messages: it is set when one is written and none runs, and looks when it is due whether that
    is the message which is still being written. An `asyncio.timeout` for each cost 5 us a message.

    Args:
        sink: What is written to.
        stall: Seconds that one message may wait for its reader.
    """

    def __init__(self, sink: Sink, stall: float) -> None:
        self._sink, self._stall = sink, stall
        self._loop = asyncio.get_running_loop()
        self._stalled: asyncio.Future[None] = self._loop.create_future()
        self._writing: asyncio.Task[None] | None = None  # that stalls
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None  # when the message that is being written was begun

    async def run(self, sending: Coroutine[Any, Any, None]) -> None:
        """Runs what writes to its end. Raises what it raises, and SlowReader as soon as a message has waited too long.

        What stalls is left to its last write, which is not cancelled: gRPC would still have the message, and refuse
        the status that follows it.
        """
        if self._writing is not None:
            sending.close()
            raise SlowReader(self._stall, self._writing)
        task = asyncio.create_task(sending)
        try:
            await asyncio.wait((task, self._stalled), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._writing = task
                raise SlowReader(self._stall, task)
            await task
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._writing is None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

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
        if self._stalled.done():
            raise asyncio.CancelledError  # the call has failed meanwhile

    def _look(self) -> None:
        self._timer = None
        if self._began is None:
            return
        due = self._began + self._stall
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._look)
        elif not self._stalled.done():
            log.warning("a client read nothing for %g s: its call ends", self._stall)
            self._stalled.set_result(None)
