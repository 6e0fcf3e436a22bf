"""Both ends of a KV transfer: an engine that takes pages in, and sources that have them, lie or hang."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
from grpc import aio
from quire.engine.v1 import engine_service_pb2 as pb
from quire.engine.v1 import engine_service_pb2_grpc as pb_grpc

from cache_manager.block_hash import BlockHash, BlockHasher
from cache_manager.transfers import TransferredPage
from rpc.link.client import LinkClient
from rpc.link.pages import PageCopy, PageForm
from rpc.link.server import LinkService
from scheduler.events import KVSource, Submit
from scheduler.rows import sequences_of
from tests.support.links import Heard, MortalEngine, at, connected, eventually, serving, submit

SIZE, BYTES = 4, 24  # of a page
NAMER = BlockHasher(bytes(32), b"model", SIZE)
PROMPT = np.arange(50, dtype=np.int32)  # 12 full pages


class Port:
    """`PagePort` of an engine that has the pages of these names. reads: how many it has looked for at once.

    state: whether the second of its two tables is of a recurrent state, and not of a second group.
    """

    def __init__(self, has: Sequence[BlockHash] = (), state: bool = False) -> None:
        self.form = PageForm((None, 1 if state else None), BYTES, SIZE, b"model")
        self.has, self.tokens = set(has), dict(pages())
        self.reads: list[int] = []
        self.before: Callable[[], object] = lambda: None
        self.seconds: float | None = 100.0

    def block_hashes(self, event: Submit) -> list[list[tuple[BlockHash, bytes]]]:
        return [pages(sequence.tokens()) for sequence in sequences_of(event, 0.0, 0)]

    async def read(self, names: Sequence[BlockHash], size: int) -> AsyncIterator[list[PageCopy]]:
        most = self.form.most(size)
        for start in range(0, len(names), most):
            asked = names[start : start + most]
            self.reads.append(len(asked))
            if asyncio.iscoroutine(wait := self.before()):
                await wait
            here = list(takewhile(self.has.__contains__, asked))
            if here:
                yield [PageCopy(self.tokens[name], page_of(name)) for name in here]
            if len(here) < len(asked):
                return

    def compute_seconds(self, tokens: int) -> float | None:
        return self.seconds


def pages(tokens: np.ndarray = PROMPT) -> list[tuple[BlockHash, bytes]]:
    chain = NAMER.chain()
    chain.extend(tokens)
    return list(zip(chain.hashes, chain.contents, strict=True))[: (len(tokens) - 1) // SIZE]


NAMES = [name for name, _ in pages()]


def page_of(name: BlockHash) -> TransferredPage:
    return TransferredPage(np.ones(2, np.bool_), np.frombuffer((name * 2)[: 2 * BYTES], np.uint8).reshape(2, BYTES))


def moved(attempt: int, source: str, token: str = "", **values: object) -> Submit:
    return replace(submit(attempt, **{"prompt": PROMPT, **values}), source=KVSource(source, token), again=True)


@asynccontextmanager
async def target_of(directory: Path, port: Port) -> AsyncIterator[tuple[LinkClient, Heard, MortalEngine, LinkService]]:
    """An engine that transfers, and a frontend of it."""
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


def check_brought(event: Submit, names: Sequence[BlockHash]) -> None:
    assert list(event.transferred) == list(names)
    assert all(np.array_equal(event.transferred[name].content, page_of(name).content) for name in names)
    assert all(event.transferred[name].tables.all() for name in names)
    assert event.source is None


async def brought_by(directory: Path, source: Port, target: Port | None = None, token: str = "") -> Submit:
    """Moves a request, and returns the Submit that its engine gets."""
    async with source_of(directory, source, token) as (address, _), target_of(directory, target or Port()) as parts:
        client, _, engine, _ = parts
        client.send([moved(7, address, token)])
        await eventually(engine.submitted)
        assert engine.submitted() == [at(1, 7)]
        return the_submit(engine)


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
    made = [Port().form.encode(PageCopy(tokens, page_of(name))) for name, tokens in pages()[:count]]
    for name, value in wrong.items():
        setattr(made[-1], name, value)
    return pb.PagesResponse(pages=made)


async def brought_by_liar(directory: Path, liar: Liar, target: Port | None = None) -> Submit:
    place = directory / "source"
    place.mkdir()
    async with serving(liar, place) as (address, _), target_of(directory, target or Port()) as parts:
        client, _, engine, _ = parts
        client.send([moved(7, address)])
        await eventually(engine.submitted)
        return the_submit(engine)


def hanging() -> tuple[Port, asyncio.Event]:
    """A source whose reads wait for the event."""
    port, event = Port(NAMES), asyncio.Event()
    port.before = event.wait
    return port, event
