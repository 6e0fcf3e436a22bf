"""`rpc.client.resuming` for asyncio: streams that survive the loss of a server, over shared connections."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import grpc
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.client.channels import CALLS_A_CONNECTION, CHANNEL_OPTIONS
from rpc.client.failures import failure_of
from rpc.client.resuming import Progress
from rpc.client.security import OPEN, Metadata, Security
from rpc.client.tries import Tries

END: Any = vars(aio)["EOF"]  # its type stubs lack it


class Channels:
    """Pool of connections, each with up to `CALLS_A_CONNECTION` calls at once.

    The pool belongs to one asyncio loop. The last connection to a server stays open without calls. A server that is
    silent for 30 seconds counts as lost.
    """

    def __init__(self, security: Security = OPEN) -> None:
        self._security = security
        self._open: dict[str, list[_Shared]] = {}
        self._closed = False
        self._closing: set[asyncio.Task[None]] = set()

    @contextmanager
    def lease(self, server: str) -> Iterator[aio.Channel]:
        """Lends a connection for one call.

        Args:
            server: HOST:PORT.

        Raises:
            RuntimeError: After `close`.
        """
        if self._closed:
            raise RuntimeError("the client is closed")
        known = self._open.setdefault(server, [])
        shared = next((one for one in known if one.calls < CALLS_A_CONNECTION), None)
        if shared is None:
            shared = _Shared(self._security.aio_channel(server, CHANNEL_OPTIONS))
            known.append(shared)
        shared.calls += 1
        try:
            yield shared.channel
        finally:
            shared.calls -= 1
            if not shared.calls and len(known) > 1:
                known.remove(shared)
                # The loop has a weak reference to a task: the set keeps it alive, and `close` waits for it.
                task = asyncio.create_task(shared.channel.close(None))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all connections; calls that run are cancelled."""
        self._closed = True
        channels = [shared.channel for known in self._open.values() for shared in known]
        self._open.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels), *self._closing)


class _Shared:
    """A connection and the number of its calls."""

    def __init__(self, channel: aio.Channel) -> None:
        self.channel, self.calls = channel, 0


class AsyncResuming:
    """Stream of one request that goes on at the next server; `Resuming` for asyncio.

    Args:
        channels: Connections that the calls share.
        tries: Servers and retries of this request.
        request: The message to send; it is copied.
        metadata: gRPC metadata of each call.
    """

    def __init__(
        self,
        channels: Channels,
        tries: Tries,
        request: pb.StreamGenerateRequest,
        metadata: Metadata = (),
    ) -> None:
        self._channels, self._metadata = channels, metadata
        self._progress = Progress(tries, request)
        self._call: Any = None
        self._cancelled = asyncio.Event()

    def cancel(self) -> None:
        """Cancels the stream; its reader gets asyncio.CancelledError."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    @property
    def server(self) -> str:
        """HOST:PORT of the server that was asked last."""
        return self._progress.server

    async def messages(self) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """Yields the messages of StreamGenerate, each token once.

        Closing the generator before the end cancels the call.

        Raises:
            grpc.RpcError: The request failed, and another try cannot help.
        """
        progress = self._progress
        while True:
            left = progress.begin()
            with self._channels.lease(progress.server) as channel:
                stub = pb_grpc.GenerationServiceStub(channel)
                call = self._call = stub.StreamGenerate(progress.request, timeout=left, metadata=self._metadata)
                if self._cancelled.is_set():  # `cancel` came while no call was open
                    call.cancel()
                try:
                    while (message := await call.read()) is not END:
                        yield progress.record(message)
                    return
                except grpc.RpcError as error:
                    if progress.complete:  # only the status of the call was lost
                        return
                    pause = progress.pause(failure_of(error))
                    if pause is None:
                        raise
                finally:
                    call.cancel()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._cancelled.wait()
