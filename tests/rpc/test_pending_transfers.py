"""Transfers that are on their way: how they end, how many run at once, and what they may hold."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rpc.link import kv_transfers as module
from rpc.link import transfer_rate
from rpc.link.kv_transfers import AT_ONCE, PendingTransfers
from rpc.link.server import LinkService
from rpc.link.transfer_rate import TransferRate
from scheduler.events import Abort, AdminQuery, AdminQuestion, EndReason, Event, KVSource, StepOutputs, Submit
from tests.rpc.page_sources import (
    BYTES,
    NAMES,
    Liar,
    Port,
    answer,
    brought_by,
    check_brought,
    hanging,
    moved,
    source_of,
    target_of,
    the_submit,
)
from tests.support.frontends import outputs
from tests.support.links import DEADLINE, MortalEngine, at, connected, eventually, serving, submit

pytestmark = pytest.mark.usefixtures("patient_transfers")


@pytest.mark.parametrize("index", [None, 0])
async def test_a_finish_ends_a_pull(tmp_path: Path, index: int | None) -> None:
    source, event = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, heard, engine, service = parts
        client.send([moved(7, address), moved(8, address)])
        await eventually(lambda: len(source.reads) == 2)
        client.send([Abort(7, index)])
        await eventually(engine.finished)
        assert [(type(event), event.attempt) for event in engine.sent] == [(Submit, at(1, 7)), (Abort, at(1, 7))]
        assert not the_submit(engine).transferred
        engine.tell(outputs(ends=[(at(1, 7), EndReason.FINISHED)]))
        await eventually(lambda: heard.reasons() == {7: [EndReason.FINISHED]})
        event.set()
        await eventually(lambda: len(engine.submitted()) == 2)
        check_brought(engine.sent[-1], NAMES)
        assert service.transfers is not None
        assert not service.transfers.pending
        await eventually(lambda: not service.transfers.channels)


async def test_others_do_not_wait_behind_a_pull(tmp_path: Path) -> None:
    source, event = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        client.send([moved(7, address), submit(8)])
        await eventually(lambda: engine.submitted() == [at(1, 8)])
        event.set()
        await eventually(lambda: engine.submitted() == [at(1, 8), at(1, 7)])


async def test_a_few_transfers_run_at_once_and_all_end_in_the_time_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRANSFER_SECONDS", 2.0)

    source, event = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        many = 4 * AT_ONCE * int(DEADLINE)  # one after the other they would take eight times as long as is waited here
        client.send([moved(attempt, address) for attempt in range(1, many + 1)])
        await eventually(lambda: len(source.reads) == AT_ONCE)
        await eventually(lambda: len(engine.submitted()) == many)
        assert not any(event.transferred for event in engine.sent if isinstance(event, Submit))
        event.set()


async def test_a_frontend_that_leaves_ends_its_pulls(tmp_path: Path) -> None:
    source, _ = hanging()
    async with source_of(tmp_path, source) as (address, _):
        service = LinkService()
        engine = MortalEngine(service.sink)
        service.attach(engine, Port())
        async with serving(service, tmp_path) as (target, _):
            async with connected(target) as (client, _):
                client.send([moved(7, address)])
                await eventually(lambda: source.reads)
            await eventually(engine.finished)
            assert [type(event) for event in engine.sent] == [Submit, Abort]
            assert service.transfers is not None
            assert not service.transfers.pending
            assert not service.transfers.held


@pytest.mark.parametrize(
    "free",
    [lambda: outputs(starts=[at(1, 1)]), lambda: outputs(ends=[(at(1, 1), EndReason.STOP)])],
    ids=["start", "end"],
)
async def test_pages_that_wait_with_their_requests_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: Callable[[], StepOutputs]
) -> None:
    """The third request's are asked for once another one has started, or ended."""
    monkeypatch.setattr(module, "MOST_HELD", 2 * 12 * 2 * BYTES)

    source = Port(NAMES)
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, service = parts
        client.send([moved(attempt, address) for attempt in (1, 2, 3)])
        await eventually(lambda: len(engine.submitted()) == 2)
        await asyncio.sleep(0.05)
        assert len(source.reads) == 2
        engine.tell(free())
        await eventually(lambda: len(engine.submitted()) == 3)
        engine.tell(outputs(ends=[(at(1, attempt), EndReason.STOP) for attempt in (2, 3)]))
        assert service.transfers is not None
        await eventually(lambda: not service.transfers.held)


