"""asyncio clients that go on with another server, and the connections that they share: servers that do as told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc import aio
from quire.v1 import generation_service_pb2 as pb
from quire.v1 import generation_service_pb2_grpc as pb_grpc

from rpc.client import tries
from rpc.client.channels import CALLS_A_CONNECTION
from rpc.client.resuming_async import AsyncResuming, Channels
from rpc.client.tries import Tries
from tests.rpc.client.test_resuming import message


class Scripted(pb_grpc.GenerationServiceServicer):
    """scripts: for each call what it gives: messages, then None for a lost connection, ... for waiting. Keeps what was
    asked, and which calls were cancelled.
    """

    def __init__(self, *scripts: list) -> None:
        self._scripts = list(scripts)
        self.asked: list[pb.StreamGenerateRequest] = []
        self.metadata: list[dict] = []
        self.cancelled = asyncio.Event()
        self.peers: set[str] = set()

    async def StreamGenerate(  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: aio.ServicerContext
    ) -> AsyncIterator[pb.StreamGenerateResponse]:
        self.asked.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.peers.add(context.peer())
        for item in self._scripts.pop(0):
            if item is None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")
            elif item is ...:
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            else:
                yield item


@asynccontextmanager
async def serving(*services: Scripted) -> AsyncIterator[tuple[list[str], Channels]]:
    servers, addresses, channels = [], [], Channels()
    for service in services:
        server = aio.server()
        pb_grpc.add_GenerationServiceServicer_to_server(service, server)
        addresses.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        servers.append(server)
    try:
        yield addresses, channels
    finally:
        await channels.close()
        for server in servers:
            await server.stop(None)


def request(count: int = 1) -> pb.StreamGenerateRequest:
    made = pb.StreamGenerateRequest(request_id="mine")
    made.spec.sampling.sequence_count = count
    made.spec.output.token_ids = True
    return made


async def tokens(stream: AsyncResuming) -> list[int]:
    return [token async for got in stream.messages() for delta in got.deltas for token in delta.token_ids]


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PAUSE", 0.0)


async def test_it_goes_on_from_what_came() -> None:
    seeded = message(1, 2)
    seeded.prompt_info.seed = 77
    first, second = Scripted([seeded, None], [message(3, end=True)]), Scripted([None])
    async with serving(first, second) as (addresses, channels):
        stream = AsyncResuming(channels, Tries(addresses, 30), request(), (("authorization", "Bearer x"),))
        assert await tokens(stream) == [1, 2, 3]
        assert stream.server == addresses[0]
    asked = [first.asked[0], second.asked[0], first.asked[1]]
    assert [list(one.spec.output_prefix.ids) for one in asked] == [[], [1, 2], [1, 2]]
    assert [one.spec.sampling.seed for one in asked] == [0, 77, 77]
    assert [one.request_id for one in asked] == ["mine", "", ""]
    assert {one["authorization"] for one in first.metadata + second.metadata} == {"Bearer x"}


async def test_an_end_whose_last_word_was_lost_is_the_end() -> None:
    service = Scripted([message(1, end=True), None])
    async with serving(service) as (addresses, channels):
        assert await tokens(AsyncResuming(channels, Tries(addresses, None), request())) == [1]


async def test_what_no_other_server_can_mend() -> None:
    several = Scripted([message(1), message(2, index=1), None])
    async with serving(several) as (addresses, channels):
        with pytest.raises(grpc.RpcError):
            await tokens(AsyncResuming(channels, Tries(addresses, None), request(2)))
    silent = Scripted(*[[None]] * 3)
    async with serving(silent) as (addresses, channels):
        with pytest.raises(grpc.RpcError):
            await tokens(AsyncResuming(channels, Tries(addresses, None), request()))
    assert len(silent.asked) == 3


@pytest.mark.parametrize("how", ["closed", "cancelled"])
async def test_who_stops_reading_cancels_the_call(how: str) -> None:
    """The server is to see the cancel within a minute, else `wait_for` raises."""
    service = Scripted([message(1), ...])
    async with serving(service) as (addresses, channels):
        messages = AsyncResuming(channels, Tries(addresses, None), request()).messages()
        await anext(messages)
        if how == "closed":
            await messages.aclose()
        else:
            waiting = asyncio.create_task(anext(messages))
            await asyncio.sleep(0)  # it has begun to wait
            waiting.cancel()
        await asyncio.wait_for(service.cancelled.wait(), 60)


async def test_who_cancels_while_it_waits_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Scripted([None], [message(1)])
    async with serving(service) as (addresses, channels):
        monkeypatch.setattr(Tries, "pause", lambda *_: 600)
        stream = AsyncResuming(channels, Tries(addresses, None), request())
        waiting = asyncio.create_task(tokens(stream))
        while not service.asked:
            await asyncio.sleep(0)
        stream.cancel()
        with pytest.raises((asyncio.CancelledError, grpc.RpcError)):
            await waiting
        assert not waiting.cancelling()


async def test_calls_share_connections_up_to_what_one_takes() -> None:
    """The last connection stays open without calls, so as many calls again need one new connection."""
    count = CALLS_A_CONNECTION + 1
    service = Scripted(*[[message(1), ...]] * 2 * count)
    async with serving(service) as (addresses, channels):
        for connections in (2, 3):
            streams = [AsyncResuming(channels, Tries(addresses, None), request()).messages() for _ in range(count)]
            await asyncio.gather(*(anext(stream) for stream in streams))
            assert len(service.peers) == connections
            for stream in streams:
                await stream.aclose()
