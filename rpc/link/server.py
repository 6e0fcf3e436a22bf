"""The engine's end of the link: takes frontends' events, sends each its share of every step's outputs.

The engine's thread pays one wake-up of the loop a step. A frontend that lags gets the outputs of several steps in one
message; for one that lags without end nothing more is held, and it is cut off when it reads again.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace

import grpc
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from rpc.frontend.engine_client import EngineClient
from rpc.link import HEARTBEAT, codec
from rpc.link.arrays import LinkError
from rpc.link.coalesce import LOCAL, LOCAL_BITS, merged, owned_by
from rpc.link.pages import PageCopy, PagePort, asked_names
from rpc.link.proof import answer_to
from rpc.link.pulls import Pulls
from scheduler.engine import EngineEnded
from scheduler.events import (
    Ask,
    EngineStats,
    Event,
    Finish,
    NameChanges,
    StepOutputs,
    Submit,
    nothing,
    short_names,
)

log = logging.getLogger("quire.link")

LONELY_LOOKS = 10  # in the time that an engine stays alone
FOREVER = 2**20  # seconds
MOST_PENDING = 2**26  # bytes that may wait for a frontend
READ_BYTES = 2**20  # of pages that are read for another engine between two steps
STEP_BYTES, TOKEN_BYTES, ALTERNATIVE_BYTES = 2048, 24, 8  # of a step's outputs, about


class Connection:
    """One frontend: what waits to be sent to it, and which of its attempts live. On the loop alone."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: set[int] = set()
        self.overrun = False
        self._pending: list[StepOutputs] = []
        self._pending_bytes = 0
        self._news = asyncio.Event()

    def add(self, outputs: StepOutputs) -> None:
        """A step always finds room where nothing much waits: a search tells its whole result in one."""
        if self._pending_bytes > MOST_PENDING:
            self.overrun = True
        self.live.difference_update(outputs.over)
        self._pending.append(outputs)
        count, alternatives = outputs.logprobs.top.shape
        self._pending_bytes += STEP_BYTES + count * (TOKEN_BYTES + alternatives * ALTERNATIVE_BYTES)
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """Until there is something to send, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def take(self, stats: EngineStats) -> StepOutputs:
        """Everything that waits, as one; a sign of life with these stats where nothing does."""
        steps, self._pending, self._pending_bytes = self._pending, [], 0
        self._news.clear()
        return merged(steps) if steps else nothing(stats)

    def accept(self, events: list[Event]) -> list[Event]:
        """The events under the engine's own numbers. Raises LinkError."""
        accepted: list[Event] = []
        for event in events:
            if isinstance(event, Ask):
                accepted.append(replace(event, ticket=self.global_of(event.ticket & LOCAL)))
                continue
            known = event.attempt in self.live
            if isinstance(event, Submit):
                if known or not 0 <= event.attempt <= LOCAL:
                    raise LinkError(f"attempt {event.attempt} is live or out of range")
                self.live.add(event.attempt)
            elif not known:
                continue
            accepted.append(replace(event, attempt=self.global_of(event.attempt)))
        return accepted

    def finish_all(self) -> list[Event]:
        """No more of any of its attempts is wanted."""
        attempts, self.live = self.live, set()
        return [Finish(self.global_of(attempt)) for attempt in attempts]

    def global_of(self, attempt: int) -> int:
        return self.number << LOCAL_BITS | attempt


