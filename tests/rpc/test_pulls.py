"""Pages of a request that another engine had are copied from there; whatever goes wrong with that only costs time."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from cache_manager.page_names import NAME_BYTES, Name, PageNamer
from rpc.link import pulls as module
from rpc.link.client import LinkClient
from rpc.link.pages import PageCopy, PageForm, joined_names
from rpc.link.pulls import AT_ONCE, Pulls
from rpc.link.server import LinkService
from scheduler.engine import EngineEnded
from scheduler.events import (
    SHORT_NAME,
    Ask,
    EndReason,
    Event,
    Finish,
    NameChanges,
    Question,
    Source,
    StepOutputs,
    Submit,
)
from scheduler.rows import sequences_of
from tests.support.frontends import outputs
from tests.support.links import (
    DEADLINE,
    Heard,
    MortalEngine,
    at,
    connected,
    eventually,
    linked,
    serving,
    submit,
)

SIZE, BYTES = 4, 24  # of a page
NAMER = PageNamer(bytes(32), b"model", SIZE)
PROMPT = np.arange(50, dtype=np.int32)  # 12 full pages


class Port:
    """`PagePort` of an engine that has the pages of these names. reads: how many it was asked for at once."""

    def __init__(self, has: Sequence[Name] = (), groups: int = 2) -> None:
        self.form = PageForm(groups, BYTES, SIZE, b"model")
        self.has, self.tokens = set(has), dict(pages())
        self.reads: list[int] = []
        self.before: Callable[[], object] = lambda: None
        self.seconds: float | None = 100.0

    def named(self, event: Submit) -> list[list[tuple[Name, bytes]]]:
        return [pages(sequence.tokens()) for sequence in sequences_of(event, 0.0, 0)]

    async def read(self, names: Sequence[Name]) -> list[PageCopy]:
        self.reads.append(len(names))
        if asyncio.iscoroutine(wait := self.before()):
            await wait
        copies = []
        for name in names:
            if name not in self.has:
                break
            copies.append(PageCopy(self.tokens[name], content_of(name)))
        return copies

    def computing(self, tokens: int) -> float | None:
        return self.seconds


def pages(tokens: np.ndarray = PROMPT) -> list[tuple[Name, bytes]]:
    chain = NAMER.chain()
    chain.extend(tokens)
    return list(zip(chain.names, chain.contents, strict=True))[: (len(tokens) - 1) // SIZE]


NAMES = [name for name, _ in pages()]


def content_of(name: Name) -> np.ndarray:
    return np.frombuffer((name * 2)[: 2 * BYTES], np.uint8).reshape(2, BYTES)


def moved(attempt: int, source: str, token: str = "", **values: object) -> Submit:
    return replace(submit(attempt, **{"prompt": PROMPT, **values}), source=Source(source, token), again=True)


@asynccontextmanager
async def target_of(directory: Path, port: Port) -> AsyncIterator[tuple[LinkClient, Heard, MortalEngine, LinkService]]:
    """An engine that pulls, and a frontend of it."""
    place = directory / "target"
    place.mkdir()
    service = LinkService()
    engine = MortalEngine(service.sink)
    service.attach(engine, port)
    async with serving(service, place) as (target, _), connected(target) as (client, heard):
        yield client, heard, engine, service


@asynccontextmanager
async def source_of(directory: Path, port: Port, token: str = "") -> AsyncIterator[tuple[str, aio.Server]]:
    """An engine that has pages; its address."""
    place = directory / "source"
    place.mkdir()
    service = LinkService(token)
    service.attach(MortalEngine(service.sink), port)
    async with serving(service, place) as (target, server):
        yield target, server


def the_submit(engine: MortalEngine) -> Submit:
    (event,) = [event for event in engine.sent if isinstance(event, Submit)]
    return event


def check_brought(event: Submit, names: Sequence[Name]) -> None:
    assert list(event.brought) == list(names)
    assert all(np.array_equal(event.brought[name], content_of(name)) for name in names)
    assert event.source is None


async def brought_by(directory: Path, source: Port, target: Port | None = None, token: str = "") -> Submit:
    """What the engine gets of a request that is moved."""
    async with source_of(directory, source, token) as (address, _), target_of(directory, target or Port()) as parts:
        client, _, engine, _ = parts
        client.send([moved(7, address, token)])
        await eventually(engine.submitted)
        assert engine.submitted() == [at(1, 7)]
        return the_submit(engine)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no source that hangs."""
    monkeypatch.setattr(module, "PULL_SECONDS", 15.0)


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
        here = b"".join(name[:SHORT_NAME] for name in NAMES[:5])
        engine.tell(replace(outputs(), names=(NameChanges(b"", here),)))
        await asyncio.sleep(0)
        client.send([moved(7, address)])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), NAMES[5:])
        assert source.reads == [7]


