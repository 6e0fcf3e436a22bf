"""The engine's end of the link: takes frontends' events, and sends each frontend its part of every step's outputs.

The engine's thread pays for one wake-up of the loop a step. A frontend that lags gets the outputs of several steps in
one message. For one that lags too far nothing more is held, and it is cut off when it reads again.
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
from rpc.link.kv_transfers import PendingTransfers
from rpc.link.pages import PageCopy, PagePort, asked_hashes
from rpc.link.proof import answer_to
from scheduler.engine import EngineEnded
from scheduler.events import (
    Abort,
    AdminQuery,
    EngineStats,
    Event,
    KVEvents,
    StepOutputs,
    Submit,
    nothing,
    short_hashes,
)

log = logging.getLogger("quire.link")

ABSENCE_LOOKS = 10  # looks for a frontend in the time that an engine lives without one
FOREVER = 2**20  # seconds
MOST_PENDING = 2**26  # bytes that may wait for a frontend
READ_BYTES = 2**20  # bytes of pages that are read for another engine between two steps
STEP_BYTES, TOKEN_BYTES, ALTERNATIVE_BYTES = 2048, 24, 8  # estimates, for one step's outputs


class Connection:
    """The link to one frontend. Used on the loop alone.

    Attributes:
        number: Number of the connection, which is in the engine's numbers of its attempts.
        live: Its live attempts, by its own numbers.
        overrun: More than MOST_PENDING bytes waited for it, so it is cut off.
        pending: Outputs that wait to be sent to it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.live: set[int] = set()
        self.overrun = False
        self.pending: list[StepOutputs] = []
        self._pending_bytes = 0
        self._news = asyncio.Event()

    def add(self, outputs: StepOutputs) -> None:
        """Adds the frontend's part of a step's outputs."""
        # Compared before the step is added: one step alone may be larger, as a beam search sends its result at once.
        if self._pending_bytes > MOST_PENDING:
            self.overrun = True
        self.live.difference_update(outputs.over)
        self.pending.append(outputs)
        count, alternatives = outputs.logprobs.top.shape
        self._pending_bytes += STEP_BYTES + count * (TOKEN_BYTES + alternatives * ALTERNATIVE_BYTES)
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """Waits until outputs wait to be sent, but at most this long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def take(self, stats: EngineStats) -> StepOutputs:
        """Removes and returns all outputs that wait, merged; a heartbeat with these stats where none waits."""
        steps, self.pending, self._pending_bytes = self.pending, [], 0
        self._news.clear()
        return merged(steps) if steps else nothing(stats)

    def accept(self, events: list[Event]) -> list[Event]:
        """Returns a frontend's events under the engine's own numbers, without those of attempts that have ended.

        Raises:
            LinkError: The number of a Submit is live, or out of range.
        """
        accepted: list[Event] = []
        for event in events:
            if isinstance(event, AdminQuery):
                accepted.append(replace(event, ticket=self.global_of(event.ticket & LOCAL)))
                continue
            known = event.attempt in self.live
            if isinstance(event, Submit):
                if known or not 0 <= event.attempt <= LOCAL:
                    raise LinkError(f"attempt {event.attempt} is live or out of range")
                self.live.add(event.attempt)
            elif not known:  # it ended while the event was on its way
                continue
            accepted.append(replace(event, attempt=self.global_of(event.attempt)))
        return accepted

    def finish_all(self) -> list[Event]:
        """Forgets all live attempts, and returns the events that end them."""
        attempts, self.live = self.live, set()
        return [Abort(self.global_of(attempt)) for attempt in attempts]

    def global_of(self, attempt: int) -> int:
        """Returns the engine's number of an attempt or ticket of this frontend."""
        return self.number << LOCAL_BITS | attempt


