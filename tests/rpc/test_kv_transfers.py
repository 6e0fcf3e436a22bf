"""Pages of a request that another engine had are copied from there; whatever goes wrong with that only costs time."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from cache_manager.block_hash import HASH_BYTES
from cache_manager.layout import KVLayout
from cache_manager.prefix import NONE
from cache_manager.transfers import pages_to_transfer
from rpc.link import kv_transfers as module
from rpc.link.pages import PageForm, joined_hashes
from scheduler.engine import EngineEnded
from scheduler.events import SHORT_HASH, KVEvents, KVSource
from tests.rpc.page_sources import (
    BYTES,
    NAMES,
    PROMPT,
    SIZE,
    Liar,
    Port,
    answer,
    brought_by,
    brought_by_liar,
    check_brought,
    moved,
    source_of,
    target_of,
    the_submit,
)
from tests.scheduler.workloads import make_layout
from tests.support.frontends import outputs
from tests.support.links import eventually, linked

pytestmark = pytest.mark.usefixtures("patient_transfers")


@pytest.mark.parametrize("token", ["", "secret"])
async def test_a_request_comes_with_the_pages_that_its_source_has(tmp_path: Path, token: str) -> None:
    check_brought(await brought_by(tmp_path, Port(NAMES), token=token), NAMES)


async def test_pages_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.server.READ_BYTES", 5 * 2 * BYTES + 1)

    source = Port(NAMES)
    check_brought(await brought_by(tmp_path, source), NAMES)
    assert source.reads == [5, 5, 2]


async def test_what_the_source_has_not_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.link.server.READ_BYTES", 4 * 2 * BYTES)

    source = Port([*NAMES[:6], *NAMES[7:]])
    check_brought(await brought_by(tmp_path, source), NAMES[:6])
    assert source.reads == [4, 4]


async def test_what_the_engine_has_is_not_asked_for(tmp_path: Path) -> None:
    source = Port(NAMES)
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        here = b"".join(name[:SHORT_HASH] for name in NAMES[:5])
        engine.tell(replace(outputs(), kv_events=(KVEvents(b"", here),)))
        await asyncio.sleep(0)
        client.send([moved(7, address)])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), NAMES[5:])
        assert source.reads == [7]


async def test_sequences_of_a_request_ask_for_what_they_have_in_common_once(tmp_path: Path) -> None:
    outputs_so_far = ((1,) * 30, None, (2,) * 30)
    event = replace(moved(7, ""), emitted=outputs_so_far)
    event = replace(event, request=replace(event.request, count=3))
    chains = Port().block_hashes(event)
    source = Port()
    for chain in chains:
        source.has.update(name for name, _ in chain)
        source.tokens.update(chain)
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        client.send([replace(event, source=KVSource(address))])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), list(dict.fromkeys(name for chain in chains for name, _ in chain)))
        assert source.reads == [19, 7]


def wrong_tokens(port: Port) -> None:
    port.tokens[NAMES[3]] = port.tokens[NAMES[4]]


def another_model(port: Port) -> None:
    port.form = replace(port.form, numerics=b"other")


@pytest.mark.parametrize(("spoil", "left"), [(wrong_tokens, 3), (another_model, 0)])
async def test_what_is_not_what_was_asked_for_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Port], None], left: int
) -> None:
    source = Port(NAMES)
    spoil(source)
    check_brought(await brought_by(tmp_path, source), NAMES[:left])


@pytest.mark.parametrize(
    ("liar", "left"),
    [
        (Liar(answer(6, checksum=1)), 5),
        (Liar(answer(6, content=bytes(2 * BYTES))), 5),
        (Liar(answer(6, content=bytes(7))), 5),
        (Liar(answer(6, tokens=b"other")), 5),
        (Liar(answer(6, tables=bytes([1]))), 5),
        (Liar(answer(6, tables=bytes([1, 0]), content=bytes(BYTES))), 5),
        (Liar(answer(0), answer(4)), 4),
        (Liar(pb.PagesResponse(pages=[*answer(12).pages, *answer(3).pages])), 12),
        (Liar(), 0),
    ],
)
async def test_lies_are_not_believed(tmp_path: Path, liar: Liar, left: int) -> None:
    check_brought(await brought_by_liar(tmp_path, liar), NAMES[:left])


async def test_more_than_there_is_room_for_is_not_taken(tmp_path: Path) -> None:
    """A sequence needs one state: 13 pages are the most that 12 with one state have, and 7 with a state each are 14."""
    check_brought(await brought_by_liar(tmp_path, Liar(answer(12)), Port(state=True)), NAMES[:6])


async def test_a_source_that_hangs_costs_the_time_of_a_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRANSFER_SECONDS", 1.5)

    check_brought(await brought_by_liar(tmp_path, Liar(answer(5), then=lambda: asyncio.sleep(60))), NAMES[:5])


async def test_a_source_that_dies_midway_costs_what_it_had_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.link.server.READ_BYTES", 4 * 2 * BYTES)

    source = Port(NAMES)

    def end() -> None:
        if len(source.reads) == 3:
            raise EngineEnded("device lost")

    source.before = end
    check_brought(await brought_by(tmp_path, source), NAMES[:8])


async def test_a_source_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    async with target_of(tmp_path, Port()) as (client, _, engine, _):
        client.send([moved(7, f"unix:{tmp_path}/nobody")])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), [])


async def test_a_wrong_token_gets_nothing(tmp_path: Path) -> None:
    async with source_of(tmp_path, Port(NAMES), "secret") as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        client.send([moved(7, address, "guess")])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), [])
        async with aio.insecure_channel(address) as channel:
            # It sends nothing: where a message meets the refusal, grpc may report INTERNAL in its place (grpc#36066).
            call = pb_grpc.EngineServiceStub(channel).Pages()
            with pytest.raises(grpc.RpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_names_of_a_wrong_size_are_refused_and_an_engine_without_a_prefix_cache_has_nothing(
    tmp_path: Path,
) -> None:
    async with source_of(tmp_path, Port(NAMES)) as (address, _), linked(tmp_path) as (without, _, _):
        async with aio.insecure_channel(address) as channel:
            call = pb_grpc.EngineServiceStub(channel).Pages(iter([pb.PagesRequest(hashes=bytes(HASH_BYTES + 1))]))
            with pytest.raises(grpc.RpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with aio.insecure_channel(without) as channel:
            call = pb_grpc.EngineServiceStub(channel).Pages(iter([joined_hashes(NAMES)]))
            assert [response async for response in call] == []


@pytest.mark.parametrize("how", ["computing is quicker", "a few pages", "no prefix cache"])
async def test_nothing_is_asked_for_where_it_does_not_pay(tmp_path: Path, how: str) -> None:
    source, target = Port(NAMES), Port()
    target.seconds = 0.0 if how == "computing is quicker" else None
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, target) as parts:
        client, _, engine, service = parts
        if how == "no prefix cache":
            service.transfers = None
        short = how == "a few pages"
        client.send([moved(7, address, **({"prompt": PROMPT[: 3 * SIZE + 2]} if short else {}))])
        await eventually(engine.submitted)
        assert not the_submit(engine).transferred
        assert source.reads == []


@pytest.mark.parametrize("layout", [make_layout(4), make_layout(4, windows=(None, 9)), make_layout(4, windows=(9, 30))])
def test_the_size_of_copies_is_known_before_they_come(layout: KVLayout) -> None:
    form, pages = PageForm.of(layout, b""), np.arange(layout.tables * 50, dtype=np.int32).reshape(-1, 50)
    for count in (0, 1, 2, 7, 8, 9, 50):
        sent = np.count_nonzero(pages_to_transfer(pages[:, :count], layout) != NONE) * layout.page_bytes
        assert form.size(count) == sent
        assert form.size(form.most(sent)) == sent
        assert form.size(form.most(sent) + 1) > sent or form.most(sent) > 10**6
