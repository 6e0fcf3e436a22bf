"""The servers behind a gateway: calls that go on with the next one where one is lost."""

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
GRACE = 10.0  # seconds that a server gets beyond a request's own time, to say that it is over
MOST_QUESTIONS = 32  # small calls of a gateway at once


class Upstream:
    """servers: HOST:PORT of each, which serve the same model. The one that served last is asked first, so that one that
    is gone costs a try only now and then. Lives on one asyncio loop.
    """

    def __init__(
        self,
        servers: Sequence[str],
        request_time: float,
        security: Security = OPEN,
        failed: Callable[[Failure], None] = lambda _: None,
    ) -> None:
        """failed: gets what each failed call says."""
        self._servers, self._request_time = list(servers), request_time
        self._channels = Channels(security)
        self._questions = asyncio.Semaphore(MOST_QUESTIONS)
        self._lost = LostServers(failed)

    def _served(self, server: str) -> None:
        first = self._servers.index(server)
        self._servers = self._servers[first:] + self._servers[:first]

    async def stream(
        self, request: pb.StreamGenerateRequest, metadata: Metadata
    ) -> AsyncGenerator[pb.StreamGenerateResponse, None]:
        """As `AsyncResuming.messages`."""
        request.spec.max_time.FromMilliseconds(round(1000 * self._request_time))
        tries = LoggedTries(self._lost, self._servers, self._request_time + GRACE)
        stream = AsyncResuming(self._channels, tries, request, metadata)
        before = self._servers[0]
        async with aclosing(stream.messages()) as messages:
            async for message in messages:
                self._lost.answered(stream.server)
                if stream.server != before:
                    before = stream.server
                    self._served(before)
                yield message

    async def ask(self, stub: type, method: str, request: Any, metadata: Metadata) -> Any:
        """One answer. Raises grpc.RpcError, of the last server that was asked."""
        servers = list(self._servers)
        async with self._questions:
            for server in servers:
                try:
                    answer = await self._ask_one(server, stub, method, request, metadata, UNARY_SECONDS)
                except grpc.RpcError as error:
                    if error.code() not in LOST or server == servers[-1]:
                        raise
                else:
                    self._served(server)
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
        """Whether one of the servers serves."""
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
    """What comes of several streams as it comes, with the stream's number; of each no more than one thing waits. Raises
    what the first one raises that fails.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    came: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(len(streams))
    leaving = False

    async def read(number: int, stream: AsyncGenerator[T, None]) -> None:
        """Its end, None, and what it raises come in the queue too: who takes from it waits for nothing else."""
        end: BaseException | None = None
        try:
            async with aclosing(stream) as opened:
                async for item in opened:
                    await came.put((number, item))
        except BaseException as error:
            if leaving:
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