async def test_sequences_of_a_request_ask_for_what_they_have_in_common_once(tmp_path: Path) -> None:
    outputs_so_far = ((1,) * 30, None, (2,) * 30)
    event = replace(moved(7, ""), emitted=outputs_so_far)
    event = replace(event, request=replace(event.request, count=3))
    chains = Port().named(event)
    source = Port()
    for chain in chains:
        source.has.update(name for name, _ in chain)
        source.tokens.update(chain)
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        client.send([replace(event, source=Source(address))])
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


class Liar(pb_grpc.EngineServiceServicer):
    """A source that does what a test says."""

    def __init__(self, *answers: pb.PagesResponse, then: Callable[[], object] = lambda: None) -> None:
        self._answers, self._then = answers, then

    async def Pages(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[pb.PagesRequest], context: aio.ServicerContext
    ) -> AsyncIterator[pb.PagesResponse]:
        for answer in self._answers:
            yield answer
        if asyncio.iscoroutine(wait := self._then()):
            await wait


def answer(count: int, **wrong: object) -> pb.PagesResponse:
    """The first pages, of which the last one is wrong."""
    made = [Port().form.encode(PageCopy(tokens, content_of(name))) for name, tokens in pages()[:count]]
    for name, value in wrong.items():
        setattr(made[-1], name, value)
    return pb.PagesResponse(pages=made)


async def brought_by_liar(directory: Path, liar: Liar) -> Submit:
    place = directory / "source"
    place.mkdir()
    async with serving(liar, place) as (address, _), target_of(directory, Port()) as (client, _, engine, _):
        client.send([moved(7, address)])
        await eventually(engine.submitted)
        return the_submit(engine)


@pytest.mark.parametrize(
    ("liar", "left"),
    [
        (Liar(answer(6, checksum=1)), 5),
        (Liar(answer(6, content=bytes(2 * BYTES))), 5),
        (Liar(answer(6, content=bytes(7))), 5),
        (Liar(answer(6, tokens=b"other")), 5),
        (Liar(answer(0), answer(4)), 4),
        (Liar(pb.PagesResponse(pages=[*answer(12).pages, *answer(3).pages])), 12),
        (Liar(), 0),
    ],
)
async def test_lies_are_not_believed(tmp_path: Path, liar: Liar, left: int) -> None:
    check_brought(await brought_by_liar(tmp_path, liar), NAMES[:left])


async def test_a_source_that_hangs_costs_the_time_of_a_pull(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PULL_SECONDS", 1.5)

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
            call = pb_grpc.EngineServiceStub(channel).Pages(iter([joined_names(NAMES)]))
            with pytest.raises(grpc.RpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_names_of_a_wrong_size_are_refused_and_an_engine_without_a_prefix_cache_has_nothing(
    tmp_path: Path,
) -> None:
    async with source_of(tmp_path, Port(NAMES)) as (address, _), linked(tmp_path) as (without, _, _):
        async with aio.insecure_channel(address) as channel:
            call = pb_grpc.EngineServiceStub(channel).Pages(iter([pb.PagesRequest(names=bytes(NAME_BYTES + 1))]))
            with pytest.raises(grpc.RpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        async with aio.insecure_channel(without) as channel:
            call = pb_grpc.EngineServiceStub(channel).Pages(iter([joined_names(NAMES)]))
            assert [response async for response in call] == []


@pytest.mark.parametrize("how", ["computing is quicker", "a few pages", "no prefix cache"])
async def test_nothing_is_asked_for_where_it_does_not_pay(tmp_path: Path, how: str) -> None:
    source, target = Port(NAMES), Port()
    target.seconds = 0.0 if how == "computing is quicker" else None
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, target) as parts:
        client, _, engine, service = parts
        if how == "no prefix cache":
            service._pulls = None
        short = how == "a few pages"
        client.send([moved(7, address, **({"prompt": PROMPT[: 3 * SIZE + 2]} if short else {}))])
        await eventually(engine.submitted)
        assert not the_submit(engine).brought
        assert source.reads == []


def hanging() -> tuple[Port, asyncio.Event]:
    """A source whose reads wait for the event."""
    port, event = Port(NAMES), asyncio.Event()
    port.before = event.wait
    return port, event


@pytest.mark.parametrize("index", [None, 0])
async def test_a_finish_ends_a_pull(tmp_path: Path, index: int | None) -> None:
    source, event = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, heard, engine, service = parts
        client.send([moved(7, address), moved(8, address)])
        await eventually(lambda: len(source.reads) == 2)
        client.send([Finish(7, index)])
        await eventually(engine.finished)
        assert [(type(event), event.attempt) for event in engine.sent] == [(Submit, at(1, 7)), (Finish, at(1, 7))]
        assert not the_submit(engine).brought
        engine.tell(outputs(ends=[(at(1, 7), EndReason.FINISHED)]))
        await eventually(lambda: heard.reasons() == {7: [EndReason.FINISHED]})
        event.set()
        await eventually(lambda: len(engine.submitted()) == 2)
        check_brought(engine.sent[-1], NAMES)
        assert service._pulls is not None
        assert not service._pulls._pulls
        await eventually(lambda: not service._pulls._channels)


async def test_others_do_not_wait_behind_a_pull(tmp_path: Path) -> None:
    source, event = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        client.send([moved(7, address), submit(8)])
        await eventually(lambda: engine.submitted() == [at(1, 8)])
        event.set()
        await eventually(lambda: engine.submitted() == [at(1, 8), at(1, 7)])


async def test_a_few_pulls_run_at_once_and_all_end_in_the_time_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PULL_SECONDS", 2.0)

    source, event = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, _, engine, _ = parts
        many = 4 * AT_ONCE * int(DEADLINE)  # one after the other they would take eight times as long as is waited here
        client.send([moved(attempt, address) for attempt in range(1, many + 1)])
        await eventually(lambda: len(source.reads) == AT_ONCE)
        await eventually(lambda: len(engine.submitted()) == many)
        assert not any(event.brought for event in engine.sent if isinstance(event, Submit))
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
            assert [type(event) for event in engine.sent] == [Submit, Finish]
            assert service._pulls is not None
            assert not service._pulls._pulls
            assert not service._pulls._held


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
        assert service._pulls is not None
        await eventually(lambda: not service._pulls._held)


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
        client.send([replace(event, source=Source(address))])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), NAMES)
        assert service._pulls is not None
        engine.tell(outputs(starts=[at(1, 1)]))
        await eventually(lambda: any(step.starts for step in heard.steps))
        assert set(service._pulls._held) == {at(1, 1)}
        engine.tell(outputs(ends=[(at(1, 1), EndReason.STOP)]))
        await eventually(lambda: not service._pulls._held)
        assert not service._pulls._several


