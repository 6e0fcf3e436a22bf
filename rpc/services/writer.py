"""Writes the messages of a stream, and gives up on a client that does not read them."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from grpc import aio

from rpc.frontend.errors import RequestFailed

log = logging.getLogger("quire.rpc")


class Sink(Protocol):
    """Target of the messages: a call's context, or a connection."""

    async def write(self, message: Any) -> None:
        """Writes a message; returns as soon as the next one may be written."""


class SlowReader(RequestFailed):
    """The client does not read.

    Attributes:
        writing: Task that ends when the client has read the message that waits for it, or has left. Until then gRPC
            takes no other operation of the call, its status included.
    """

    def __init__(self, stall: float, writing: asyncio.Task[None]) -> None:
        super().__init__("RESOURCE_EXHAUSTED", "SLOW_READER", f"the client read nothing for {stall:g} s")
        self.writing = writing


class StreamWriter:
    """Writes the messages of one call, inside `run`.

    One timer serves many messages. It is set when a message is written and no timer runs. When it is due, it compares
    the time of the message that is being written, and is set again for that one. An `asyncio.timeout` for each message
    would take 5 us a message.

    Args:
        sink: Target of the messages.
        stall: Seconds that one message may wait for its reader.
    """

    def __init__(self, sink: Sink, stall: float) -> None:
        self._sink, self._stall = sink, stall
        self._loop = asyncio.get_running_loop()
        self._stalled: asyncio.Future[None] = self._loop.create_future()
        self._writing: asyncio.Task[None] | None = None  # the task that stalls
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None  # start of the write of the current message; None between two messages

    async def run(self, sending: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that writes messages to its end.

        A coroutine that stalls is left in its last write, which is not cancelled: gRPC would still have the message,
        and refuse the status that follows it.

        Args:
            sending: The coroutine, which calls `write`.

        Raises:
            SlowReader: A message has waited too long. Raised at once, before the write ends.
            Exception: Any exception of the coroutine.
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
        """Writes a message; one at a time.

        Raises:
            CancelledError: The client has left, so gRPC is about to cancel the call; or the call has failed meanwhile.
        """
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._began + self._stall, self._check)
        try:
            await self._sink.write(message)
        except aio.InternalError:
            raise asyncio.CancelledError from None
        self._began = None
        if self._stalled.done():
            raise asyncio.CancelledError  # the call has failed meanwhile

    def _check(self) -> None:
        """Ends `run` with SlowReader if the current message has waited too long; else sets the timer for it."""
        self._timer = None
        if self._began is None:
            return
        due = self._began + self._stall
        if self._loop.time() < due:
            self._timer = self._loop.call_at(due, self._check)
        elif not self._stalled.done():
            log.warning("a client read nothing for %g s: its call ends", self._stall)
            self._stalled.set_result(None)
