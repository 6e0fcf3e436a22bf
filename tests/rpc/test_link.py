"""The engine's end of the link, over a real socket: who gets what, who is cut off, who hears of the engine's death."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from quire.engine.v1 import engine_service_pb2 as pb

from rpc.link import codec
from rpc.link.coalesce import LOCAL
from rpc.link.server import ABSENCE_LOOKS, Connection, LinkService
from scheduler.events import (
    SHORT_HASH,
    Abort,
    AdminAnswer,
    AdminQuery,
    AdminQuestion,
    End,
    EndReason,
    EngineStats,
    KVEvents,
    Submit,
    short_hashes,
)
from tests.scheduler.engine_rig import Rig
from tests.scheduler.executor import alone
from tests.scheduler.workloads import make_request
from tests.support.frontends import PuppetEngine, outputs
from tests.support.links import (
    Heard,
    MortalEngine,
    at,
    connected,
    eventually,
    linked,
    raw_call,
    read_to_end,
    serving,
    submit,
    unlike,
)

GONE = [EndReason.ENGINE_FAILED]


@pytest.fixture
def fast_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.server.HEARTBEAT", 0.02)


async def test_events_arrive_under_the_engines_numbers_and_outputs_under_the_frontends(tmp_path: Path) -> None:
    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, heard):
        assert unlike(client.info, engine.info) == []
        client.send([submit(3), submit(LOCAL), Abort(99), Abort(3)])
        await eventually(engine.finished)
        expected = [submit(3), submit(LOCAL), Abort(3)]
        assert unlike([replace(e, attempt=at(1, e.attempt)) for e in expected], engine.sent) == []
        engine.tell(outputs([(at(1, LOCAL), 0, 70)], [(at(1, 3), EndReason.FINISHED)], [at(1, LOCAL)]))
        await eventually(lambda: heard.ends)
        assert heard.tokens == {LOCAL: [70]}
        assert heard.reasons() == {3: [EndReason.FINISHED]}
        assert [start.attempt for step in heard.steps for start in step.starts] == [LOCAL]


async def test_two_frontends_use_the_same_numbers_and_hear_only_their_own(tmp_path: Path) -> None:
    async with (
        linked(tmp_path) as (target, _, engine),
        connected(target) as (a, to_a),
        connected(target) as (b, to_b),
    ):
        for client in (a, b):
            client.send([submit(1), submit(2)])
        await eventually(lambda: len(engine.sent) == 4)
        step = [(at(1, 1), 0, 11), (at(2, 1), 0, 21), (at(2, 2), 0, 22), (at(1, 2), 0, 12)]
        engine.tell(outputs(step, [(at(1, 1), EndReason.STOP), (at(2, 2), EndReason.LENGTH)], [at(2, 1)]))
        await eventually(lambda: to_a.ends and to_b.ends)
        assert to_a.tokens == {1: [11], 2: [12]}
        assert to_b.tokens == {1: [21], 2: [22]}
        assert (to_a.reasons(), to_b.reasons()) == ({1: [EndReason.STOP]}, {2: [EndReason.LENGTH]})
        assert not any(step.starts for step in to_a.steps)


async def test_an_answer_goes_to_who_has_asked_whatever_number_the_question_had(tmp_path: Path) -> None:
    """A frontend that puts another one's number into its own ticket does not reach that one."""
    async with linked(tmp_path) as (target, _, engine), raw_call(target) as hostile, connected(target) as (_, other):
        forged = [at(2, 7), at(3, 8), -1]
        await hostile.write(codec.encode_events([AdminQuery(ticket, AdminQuestion.PAGE_MAP) for ticket in forged]))
        await eventually(lambda: len(engine.sent) == len(forged))
        asked = [event.ticket for event in engine.sent]
        assert asked == [at(1, 7), at(1, 8), at(1, LOCAL)]
        engine.tell(replace(outputs([(at(2, 1), 0, 70)]), answers=tuple(AdminAnswer(ticket) for ticket in asked)))
        await eventually(lambda: other.tokens)
        assert not any(step.answers for step in other.steps)