class LinkService(pb_grpc.EngineServiceServicer):
    """quire.engine.v1 over one engine. Make it on its loop, give `sink` to the engine, then `attach` the engine. token:
    what frontends have to show, "" where others cannot reach it. observe: gets each step's outputs too.
    """

    def __init__(self, token: str = "", observe: Callable[[StepOutputs], None] = lambda _: None) -> None:
        self._observe = observe
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._engine: EngineClient | None = None
        self._pages: PagePort | None = None
        self._pulls: Pulls | None = None
        self._attached = asyncio.Event()
        self._connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._stats = EngineStats()
        self._names: set[bytes] = set()
        self._closing = asyncio.Event()

    def sink(self, outputs: StepOutputs) -> None:
        """For the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def attach(self, engine: EngineClient, pages: PagePort | None = None) -> None:
        """From now on frontends are answered. pages: the engine's, for other engines; None where they can have none."""
        if pages is not None:
            self._pages, self._pulls = pages, Pulls(pages, self._names, engine.send)
        self._stats = EngineStats(pages_total=engine.info.pages)
        self._engine = engine
        self._attached.set()

    def _deliver(self, outputs: StepOutputs) -> None:
        self._stats = outputs.stats
        self._observe(outputs)
        for change in outputs.names:
            self._names.difference_update(short_names(change.removed))
            self._names.update(short_names(change.added))
        if self._pulls is not None:
            self._pulls.take(outputs)
        for connection in self._connections.values():
            if connection.overrun:
                connection.take(self._stats)  # it may never read again: hold nothing for it
                self._send(connection.finish_all())
            connection.add(owned_by(outputs, connection.number))
        # The engine may have died since this step; what it says of its end then comes with a later call.
        dead = self._engine is not None and self._engine.failure is not None
        if dead and self._engine is not None and self._pulls is not None and (left := self._pulls.give_up()):
            self._engine.send(left)  # they end too
        if dead and not any(connection.live for connection in self._connections.values()):
            self._closing.set()

    def _send(self, events: list[Event]) -> None:
        if self._engine is None or not events:
            return
        ready = self._pulls.sift(events) if self._pulls is not None else events
        if ready:
            self._engine.send(ready)

    async def wait_lonely(self, seconds: float | None) -> None:
        """Until no frontend has been connected for so long; None: for ever."""
        alone = 0
        while seconds is None or alone < LONELY_LOOKS:
            await asyncio.sleep((seconds or FOREVER) / LONELY_LOOKS)
            alone = 0 if self._connections else alone + 1

    async def wait_failure(self) -> None:
        """Until the engine is dead and what its frontends must be told waits for them."""
        await self._closing.wait()

    def not_attached(self) -> None:
        """There will be no engine: who waits for it is told."""
        self._attached.set()

    async def _ready_engine(self, context: aio.ServicerContext) -> EngineClient:
        await self._attached.wait()
        if self._engine is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine has not started")
            raise RuntimeError("abort has not ended the call")
        return self._engine

    async def Connect(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.ConnectRequest], context: aio.ServicerContext
    ) -> None:
        await self._let_in(context)
        engine = await self._ready_engine(context)
        connection = Connection(next(self._numbers))
        if self._names:  # who comes later is told of all that there are
            connection.add(replace(nothing(self._stats), names=(NameChanges(b"", b"".join(self._names)),)))
        self._connections[connection.number] = connection
        reader = asyncio.create_task(self._read(request_iterator, connection))
        try:
            await context.write(codec.encode_info(engine.info))
            await self._write(context, connection, engine, reader)
        except LinkError as error:
            log.error("a frontend is cut off: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            del self._connections[connection.number]
            self._send(connection.finish_all())

    async def Pages(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.PagesRequest], context: aio.ServicerContext
    ) -> AsyncIterator[pb.PagesResponse]:
        await self._let_in(context)  # before anything is read
        reading: asyncio.Task[list[PageCopy]] | None = None
        try:
            request = await anext(request_iterator, None)
            if request is None or self._pages is None:
                return
            names, form = asked_names(request), self._pages.form
            some = max(1, READ_BYTES // form.size)
            reading = asyncio.create_task(self._pages.read(names[:some]))
            for at in range(0, len(names), some):
                copies = await reading
                more = names[at + some : at + 2 * some] if len(copies) == some else []
                if more:
                    reading = asyncio.create_task(self._pages.read(more))  # while these are sent
                yield pb.PagesResponse(pages=[form.encode(copy) for copy in copies])
                if not more:
                    return
        except LinkError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineEnded as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            if reading is not None:
                reading.cancel()

    async def _let_in(self, context: aio.ServicerContext) -> None:
        answer = answer_to(self._token, dict(context.invocation_metadata() or ()))
        if answer is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this is an engine that the caller has no token of")
        await context.send_initial_metadata(answer)

    async def _read(self, requests: AsyncIterator[pb.ConnectRequest], connection: Connection) -> None:
        async for message in requests:
            self._send(connection.accept(codec.decode_events(message)))

    async def _write(
        self, context: aio.ServicerContext, connection: Connection, engine: EngineClient, reader: asyncio.Task[None]
    ) -> None:
        """Until the frontend hangs up, or the engine is dead; then its frontend has the ends of its attempts."""
        while not reader.done():
            await connection.wait(HEARTBEAT)
            closing = self._closing.is_set()
            if connection.overrun:
                raise LinkError("it does not read what waits for it")
            outputs = connection.take(self._stats)
            await context.write(codec.encode_outputs(outputs, engine.stalled_for(), engine.overdue()))
            if closing:
                await context.abort(grpc.StatusCode.UNAVAILABLE, engine.failure or "the engine has ended")
        reader.result()
