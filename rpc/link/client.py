"""The frontend's end of the link: an `EngineClient` for an engine in another process."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import grpc
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from rpc.frontend.engine_client import EngineInfo, Reach
from rpc.link import CHANNEL_OPTIONS, HEARTBEAT, codec
from rpc.link.arrays import LinkError
from rpc.link.proof import TokenProof
from scheduler.events import AdminQuery, End, EndReason, EngineStats, Event, StepOutputs, Submit, nothing
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
    # Despite its name this bounds one attempt, until the peer's first frame. That takes two round trips of TCP, and
    # longer under load. A refused attempt ends at once.
    ("grpc.min_reconnect_backoff_ms", 10_000),
]
MESSAGE_BYTES = 2**26  # of several events in one message. protobuf refuses 2 GiB, which images can have together
LATE = 4 * HEARTBEAT  # seconds of silence that begin to count as a stall


class LinkClient:
    """One stream to an engine; `connect` opens it. Lives on the loop that made it, and its sink is called there.

    Args:
        reach: Address and token of the engine's link.
        sink: Gets the engine's outputs.
        request: Bounds of one request, which the engine's limits contain.
        silence: Seconds without a message after which the engine counts as dead.
        place: Process or machine that the engine runs on, for people; "": its address.
    """

    def __init__(self, reach: Reach, sink: Sink, request: RequestLimits, silence: float, place: str = "") -> None:
        self._sink, self._request, self._silence = sink, request, silence
        self.reach, self.place = reach, place or reach.address
        self._channel = aio.insecure_channel(reach.address, options=OPTIONS)
        self._proof = TokenProof(reach.token)
        stub = pb_grpc.EngineServiceStub(self._channel)
        self._call = stub.Connect(wait_for_ready=True, metadata=self._proof.metadata)
        self._outbox = deque[pb.ConnectRequest]()
        self._newest_bytes = 0  # of the newest message in the outbox
        self._wake = asyncio.Event()
        self._live: set[int] = set()
        self._stats = EngineStats()
        self._stalled, self._heard = 0.0, time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self.info = EngineInfo(Limits(0, 0, 0, 0, request), 0, "", "")
        self.failure: str | None = None

    async def connect(self) -> None:
        """Waits, without a limit, until the engine has sent its `EngineInfo`.

        Raises:
            ConnectionError: The link broke, or the engine does not know the token.
        """
        try:
            await self._proof.check(self._call)
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
        """Sends events, as `Engine.send`: a Submit to a dead engine ends with ENGINE_FAILED at once."""
        submitted = [event.attempt for event in events if isinstance(event, Submit)]
        self._live.update(submitted)
        if self.failure is not None:
            self._send_failure()
            return
        for event in events:
            try:
                self._post(codec.encode_events([event]))
            except (ValueError, TypeError, OverflowError) as error:  # a value that the messages cannot hold
                if isinstance(event, AdminQuery):
                    raise
                self._live.discard(event.attempt)
                end = End(event.attempt, EndReason.FAULT, message=f"it cannot be sent to the engine: {error}")
                self._sink(nothing(self._stats, (end,)))
        self._wake.set()

    def _post(self, message: pb.ConnectRequest) -> None:
        """Puts a message into the outbox, in one with those before it as long as they are small together."""
        size = message.ByteSize()
        if self._outbox and self._newest_bytes + size <= MESSAGE_BYTES:
            self._outbox[-1].MergeFrom(message)
            self._newest_bytes += size
        else:
            self._outbox.append(message)
            self._newest_bytes = size

    def stalled_for(self) -> float:
        silent = time.monotonic() - self._heard
        return self._stalled + silent if self._stalled else silent if silent > LATE else 0.0

    def overdue(self) -> str:
        """Returns "", since this client gives up an engine as soon as that reports a step that hangs."""
        return ""

    async def close(self) -> None:
        """Hangs up. Live attempts end with ENGINE_FAILED."""
        self.fail("the link was closed")
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
                    self.fail(message.overdue)
                    return
        except grpc.RpcError as error:
            why = _sentence(error)
        except LinkError as error:
            log.error("the engine's message cannot be read: %s", error)
            why = str(error)
        except Exception as error:
            log.exception("the engine's message cannot be processed")
            why = f"{type(error).__name__}: {error}"
        self.fail(why)

    def _take(self, outputs: StepOutputs) -> None:
        if self.failure is not None:
            return  # outputs that were on their way when the engine was given up: their attempts have ended
        self._live.difference_update(outputs.over)
        self._stats = outputs.stats
        self._sink(outputs)

    async def _write(self) -> None:
        """Writes messages, each with all events since the message before, or as many as fit."""
        while True:
            while not self._outbox:
                self._wake.clear()
                await self._wake.wait()
            message = self._outbox.popleft()
            try:
                await self._call.write(message)
            except (grpc.RpcError, asyncio.InvalidStateError):
                return  # `_read` ends too, and reports the cause
            except Exception as error:  # nothing would ever be sent again, and no log would have it
                log.exception("a message to the engine cannot be written")
                self.fail(f"{type(error).__name__}: {error}")
                return

    async def _watch(self) -> None:
        """Gives the engine up after a silence.

        Counts slices of the silence rather than seconds. A loop that was itself held up for seconds finds the engine's
        messages unread; it reads them before the next slice ends.
        """
        slices, silent = 10, 0
        while silent < slices:
            heard = self._heard
            await asyncio.sleep(self._silence / slices)
            silent = silent + 1 if self._heard == heard else 0
        self.fail(f"it gave no sign of life for {self._silence:g} s")
        self._call.cancel()

    def fail(self, why: str) -> None:
        """Gives the engine up for this reason; its live attempts end with ENGINE_FAILED."""
        if self.failure is None:
            self.failure = why
            self._send_failure()

    def _send_failure(self) -> None:
        message = f"the engine is gone: {self.failure}"
        ends = tuple(End(attempt, EndReason.ENGINE_FAILED, message=message) for attempt in sorted(self._live))
        self._live.clear()
        self._sink(nothing(replace(self._stats, running=0, waiting=0, waiting_tokens=0, pages_used=0), ends))


def _sentence(error: grpc.RpcError) -> str:
    return f"the link broke: {error.code().name.lower()}: {error.details()}"