async def test_requests_whose_pages_are_on_their_way_end_with_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PULL_SECONDS", 1e6)

    source, _ = hanging()
    async with source_of(tmp_path, source) as (address, _), target_of(tmp_path, Port()) as parts:
        client, heard, engine, _ = parts
        client.send([moved(7, address)])
        await eventually(lambda: source.reads)
        engine.die("device lost")
        await eventually(lambda: heard.ends)
        assert [end.message for end in heard.ends[7]] == ["device lost"]


async def test_the_rate_of_pulls_counts_what_came_in_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pulls, seen = Pulls(Port(), (), list[Event]().extend), list[tuple[int, float]]()
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.CopyCost, "observe", lambda _, size, seconds: seen.append((size, seconds)))
    for size, seconds in ((1000, 2.0), (10, 4.0)):
        with pulls._timed(), pulls._timed():
            pulls._came += size
            now[0] += seconds
        now[0] += 5.0
    assert seen == [(1000, 2.0), (10, 4.0)]


async def test_a_request_brings_no_more_than_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_HELD", 7 * 2 * BYTES)

    check_brought(await brought_by(tmp_path, Port(NAMES)), NAMES[:7])


def test_sequences_of_a_request_share_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BROUGHT", 15 * 2 * BYTES)
    event = moved(7, "")
    event = replace(event, request=replace(event.request, count=2), emitted=((1,) * 60, (2,) * 60))
    wanted = Pulls(Port(), (), list[Event]().extend)._wanted(event)
    assert sum(map(len, wanted)) == 15


async def test_who_finds_a_source_slow_computes_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    port, sent = Port(), list[Event]()
    port.seconds = 0.01
    pulls = Pulls(port, (), sent.extend)
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    assert pulls._wanted(moved(1, "a"))
    with pulls._timed():
        now[0] += 300.0
    assert not pulls._wanted(moved(1, "a"))
    now[0] += module.FORGET_SECONDS + 1
    assert pulls._wanted(moved(1, "a"))


async def test_a_reset_of_the_prefix_cache_keeps_out_what_is_on_its_way(tmp_path: Path) -> None:
    place = tmp_path / "source"
    place.mkdir()
    liar = Liar(answer(5), then=lambda: asyncio.sleep(60))
    async with serving(liar, place) as (address, _), target_of(tmp_path, Port()) as (client, _, engine, service):
        assert service._pulls is not None
        client.send([moved(7, address)])
        await eventually(lambda: service._pulls._held)
        client.send([Ask(1, Question.RESET_PREFIX_CACHE)])
        await eventually(engine.submitted)
        check_brought(the_submit(engine), [])
        assert [type(event) for event in engine.sent] == [Submit, Ask]
        assert not service._pulls._held
