"""The frontend's end of the link: an `EngineClient` for an engine in another process."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.link import CHANNEL_OPTIONS, HEARTBEAT, codec
from rpc.link.arrays import LinkError
from rpc.link.proof import Caller
from scheduler.events import Ask, End, EndReason, EngineStats, Event, StepOutputs, Submit, nothing
from scheduler.limits import Limits
from scheduler.settings import RequestLimits

log = logging.getLogger("quire.link")

Sink = Callable[[StepOutputs], None]

OPTIONS = [
    *CHANNEL_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    # Between two attempts: the engine's process may not have opened its socket yet.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    # For one attempt, whatever the name says: until the peer's first frame, which takes two round trips of TCP, and
    # longer under load. A refused attempt ends at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
]
LATE = 4 * HEARTBEAT  # seconds of silence that begin to count as a stall


class LinkClient:
    """One stream to an engine; `connect` makes it. Lives on the loop that made it, and its sink is called there.

    silence: seconds without a sign of life after which the engine counts as dead. place: where it runs, for people.
    """

    def __init__(self, reach: Reach, sink: Sink, request: RequestLimits, silence: float, place: str = "") -> None:
        self._sink, self._request, self._silence = sink, request, silence
        self.reach, self.place = reach, place or reach.address
        self._channel = aio.insecure_channel(reach.address, options=OPTIONS)
        self._caller = Caller(reach.token)
        stub = pb_grpc.EngineServiceStub(self._channel)
        self._call = stub.Connect(wait_for_ready=True, metadata=self._caller.metadata)
        self._outbox = pb.ConnectRequest()
        self._wake = asyncio.Event()
        self._live: set[int] = set()
        self._stats = EngineStats()
        self._stalled, self._heard = 0.0, time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self.info = EngineInfo(Limits(0, 0, 0, 0, request), 0, "", "")
        self.failure: str | None = None

    async def connect(self) -> None:
        """Waits, without a limit, until the engine says what it is. Raises ConnectionError where the link breaks."""
        try:
            await self._caller.check(self._call)
            message = await self._call.read()
        except grpc.RpcError as error:
            raise ConnectionError(_sentence(error)) from None
        if not isinstance(message, pb.ConnectResponse) or not message.HasField("info"):
            raise ConnectionError("the engine did not say what it is")
        self.info = codec.decode_info(message.info, self._request)
        self._stats = EngineStats(pages_total=self.info.pages)
        self._heard = time.monotonic()
        self._tasks = [asyncio.create_task(part()) for part in (self._read, self._write, self._watch)]

    def send(self, events: Sequence[Event]) -> None:
        """As `Engine.send`: on a dead engine each Submit is answered at once."""
        submitted = [event.attempt for event in events if isinstance(event, Submit)]
        self._live.update(submitted)
        if self.failure is not None:
            self._tell_failure()
            return
        for event in events:
            try:
                self._outbox.MergeFrom(codec.encode_events([event]))
            except (ValueError, TypeError, OverflowError) as error:  # a value that the messages cannot hold
                if isinstance(event, Ask):
                    raise
                self._live.discard(event.attempt)
                end = End(event.attempt, EndReason.FAULT, message=f"it cannot be sent to the engine: {error}")
                self._sink(nothing(self._stats, (end,)))
        self._wake.set()

    def stalled_for(self) -> float:
        silent = time.monotonic() - self._heard
        return self._stalled + silent if self._stalled else silent if silent > LATE else 0.0

    def overdue(self) -> str:
        """Such an engine is lost at once."""
        return ""

    async def close(self) -> None:
        """Hangs up. What lives gets ENGINE_FAILED."""
        self._lost("the link was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._call.cancel()
        await self._channel.close(None)

    async def _read(self) -> None:
        why = "its process has hung up"
        try:
            while isinstance(message := await self._call.read(), pb.ConnectResponse):  # else the stream's end
                self._heard, self._stalled = time.monotonic(), message.stalled
                self._take(codec.decode_outputs(message.outputs))
                if message.overdue:
                    self._lost(message.overdue)
                    return
        except grpc.RpcError as error:
            why = _sentence(error)
        except LinkError as error:
            log.error("the engine's message cannot be read: %s", error)
            why = str(error)
        except Exception as error:
            log.exception("the engine's message cannot be taken in")
            why = f"{type(error).__name__}: {error}"
        self._lost(why)

    def _take(self, outputs: StepOutputs) -> None:
        if self.failure is not None:
            return  # it was on its way when the engine was given up
        self._live.difference_update(outputs.over)
        self._stats = outputs.stats
        self._sink(outputs)

    async def _write(self) -> None:
        """Everything that was sent since the last message goes into the next one."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            message, self._outbox = self._outbox, pb.ConnectRequest()
            try:
                await self._call.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # `_read` says why
            except Exception as error:  # nothing would ever be sent again, and nobody would know
                log.exception("a message to the engine cannot be written")
                self._lost(f"{type(error).__name__}: {error}")
                return

    async def _watch(self) -> None:
        """Counts silent slices rather than seconds: a loop that was held up itself finds its messages unread."""
        slices, silent = 10, 0
        while silent < slices:
            heard = self._heard
            await asyncio.sleep(self._silence / slices)
            silent = silent + 1 if self._heard == heard else 0
        self._lost(f"it gave no sign of life for {self._silence:g} s")
        self._call.cancel()

    def _lost(self, why: str) -> None:
        if self.failure is None:
            self.failure = why
            self._tell_failure()

    def _tell_failure(self) -> None:
        message = f"the engine is gone: {self.failure}"
        ends = tuple(End(attempt, EndReason.ENGINE_FAILED, message=message) for attempt in sorted(self._live))
        self._live.clear()
        self._sink(nothing(replace(self._stats, running=0, waiting=0, waiting_tokens=0, pages_used=0), ends))


def _sentence(error: grpc.RpcError) -> str:
    return f"the link broke: {error.code().name.lower()}: {error.details()}"
