"""A message may wait for its reader for so long, however many went before it."""

import asyncio

import pytest
from grpc import aio

from rpc.frontend.errors import RequestFailed
from rpc.services.writer import StreamWriter
from tests.support.virtual_time import in_virtual_time

STALL = 0.5


class Client:
    """Enough of grpc.aio's ServicerContext: reads each message after some seconds."""

    def __init__(self, *delays: float) -> None:
        self._delays = iter(delays)
        self.read: list[object] = []

    async def write(self, message: object) -> None:
        delay = next(self._delays, None)
        if delay is None:
            raise ConnectionError("the client has left")
        await asyncio.sleep(delay)
        self.read.append(message)


async def write(client: Client, messages: int, pause: float = 0.0) -> None:
    writer = StreamWriter(client, STALL)

    async def send() -> None:
        for i in range(messages):
            await writer.write(i)
            await asyncio.sleep(pause)

    await writer.run(send())


@in_virtual_time
async def test_slow_messages_and_long_pauses_are_no_stall() -> None:
    slow, seldom = Client(*[0.6 * STALL] * 4), Client(0, 0)
    await asyncio.gather(write(slow, 4), write(seldom, 2, 1.5 * STALL))
    assert (slow.read, seldom.read) == ([0, 1, 2, 3], [0, 1])


@pytest.mark.parametrize("before", [[], [0.0], [0.9 * STALL], [0.0, 0.5 * STALL, 0.0]])
@in_virtual_time
async def test_message_that_nobody_reads_ends_the_call_after_its_own_time(before: list[float]) -> None:
    client, began = Client(*before, 60), asyncio.get_running_loop().time()
    with pytest.raises(RequestFailed) as failed:
        await write(client, len(before) + 1)
    assert failed.value.reason == "SLOW_READER"
    assert len(client.read) == len(before)
    assert asyncio.get_running_loop().time() - began == pytest.approx(sum(before) + STALL)


def test_cancel_and_errors_of_the_block_stay_what_they_are() -> None:
    async def cancelled() -> bool:
        task = asyncio.create_task(write(Client(60), 1))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(cancelled())
    with pytest.raises(ConnectionError):
        asyncio.run(write(Client(), 1))


def test_a_client_that_goes_cancels_its_call() -> None:
    """gRPC fails the write before it cancels the call, where that has several tasks that write."""

    class Gone(Client):
        async def write(self, message: object) -> None:
            raise aio.InternalError("Failed execute_batch")

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(write(Gone(), 1))