async def test_a_frontend_that_comes_later_is_told_of_all_pages_that_have_names(tmp_path: Path) -> None:
    def change(removed: str, added: str) -> KVEvents:
        return KVEvents(*(b"".join(name.encode() * SHORT_HASH for name in names) for names in (removed, added)))

    def names_told(heard: Heard) -> set[bytes]:
        held = set[bytes]()
        for told in (change for step in heard.steps for change in step.kv_events):
            held = held - set(short_hashes(told.removed)) | set(short_hashes(told.added))
        return held

    async with linked(tmp_path) as (target, _, engine), connected(target) as (_, first):
        engine.tell(replace(outputs(), kv_events=(change("", "abc"), change("b", "d"))))
        await eventually(lambda: names_told(first) == {b"a" * 8, b"c" * 8, b"d" * 8})
        async with connected(target) as (_, second):
            await eventually(lambda: names_told(second) == names_told(first))
            engine.tell(replace(outputs(), kv_events=(change("a", "b"),)))
            for heard in (first, second):
                await eventually(lambda heard=heard: names_told(heard) == {b"b" * 8, b"c" * 8, b"d" * 8})


async def test_a_frontend_that_goes_ends_its_own_live_attempts_and_no_others(tmp_path: Path) -> None:
    async with linked(tmp_path) as (target, service, engine), connected(target) as (stays, _):
        stays.send([submit(1), submit(2)])
        async with connected(target) as (goes, heard):
            goes.send([submit(1), submit(2), submit(3)])
            await eventually(lambda: len(engine.sent) == 5)
            engine.tell(outputs(ends=[(at(2, 1), EndReason.STOP)]))
            await eventually(lambda: heard.ends)
        assert heard.reasons() == {1: [EndReason.STOP], 2: GONE, 3: GONE}
        await eventually(lambda: 2 not in service.connections)
        stays.send([Abort(2)])
        await eventually(lambda: at(1, 2) in engine.finished())
        assert sorted(engine.finished()) == [at(1, 2), at(2, 2), at(2, 3)]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (codec.encode_events([submit(1)]), "attempt 1 is live"),
        (codec.encode_events([submit(2), submit(2)]), "attempt 2 is live"),
        (codec.encode_events([submit(LOCAL + 1)]), f"attempt {LOCAL + 1} is live or out of range"),
        (codec.encode_events([submit(-1)]), "attempt -1 is live or out of range"),
        (pb.ConnectRequest(submits=[pb.Submit(attempt=5)]), "attempt 5 has no prompt"),
        (pb.ConnectRequest(submits=[pb.Submit(attempt=5, prompt=b"abc")]), "prompt has 3 bytes"),
    ],
)
async def test_a_frontend_with_a_wrong_message_is_cut_off_alone(
    tmp_path: Path, message: pb.ConnectRequest, why: str
) -> None:
    async with (
        linked(tmp_path) as (target, service, engine),
        connected(target) as (fine, heard),
        raw_call(target) as bad,
    ):
        fine.send([submit(1)])
        await bad.write(codec.encode_events([submit(1)]))
        await eventually(lambda: len(engine.sent) == 2)
        await bad.write(message)
        _, code, details = await read_to_end(bad)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert why in details
        await eventually(lambda: 2 not in service.connections)
        assert set(engine.finished()) - {at(2, 2)} == {at(2, 1)}, "what lived is ended"
        assert set(engine.submitted()) == {at(1, 1), at(2, 1)}, "nothing of the wrong message gets through"
        engine.tell(outputs([(at(1, 1), 0, 70)]))
        await eventually(lambda: heard.tokens == {1: [70]})
        assert fine.failure is None


@pytest.mark.usefixtures("fast_heartbeat")
async def test_an_idle_engine_is_heard_and_a_stalled_one_is_told_of(tmp_path: Path) -> None:
    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, heard):
        await eventually(lambda: len(heard.steps) >= 2)
        assert all(step.stats == EngineStats(pages_total=256) for step in heard.steps), "gauges of a new engine"
        assert client.stalled_for() == 0.0
        engine.tell(replace(outputs(), stats=EngineStats(steps=5, pages_total=256)))
        engine.stalled = 7.0
        await eventually(lambda: client.stalled_for() >= 7.0)
        assert client.stalled_for() > 7.0, "and the time since it said so"
        before = len(heard.steps)
        await eventually(lambda: len(heard.steps) >= before + 2)
        assert heard.steps[-1].stats.steps == 5, "a sign of life repeats the last stats"
        assert not any(step.step_seconds for step in heard.steps)
        engine.stalled = 0.0
        await eventually(lambda: client.stalled_for() == 0.0)