async def test_a_pull_that_brought_nothing_holds_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request may wait for long before it starts, and there are no pages of it."""
    monkeypatch.setattr(module, "MOST_HELD", 12 * 2 * BYTES)

    place = tmp_path / "liar"
    place.mkdir()
    async with (
        serving(Liar(), place) as (empty, _),
        source_of(tmp_path, Port(NAMES)) as (address, _),
        target_of(tmp_path, Port()) as (client, _, engine, _),
    ):
        client.send([moved(1, empty)])
        await eventually(engine.submitted)
        client.send([moved(2, address)])
        await eventually(lambda: len(engine.submitted()) == 2)
        check_brought(engine.sent[0], [])
        check_brought(engine.sent[1], NAMES)


async def test_a_request_of_several_sequences_holds_its_pages_to_its_end(tmp_path: Path) -> None:
    """The first of them that starts is not the last that needs them."""
    event = moved(1, "")
    event = replace(event, request=replace(event.request, count=2), emitted=((), ()))
    async with source_of(tmp_path, Port(NAMES)) as (address, _), target_of(tmp_path, Port()) as parts:
        client, heard, engine, service = parts
        client.send([replace(event, source=KVSource(address))])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), NAMES)
        assert service.transfers is not None
        engine.tell(outputs(starts=[at(1, 1)]))
        await eventually(lambda: any(step.starts for step in heard.steps))
        assert set(service.transfers.held) == {at(1, 1)}
        engine.tell(outputs(ends=[(at(1, 1), EndReason.STOP)]))
        await eventually(lambda: not service.transfers.held)
        assert not service.transfers.several


async def test_requests_whose_pages_are_on_their_way_end_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRANSFER_SECONDS", 1e6)

    source, _ = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, heard, engine, _ = parts
        client.send([moved(7, address)])
        await eventually(lambda: source.reads)
        engine.die("device lost")
        await eventually(lambda: heard.ends)
        assert [end.message for end in heard.ends[7]] == ["device lost"]


async def test_the_rate_of_transfers_counts_what_came_in_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, seen = TransferRate(), list[tuple[int, float]]()
    now = [100.0]
    monkeypatch.setattr(transfer_rate.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(transfer_rate.CopyCost, "observe", lambda _, size, seconds: seen.append((size, seconds)))
    for size, seconds in ((1000, 2.0), (10, 4.0)):
        with rate.running(), rate.running():
            rate.receive(size)
            now[0] += seconds
        now[0] += 5.0
    assert seen == [(1000, 2.0), (10, 4.0)]


async def test_a_request_brings_no_more_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD", 7 * 2 * BYTES)

    check_brought(await brought_by(tmp_path, Port(NAMES)), NAMES[:7])


def test_sequences_of_a_request_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TRANSFERRED", 15 * 2 * BYTES)
    event = moved(7, "")
    event = replace(event, request=replace(event.request, count=2), emitted=((1,) * 60, (2,) * 60))
    wanted = PendingTransfers(Port(), (), list[Event]().extend).wanted(event)
    assert sum(map(len, wanted)) == 15


async def test_who_finds_a_source_slow_computes_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    port, sent = Port(), list[Event]()
    port.seconds = 0.01
    transfers = PendingTransfers(port, (), sent.extend)
    now = [100.0]
    monkeypatch.setattr(transfer_rate.time, "monotonic", lambda: now[0])
    assert transfers.wanted(moved(1, "a"))
    with transfers.rate.running():
        now[0] += 300.0
    assert not transfers.wanted(moved(1, "a"))
    now[0] += transfer_rate.FORGET_SECONDS + 1
    assert transfers.wanted(moved(1, "a"))


async def test_a_reset_of_the_prefix_cache_keeps_out_what_is_on_its_way(tmp_path: Path) -> None:
    place = tmp_path / "source"
    place.mkdir()
    liar = Liar(answer(5), then=lambda: asyncio.sleep(60))
    async with serving(liar, place) as (address, _), target_of(tmp_path, Port()) as (client, _, engine, service):
        assert service.transfers is not None
        client.send([moved(7, address)])
        await eventually(lambda: service.transfers.held)
        client.send([AdminQuery(1, AdminQuestion.RESET_PREFIX_CACHE)])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), [])
        assert [type(event) for event in engine.sent] == [Submit, AdminQuery]
        assert not service.transfers.held