class LinkService(pb_grpc.EngineServiceServicer):
    """quire.engine.v1 over one engine.

    Make it on its loop, give `sink` to the engine, then `attach` the engine.

    Args:
        token: Secret that callers have to prove; "" where only this user can reach the link.
        observe: Gets each step's outputs too.

    Attributes:
        connections: Connected frontends, by number.
        transfers: KV transfers to the engine; None where its pages cannot be copied.
    """

    def __init__(self, token: str = "", observe: Callable[[StepOutputs], None] = lambda _: None) -> None:
        self._observe = observe
        self._token = token
        self._loop = asyncio.get_running_loop()
        self._engine: EngineClient | None = None
        self._pages: PagePort | None = None
        self.transfers: PendingTransfers | None = None
        self._attached = asyncio.Event()
        self.connections: dict[int, Connection] = {}
        self._numbers = itertools.count(1)
        self._stats = EngineStats()
        self._hashes: set[bytes] = set()
        self._closing = asyncio.Event()

    def sink(self, outputs: StepOutputs) -> None:
        """Takes outputs to the loop, from any thread."""
        with suppress(RuntimeError):  # the loop is closed, so no frontend is left
            self._loop.call_soon_threadsafe(self.deliver, outputs)

    def attach(self, engine: EngineClient, pages: PagePort | None = None) -> None:
        """Answers frontends from now on.

        Args:
            engine: The engine.
            pages: Its KV pages, for other engines; None where they cannot be copied.
        """
        if pages is not None:
            self._pages, self.transfers = pages, PendingTransfers(pages, self._hashes, engine.send)
        self._stats = EngineStats(pages_total=engine.info.pages)
        self._engine = engine
        self._attached.set()

    def deliver(self, outputs: StepOutputs) -> None:
        """Hands a step's outputs to all connections. Runs on the loop."""
        self._stats = outputs.stats
        self._observe(outputs)
        for change in outputs.kv_events:
            self._hashes.difference_update(short_hashes(change.removed))
            self._hashes.update(short_hashes(change.added))
        if self.transfers is not None:
            self.transfers.release(outputs)
        for connection in self.connections.values():
            if connection.overrun:
                connection.take(self._stats)  # it may never read again, so nothing is held for it
                self._send(connection.finish_all())
            connection.add(owned_by(outputs, connection.number))
        # The engine may have died after this step; the ends of its attempts then come with a later call.
        dead = self._engine is not None and self._engine.failure is not None
        if dead and self._engine is not None and self.transfers is not None and (left := self.transfers.give_up()):
            self._engine.send(left)  # a dead engine ends them at once, as it did the others
        if dead and not any(connection.live for connection in self.connections.values()):
            self._closing.set()

    def _send(self, events: list[Event]) -> None:
        if self._engine is None or not events:
            return
        ready = self.transfers.hold_back(events) if self.transfers is not None else events
        if ready:
            self._engine.send(ready)

    async def wait_without_frontend(self, seconds: float | None) -> None:
        """Waits until no frontend has been connected for this long; None: for ever."""
        absent = 0
        while seconds is None or absent < ABSENCE_LOOKS:
            await asyncio.sleep((seconds or FOREVER) / ABSENCE_LOOKS)
            absent = 0 if self.connections else absent + 1

    async def wait_failure(self) -> None:
        """Waits until the engine is dead and the ends of all attempts wait to be sent to their frontends."""
        await self._closing.wait()

    def abandon(self) -> None:
        """Refuses frontends that wait for the engine: there will be none."""
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
        await self._authenticate(context)
        engine = await self._ready_engine(context)
        connection = Connection(next(self._numbers))
        if self._hashes:  # a frontend that connects later has missed the KV events so far
            connection.add(replace(nothing(self._stats), kv_events=(KVEvents(b"", b"".join(self._hashes)),)))
        self.connections[connection.number] = connection
        reader = asyncio.create_task(self._read(request_iterator, connection))
        try:
            await context.write(codec.encode_info(engine.info))
            await self._write(context, connection, engine, reader)
        except LinkError as error:
            log.error("a frontend is cut off: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            reader.cancel()
            del self.connections[connection.number]
            self._send(connection.finish_all())

    async def Pages(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.PagesRequest], context: aio.ServicerContext
    ) -> AsyncIterator[pb.PagesResponse]:
        await self._authenticate(context)  # before anything is read
        reading: asyncio.Future[list[PageCopy] | None] | None = None
        try:
            request = await anext(request_iterator, None)
            if request is None or self._pages is None:
                return
            encode, copies = self._pages.form.encode, self._pages.read(asked_hashes(request), READ_BYTES)
            reading = asyncio.ensure_future(anext(copies, None))
            while (read := await reading) is not None:
                reading = asyncio.ensure_future(anext(copies, None))  # reads while the last ones are sent
                yield pb.PagesResponse(pages=map(encode, read))
        except LinkError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineEnded as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            if reading is not None:
                reading.cancel()

    async def _authenticate(self, context: aio.ServicerContext) -> None:
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
        """Writes outputs until the frontend hangs up, or the engine is dead.

        At the engine's end the frontend gets the ends of its attempts first.
        """
        while not reader.done():
            await connection.wait(HEARTBEAT)
            closing = self._closing.is_set()  # read before `take`, so that the last message has all ends
            if connection.overrun:
                raise LinkError("it does not read what waits for it")
            outputs = connection.take(self._stats)
            await context.write(codec.encode_outputs(outputs, engine.stalled_for(), engine.overdue()))
            if closing:
                await context.abort(grpc.StatusCode.UNAVAILABLE, engine.failure or "the engine has ended")
        reader.result()
