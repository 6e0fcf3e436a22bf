"""The servers behind a gateway. A call to a lost server goes on at the next one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quire.v1 import generation_service_pb2 as pb

from rpc.client.failures import Failure, failure_of
from rpc.client.resuming_async import AsyncResuming, Channels
from rpc.client.security import OPEN, Metadata, Security
from rpc.client.tries import LOST
from rpc.gateway.lost import LoggedTries, LostServers

T = TypeVar("T")

UNARY_SECONDS, HEALTH_SECONDS = 15.0, 2.0
GRACE = 10.0  # seconds that a server gets beyond a request's own time, to end it itself
MOST_UNARY_CALLS = 32  # unary calls of a gateway at once


class Upstream:
    """Servers with the same model. Lives on one asyncio loop.

    Calls begin at the server that answered last, so a lost server costs a try only now and then.

    Args:
        servers: HOST:PORT of each.
        request_time: Seconds for a whole request.
        security: Credentials of the gateway.
        failed: Called with each failed call.
    """

    def __init__(
        self,
        servers: Sequence[str],
        request_time: float,
        security: Security = OPEN,
        failed: Callable[[Failure], None] = lambda _: None,
    ) -> None:
        self._servers, self._request_time = list(servers), request_time
        self._channels = Channels(security)
        self._unary_calls = asyncio.Semaphore(MOST_UNARY_CALLS)
        self._lost = LostServers(failed)

    def _ask_first(self, server: str) -> None:
        """Rotates the list of servers, so that the next call begins at this one."""
        first = self._servers.index(server)
        self._servers = self._servers[first:] + self._servers[:first]

    async def stream(
        self, request: pb.StreamGenerateRequest, metadata: Metadata
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """Yields the messages of one request, like `AsyncResuming.messages`. Raises grpc.RpcError."""
        request.spec.max_time.FromMilliseconds(round(1000 * self._request_time))
        tries = LoggedTries(self._lost, self._servers, self._request_time + GRACE)
        stream = AsyncResuming(self._channels, tries, request, metadata)
        before = self._servers[0]
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                self._lost.answered(stream.server)
                if stream.server != before:
                    before = stream.server
                    self._ask_first(before)
                yield message

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        """Makes a unary call, at the next server if one is lost. Raises grpc.RpcError of the last server."""
        servers = list(self._servers)  # other calls may rotate the list meanwhile
        async with self._unary_calls:
            for server in servers:
                try:
                    answer = await self._ask_one(server, stub, method, request, metadata, UNARY_SECONDS)
                except grpc.RpcError as error:
                    if error.code() not in LOST or server == servers[-1]:
                        raise
                else:
                    self._ask_first(server)
                    return answer
        raise RuntimeError("there are no servers")

    async def _ask_one(
        self, server: str, stub: type, method: str, request: Any, metadata: Metadata, seconds: float
    ) -> Any:
        try:
            with self._channels.lease(server) as channel:
                answer = await getattr(stub(channel), method)(request, timeout=seconds, metadata=metadata)
        except grpc.RpcError as error:
            self._lost.failed(server, failure_of(error))
            raise
        self._lost.answered(server)
        return answer

    async def healthy(self) -> bool:
        """Returns whether at least one server serves."""
        request = health_pb2.HealthCheckRequest()
        calls = [
            self._ask_one(server, health_pb2_grpc.HealthStub, "Check", request, (), HEALTH_SECONDS)
            for server in self._servers
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        serving = health_pb2.HealthCheckResponse.SERVING
        return any(not isinstance(answer, BaseException) and answer.status == serving for answer in answers)

    async def close(self) -> None:
        await self._channels.close()


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of several streams as they come, with the index of their stream.

    At most one item of each stream waits in the queue. The first failure of a stream ends all, and is raised.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    came: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(len(streams))
    leaving = False

    async def read(number: int, stream: AsyncGenerator[T, None]) -> None:
        """Puts the stream's items, then None or its exception, so that the reader waits for the queue alone."""
        end: BaseException | None = None
        try:
            async with aclosing(stream) as opened:
                async for item in opened:
                    await came.put((number, item))
        except BaseException as error:
            if leaving:  # cancelled, and no reader takes from the queue any more
                raise
            end = error
        await came.put(end)

    tasks = [asyncio.create_task(read(number, stream)) for number, stream in enumerate(streams)]
    try:
        reading = len(tasks)
        while reading:
            next_one = await came.get()
            if isinstance(next_one, BaseException):
                raise next_one
            if next_one is None:
                reading -= 1
            else:
                yield next_one
    finally:
        leaving = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
