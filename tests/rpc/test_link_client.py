"""The frontend's end of the link, over a real socket: what it makes of an engine that goes, hangs or talks nonsense."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb

from rpc.frontend.engine_client import Reach
from rpc.link import codec
from rpc.link.client import LinkClient
from rpc.link.server import LinkService
from scheduler.events import Abort, EndReason, EngineStats, Event, Submit
from scheduler.settings import RequestLimits
from tests.scheduler.workloads import make_request
from tests.support.distance import far_away
from tests.support.frontends import PuppetEngine, outputs
from tests.support.links import (
    DEADLINE,
    Heard,
    MortalEngine,
    Scripted,
    at,
    connected,
    eventually,
    linked,
    serving,
    submit,
)

Requests = AsyncIterator[pb.ConnectRequest]
INFO = PuppetEngine().info
GONE = [EndReason.ENGINE_FAILED]


@pytest.fixture
def fast_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.server.HEARTBEAT", 0.02)


async def test_a_stopped_server_ends_every_live_attempt_once(tmp_path: Path) -> None:
    service = LinkService()
    engine = MortalEngine(service.sink)
    service.attach(engine)
    async with serving(service, tmp_path) as (target, server), connected(target) as (client, heard):
        client.send([submit(1), submit(2), submit(3)])
        await eventually(lambda: len(engine.sent) == 3)
        stats = EngineStats(running=2, waiting=1, waiting_tokens=3, pages_used=9, pages_total=256, steps=4)
        engine.tell(replace(outputs([(at(1, 1), 0, 70)], [(at(1, 3), EndReason.STOP)]), stats=stats))
        await eventually(lambda: heard.ends)
        await server.stop(None)
        await eventually(lambda: client.failure)
        assert heard.reasons() == {1: GONE, 2: GONE, 3: [EndReason.STOP]}
        assert heard.ends[1][0].message == f"the engine is gone: {client.failure}"
        assert heard.steps[-1].stats == EngineStats(pages_total=256, steps=4), "gauges fall, counts stay"
        client.send([submit(4), Abort(1), submit(5)])
        assert heard.reasons() == {1: GONE, 2: GONE, 3: [EndReason.STOP], 4: GONE, 5: GONE}


async def say_what_it_is(context: aio.ServicerContext) -> None:
    await context.write(codec.encode_info(INFO))


async def test_a_silent_engine_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.client.LATE", 0.05)
    hung_up = asyncio.Event()

    async def script(requests: Requests, context: aio.ServicerContext) -> None:
        await say_what_it_is(context)
        try:
            await asyncio.Event().wait()
        finally:
            hung_up.set()

    async with (
        serving(Scripted(script), tmp_path) as (target, _),
        connected(target, silence=0.2) as (client, heard),
    ):
        client.send([submit(1)])
        await eventually(lambda: client.stalled_for() > 0.0)
        await eventually(lambda: client.failure)
        assert client.failure == "it gave no sign of life for 0.2 s"
        assert heard.reasons() == {1: GONE}
        await hung_up.wait()
    assert client.failure == "it gave no sign of life for 0.2 s", "the first reason stays"
    assert len(heard.ends[1]) == 1


@pytest.mark.usefixtures("fast_heartbeat")
class Cable:
    """From a port of this machine to a socket, until it is cut: then nothing comes through, and no end is notified."""

    def __init__(self, path: str) -> None:
        self._path, self._parts = path, list[asyncio.Task[None]]()

    async def lay(self) -> str:
        """Returns the address of its near end."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._path)
        ways = ((reader, far_writer), (far_reader, writer))
        self._parts += [asyncio.create_task(self._carry(*way)) for way in ways]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while some := await reader.read(65536):
            writer.write(some)

    def cut(self) -> None:
        for part in self._parts:
            part.cancel()

    def take_up(self) -> None:
        self.cut()
        self._server.close()


async def test_a_cable_that_is_cut_while_it_writes_is_missed_as_soon(tmp_path: Path, fast_heartbeat: None) -> None:
    """The message fits into no buffer on the way; the client does not wait until the kernel gives up, after minutes."""

    async with asyncio.timeout(60), linked(tmp_path) as (target, _, engine):
        cable = Cable(target.removeprefix("unix:"))
        async with connected(await cable.lay(), silence=0.5) as (client, heard):
            client.send([submit(1)])
            await eventually(lambda: engine.sent)
            cable.cut()
            long = make_request(1, 100_000)
            for attempt in range(2, 100):
                client.send([Submit(attempt, long)])
                await asyncio.sleep(0)
            await eventually(lambda: client.failure)
            assert client.failure == "it gave no sign of life for 0.5 s"
            assert heard.reasons() == dict.fromkeys(range(1, 100), GONE)
        cable.take_up()


@pytest.mark.slow
async def test_a_loop_that_was_held_up_itself_does_not_blame_the_engine(tmp_path: Path) -> None:
    async with linked(tmp_path) as (target, _, _), connected(target, silence=0.3) as (client, heard):
        await eventually(lambda: len(heard.steps) >= 2)
        time.sleep(0.4)  # holds up the loop
        before = len(heard.steps)
        # 25 signs of life take longer than the silence that may be.
        await eventually(lambda: client.failure or len(heard.steps) >= before + 25)
        assert client.failure is None


async def hang_up(requests: Requests, context: aio.ServicerContext) -> None:
    return


async def abort(requests: Requests, context: aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "no model")


