"""Frontends that lag: one gets several steps in a message, one that lags without end harms no other."""

import asyncio
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from rpc.link import codec
from rpc.link.server import Connection, LinkService
from scheduler.events import EndReason, EngineStats, Logprobs, StepOutputs
from tests.support.frontends import outputs
from tests.support.links import MortalEngine, at, connected, eventually, linked, raw_call, read_to_end, submit

GONE = [EndReason.ENGINE_FAILED]


def bulk(attempt: int, first: int, n: int, k: int = 0) -> StepOutputs:
    """n tokens of one attempt, each with k alternatives."""
    made = np.zeros((n, k), np.int32)
    return replace(
        outputs([(attempt, first + i, i) for i in range(n)]),
        logprobs=Logprobs(np.zeros(n, np.float32), np.ones(n, np.int32), made, made.astype(np.float32)),
        step_seconds=(0.5,),
    )


async def test_a_frontend_that_lags_gets_several_steps_in_one_message(tmp_path: Path) -> None:
    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, heard):
        client.send([submit(1)])
        await eventually(engine.submitted)
        for position in range(50):  # all of them before the loop turns
            engine.tell(bulk(at(1, 1), position, 1, k=position % 3))
        engine.tell(outputs(ends=[(at(1, 1), EndReason.LENGTH)]))
        await eventually(lambda: heard.ends)
        assert heard.tokens[1] == [0] * 50
        messages = [step for step in heard.steps if len(step.attempts)]
        assert len(messages) == 1
        assert messages[0].step_seconds == (0.5,) * 50


async def test_a_frontend_that_never_reads_is_cut_off_and_costs_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.link.server.MOST_PENDING", 8 * 2**20)
    size = 400

    async with (
        linked(tmp_path) as (target, service, engine),
        connected(target) as (reads, heard),
        raw_call(target) as deaf,
    ):
        reads.send([submit(1)])
        await deaf.write(codec.encode_events([submit(1), submit(2)]))
        await eventually(lambda: len(engine.sent) == 3)
        told = 0

        def another_step() -> bool:
            nonlocal told
            engine.tell(bulk(at(2, 1), told * size, size, k=256))
            engine.tell(outputs([(at(1, 1), told, told % 100)]))
            told += 1
            return len(engine.finished()) > 0

        await eventually(another_step)
        assert sorted(engine.finished()) == [at(2, 1), at(2, 2)]
        for _ in range(20):
            another_step()
        await eventually(lambda: len(heard.tokens[1]) == told)
        held = service.connections[2].pending if 2 in service.connections else []
        assert sum(len(step.attempts) for step in held) <= size, "more than the last step is held"
        messages, code, details = await read_to_end(deaf)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "does not read" in details
        arrived = sum(len(codec.decode_outputs(message.outputs).attempts) for message in messages)
        assert 0 < arrived < told * size
        await eventually(lambda: 2 not in service.connections)
        assert sorted(engine.finished()) == [at(2, 1), at(2, 2)], "each is ended once"
        assert reads.failure is None


async def test_a_frontend_with_too_much_at_once_is_told_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.server.MOST_PENDING", 1000)

    async with linked(tmp_path) as (target, _, engine), connected(target) as (client, heard):
        client.send([submit(1)])
        await eventually(engine.submitted)
        for part in range(3):
            engine.tell(bulk(at(1, 1), part * 500, 500))
        await eventually(lambda: client.failure)
        assert "does not read" in client.failure
        assert heard.reasons() == {1: GONE}
        await eventually(engine.finished)
        assert engine.finished() == [at(1, 1)]


async def test_a_dead_engine_and_a_deaf_frontend_do_not_keep_each_other_busy() -> None:
    service = LinkService()
    engine = MortalEngine(service.sink)
    service.attach(engine)
    service.connections[1] = deaf = Connection(1)  # whose message is never taken
    deaf.overrun = True
    deliver, delivered = service.deliver, []
    service.deliver = lambda step: (delivered.append(step), deliver(step))
    engine.die("device lost")
    for _ in range(200):  # turns of the loop, most of which have nothing to do
        await asyncio.sleep(0)
    assert 0 < len(delivered) < 20


async def test_one_huge_step_is_no_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search tells its whole result in one."""
    monkeypatch.setattr("rpc.link.server.MOST_PENDING", 1000)

    connection = Connection(1)
    connection.add(bulk(1, 0, 1000))
    assert not connection.overrun
    connection.add(outputs())
    assert connection.overrun


async def test_steps_without_a_token_do_not_wait_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.server.MOST_PENDING", 1000)

    connection = Connection(1)
    for _ in range(5000):
        connection.add(outputs())
    assert connection.overrun or len(connection.pending) <= 1000


async def test_what_was_taken_does_not_count_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each link would be cut in the end, however quickly its frontend reads."""
    monkeypatch.setattr("rpc.link.server.MOST_PENDING", 1000)

    connection = Connection(1)
    for position in range(5):
        connection.add(bulk(1, position, 1))
        connection.take(EngineStats())
    assert not connection.overrun