async def test_a_dead_engines_ends_come_first_then_its_reason(tmp_path: Path) -> None:
    async with (
        linked(tmp_path) as (target, service, engine),
        connected(target) as (busy, heard),
        connected(target) as (idle, _),
    ):
        busy.send([submit(1), submit(2)])
        await eventually(lambda: len(engine.sent) == 2)
        engine.tell(outputs([(at(1, 1), 0, 70)]))
        engine.die("RuntimeError: device lost")
        await service.wait_failure()
        await eventually(lambda: busy.failure and idle.failure)
        assert heard.tokens == {1: [70]}
        # The engine's own word, not what the client makes up where it hears nothing.
        lost = [End(attempt, EndReason.ENGINE_FAILED, message="RuntimeError: device lost") for attempt in (1, 2)]
        assert heard.ends == {1: lost[:1], 2: lost[1:]}
        for client in (busy, idle):
            assert "RuntimeError: device lost" in client.failure
        async with connected(target) as (late, _):
            await eventually(lambda: late.failure)
            assert "RuntimeError: device lost" in late.failure


async def test_an_engine_is_lonely_once_nobody_was_there_for_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    service, looks = LinkService(), list[float]()

    async def look(seconds: float) -> None:
        looks.append(seconds)
        service.connections = {1: Connection(1)} if len(looks) == ABSENCE_LOOKS - 1 else {}

    monkeypatch.setattr("rpc.link.server.asyncio.sleep", look)
    await service.wait_without_frontend(30.0)
    assert looks == [30.0 / ABSENCE_LOOKS] * (2 * ABSENCE_LOOKS - 1)


async def test_a_frontend_that_is_early_waits_for_the_engine(tmp_path: Path) -> None:
    service = LinkService()
    async with serving(service, tmp_path) as (target, _):
        entered = connected(target)
        waits = asyncio.create_task(entered.__aenter__())
        service.sink(outputs())  # an engine that starts may already speak
        await asyncio.sleep(0)
        assert not waits.done()
        engine = MortalEngine(service.sink)
        service.attach(engine)
        client, _ = await waits
        assert unlike(client.info, engine.info) == []
        await entered.__aexit__(None, None, None)


async def test_three_frontends_of_a_real_engine_get_what_each_would_alone(tmp_path: Path) -> None:
    requests = {attempt: make_request(attempt, 1 + attempt % 5, 3 + attempt % 17) for attempt in range(1, 25)}

    service, rig = LinkService(), Rig(depth=2, rows=4)
    rig.on_outputs = service.sink
    rig.engine.info = PuppetEngine().info
    rig.engine.start()
    service.attach(rig.engine)
    async with (
        serving(service, tmp_path) as (target, _),
        connected(target) as a,
        connected(target) as b,
        connected(target) as c,
    ):
        for client, _ in (a, b, c):
            for attempt, request in requests.items():
                client.send([Submit(attempt, request)])
        c[0].send([Abort(attempt) for attempt in requests if attempt % 2])
        await eventually(lambda: all(len(heard.ends) == len(requests) for _, heard in (a, b, c)))
    await asyncio.to_thread(rig.engine.stop)
    for _, heard in (a, b):
        assert heard.tokens == {attempt: alone(request) for attempt, request in requests.items()}
    for attempt, request in requests.items():
        told = c[1].tokens.get(attempt, [])
        assert told == alone(request)[: len(told)]
        assert attempt % 2 or told == alone(request)


async def test_ends_that_were_decided_before_the_failure_arrive(tmp_path: Path) -> None:
    """`Engine._die` sets `failure` before it calls the sink; the loop may come to the step before that in between."""

    async with linked(tmp_path) as (target, service, engine), connected(target) as (client, heard):
        client.send([submit(1), submit(2)])
        await eventually(lambda: len(engine.sent) == 2)
        engine.tell(outputs([(at(1, 1), 0, 70)]))
        engine.failure = "device lost"
        await eventually(lambda: heard.tokens)
        service.sink(outputs(ends=[(at(1, 1), EndReason.LENGTH), (at(1, 2), EndReason.ENGINE_FAILED)]))
        await eventually(lambda: client.failure)
        assert heard.reasons() == {1: [EndReason.LENGTH], 2: GONE}


async def test_a_frontend_that_leaves_before_there_is_an_engine_does_no_harm(tmp_path: Path) -> None:
    service = LinkService()
    called = asyncio.Event()
    connect = service.Connect

    async def spied(requests: object, context: object) -> None:
        called.set()
        try:
            await connect(requests, context)
        finally:
            called.clear()

    service.Connect = spied
    async with serving(service, tmp_path) as (target, _):
        waits = asyncio.create_task(connected(target).__aenter__())
        await eventually(called.is_set)
        waits.cancel()
        await eventually(lambda: not called.is_set())
        await asyncio.gather(waits, return_exceptions=True)
        service.attach(MortalEngine(service.sink))
        async with connected(target) as (client, _):
            assert client.failure is None