async def talk_of_something_else(requests: Requests, context: aio.ServicerContext) -> None:
    await context.write(codec.encode_outputs(outputs(), 0.0))
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("script", "why"),
    [(hang_up, "did not say what it is"), (abort, "no model"), (talk_of_something_else, "did not say what it is")],
)
async def test_connecting_fails_where_the_engine_does_not_introduce_itself(
    tmp_path: Path, script: object, why: str
) -> None:
    async with serving(Scripted(script), tmp_path) as (target, _):
        with pytest.raises(ConnectionError, match=why):
            await connected(target).__aenter__()


async def test_a_message_that_cannot_be_read_ends_the_link_by_name(tmp_path: Path) -> None:
    async def script(requests: Requests, context: aio.ServicerContext) -> None:
        await say_what_it_is(context)
        await context.write(pb.ConnectResponse(outputs=pb.Outputs(attempts=bytes(8), positions=bytes(3))))
        await asyncio.Event().wait()

    async with serving(Scripted(script), tmp_path) as (target, _), connected(target) as (client, heard):
        client.send([submit(1)])
        await eventually(lambda: client.failure)
        assert client.failure.startswith("positions has 3 bytes")
        assert heard.reasons() == {1: GONE}


async def test_an_event_that_the_link_cannot_carry_is_answered_alone(tmp_path: Path) -> None:
    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, heard):
        client.send([submit(1), submit(2, stop_ids=(-1,)), submit(3)])
        assert heard.reasons() == {2: [EndReason.FAULT]}
        assert "cannot be sent" in heard.ends[2][0].message
        await eventually(lambda: engine.submitted() == [at(1, 1), at(1, 3)])
        assert client.failure is None


class Mailbox:
    """Stream in place of the engine's, whose next message a test puts in.

    Attributes:
        message: The next message.
        reads: Released whenever the client begins to read.
    """

    def __init__(self) -> None:
        self.message: asyncio.Future[pb.ConnectResponse] = asyncio.get_running_loop().create_future()
        self.reads = asyncio.Semaphore(0)

    async def initial_metadata(self) -> tuple[()]:
        return ()

    async def read(self) -> pb.ConnectResponse:
        self.reads.release()
        message = await self.message
        self.message = asyncio.get_running_loop().create_future()
        return message

    async def write(self, message: pb.ConnectRequest) -> None:
        return

    def cancel(self) -> None:
        return


async def test_a_message_that_comes_as_the_engine_is_given_up_ends_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mailbox, heard = Mailbox(), Heard()
    stub = SimpleNamespace(Connect=lambda **_: mailbox)
    monkeypatch.setattr("rpc.link.client.pb_grpc.EngineServiceStub", lambda _: stub)
    client = LinkClient(Reach("unix:nowhere"), heard, RequestLimits(), 10.0)
    mailbox.message.set_result(codec.encode_info(INFO))
    await client.connect()
    for _ in range(2):  # the one of `connect`, and the one that waits for outputs
        await mailbox.reads.acquire()
    client.send([submit(1)])
    mailbox.message.set_result(codec.encode_outputs(outputs(ends=[(1, EndReason.STOP)]), 0.0))
    client.fail("it gave no sign of life")  # in the same turn of the loop, as after a silence
    await mailbox.reads.acquire()  # the message was taken in
    await client.close()
    assert heard.wrong == []
    assert len(heard.ends[1]) == 1


async def test_events_that_are_large_together_go_in_several_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of all live requests go to the next engine at once, and no message can have 2 GiB."""
    one = codec.encode_events([submit(10)]).ByteSize()
    monkeypatch.setattr("rpc.link.client.MESSAGE_BYTES", 3 * one + 1)
    sizes, decode = list[tuple[int, int]](), codec.decode_events

    def noted(message: pb.ConnectRequest) -> list[Event]:
        sizes.append((len(message.submits), message.ByteSize()))
        return decode(message)

    monkeypatch.setattr("rpc.link.server.codec.decode_events", noted)
    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, _):
        client.send([submit(attempt) for attempt in range(10, 20)])
        await eventually(lambda: len(engine.submitted()) == 10)
        assert engine.submitted() == [at(1, attempt) for attempt in range(10, 20)]
    assert [count for count, _ in sizes if count] == [3, 3, 3, 1]
    assert max(size for _, size in sizes) <= 3 * one + 1


async def test_an_engine_whose_step_hangs_is_lost(tmp_path: Path, fast_heartbeat: None) -> None:
    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, heard):
        client.send([submit(1)])
        await eventually(engine.submitted)
        assert client.failure is None
        engine.hangs = "a step has run for 9 s"
        await eventually(lambda: client.failure)
        assert client.failure == "a step has run for 9 s"
        assert heard.reasons() == {1: GONE}


async def test_an_engine_whose_answers_come_late_is_connected_to(tmp_path: Path) -> None:
    """Later than the pause between two attempts to connect, which are short for an engine that is not there yet."""
    async with (
        asyncio.timeout(DEADLINE),
        linked(tmp_path) as (target, _, engine),
        far_away(target, tmp_path, 0.4) as address,
        connected(address) as (client, heard),
    ):
        client.send([submit(1)])
        await eventually(lambda: engine.sent)
        engine.tell(outputs([(at(1, 1), 0, 70)], [(at(1, 1), EndReason.STOP)]))
        await eventually(lambda: heard.ends)
        assert heard.tokens == {1: [70]}
