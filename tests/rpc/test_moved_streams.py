"""Two engines with their threads and links: a stream that is moved between them gets the tokens that it would get."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cache_manager.block_hash import BlockHash, BlockHasher
from cache_manager.layout import KVLayout
from cache_manager.manager import CacheManager
from rpc.engines.local import LocalEngine
from rpc.engines.pages import EnginePages
from rpc.frontend.engine_client import EngineInfo
from rpc.link.client import LinkClient
from rpc.link.pages import PageCopy
from rpc.link.server import LinkService
from scheduler.engine import EngineEnded
from scheduler.events import Abort, EngineStats, KVSource, Submit
from scheduler.limits import Limits
from scheduler.scheduler import Scheduler
from scheduler.settings import SchedulerSettings
from scheduler.step import StepPlan
from tests.scheduler.executor import FakeExecutor, alone
from tests.scheduler.workloads import PATIENT, SECRET, make_layout, make_request
from tests.support.links import DEADLINE, Heard, connected, eventually, serving

SIZE, PAGES, ROWS, STEP = 4, 400, 4, 0.01  # seconds
LAYOUT = make_layout(SIZE)
WINDOWS = make_layout(SIZE, windows=(None, 6))
NAMER = BlockHasher(SECRET, b"model", SIZE)
SETTINGS = SchedulerSettings(max_batched_tokens=32, max_sequences=ROWS, steps_in_flight=2)
REQUESTS = {attempt: make_request(attempt, 40 + attempt, 60) for attempt in (1, 2, 3)}


class PagedExecutor(FakeExecutor):
    """A page's bytes are what it holds for each group, and nothing else."""

    def launch(self, plan: StepPlan) -> None:
        time.sleep(STEP)
        super().launch(plan)

    def _believe(self, plan: StepPlan) -> None:
        for fill in (join.transfer for join in plan.joins):
            for page, content in () if fill is None else zip(fill.pages.tolist(), fill.content, strict=True):
                held = content[: 4 * SIZE * len(self._slots)].copy().view(np.int32)
                self._slots[:, page * SIZE : (page + 1) * SIZE] = held.reshape(-1, SIZE)
        super()._believe(plan)

    def export(self, pages: NDArray[np.int32]) -> NDArray[np.uint8]:
        content = np.zeros((len(pages), self.layout.page_bytes), np.uint8)
        for i, page in enumerate(pages.tolist()):
            held = self._slots[:, page * SIZE : (page + 1) * SIZE].copy()
            content[i, : held.nbytes] = held.reshape(-1).view(np.uint8)
        return content


@pytest.fixture(autouse=True)
def _always_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays differs from machine to machine, and so does how long it takes."""
    monkeypatch.setattr("rpc.link.kv_transfers.TRANSFER_SECONDS", DEADLINE)
    monkeypatch.setattr(EnginePages, "compute_seconds", lambda self, tokens: 100.0)


@dataclass
class Node:
    """An engine, and a frontend's end of its link."""

    address: str
    engine: LocalEngine
    pages: EnginePages
    executor: PagedExecutor
    scheduler: Scheduler
    client: LinkClient
    heard: Heard

    @property
    def stats(self) -> EngineStats:
        return self.heard.steps[-1].stats


@asynccontextmanager
async def node(directory: Path, layout: KVLayout = LAYOUT) -> AsyncIterator[Node]:
    directory.mkdir()
    service = LinkService()
    scheduler = Scheduler(SETTINGS, PATIENT, CacheManager(layout, PAGES, ROWS, ahead=SETTINGS.ahead), NAMER)
    executor = PagedExecutor(layout, PAGES, SETTINGS)
    info = EngineInfo(Limits(13, 1000, 800, ROWS), PAGES, "none", "cpu", SIZE, b"model")
    engine = LocalEngine(scheduler, executor, info, service.sink)
    pages = EnginePages(engine, scheduler, NAMER, info.numerics, executor.export)
    engine.start()
    service.attach(engine, pages)
    try:
        async with serving(service, directory) as (address, _), connected(address) as (client, heard):
            yield Node(address, engine, pages, executor, scheduler, client, heard)
    finally:
        await asyncio.to_thread(engine.stop)


async def started(source: Node, tokens: int) -> dict[int, tuple[int, ...]]:
    """Sends tokens to all requests, until each has this number; to these ones, until no more is wanted there."""
    source.client.send([Submit(attempt, request) for attempt, request in REQUESTS.items()])
    await eventually(lambda: all(len(source.heard.tokens[attempt]) >= tokens for attempt in REQUESTS))
    source.client.send([Abort(attempt) for attempt in REQUESTS])
    return {attempt: tuple(source.heard.tokens[attempt]) for attempt in REQUESTS}


async def finished(target: Node, source: Node, emitted: dict[int, tuple[int, ...]]) -> None:
    """They go on there, and get what they would get without a move."""
    target.heard.tokens.update((attempt, list(tokens)) for attempt, tokens in emitted.items())
    target.client.send(
        [
            Submit(attempt, REQUESTS[attempt], (tokens,), again=True, source=KVSource(source.address))
            for attempt, tokens in emitted.items()
        ]
    )
    await eventually(lambda: len(target.heard.ends) == len(REQUESTS))
    assert target.heard.tokens == {attempt: alone(request) for attempt, request in REQUESTS.items()}
    await eventually(lambda: target.stats.pages_used == 0)


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWS], ids=["one group", "windows"])
@pytest.mark.parametrize("tokens", [1, 7, 30])
@pytest.mark.sample(2)
async def test_a_stream_goes_on_with_its_pages(tmp_path: Path, tokens: int, layout: KVLayout) -> None:
    async with node(tmp_path / "a", layout) as source, node(tmp_path / "b", layout) as target:
        emitted = await started(source, tokens)
        await finished(target, source, emitted)
        known = {attempt: len(REQUESTS[attempt].prompt) + len(output) for attempt, output in emitted.items()}
        moved = sum((length - 1) // SIZE for length in known.values())
        in_windows = layout.pages_before(6) * len(REQUESTS) if layout is WINDOWS else 0
        assert target.stats.pages_transferred == moved + in_windows
        computed = sum(len(request.prompt) + 60 - 1 for request in REQUESTS.values())
        assert target.stats.computed_tokens == computed - SIZE * moved
        await eventually(lambda: source.stats.pages_used == 0)


async def test_a_stream_goes_there_and_back(tmp_path: Path) -> None:
    """The engine that it comes back to has the first pages still: it lacks the later ones."""

    async with node(tmp_path / "a") as first, node(tmp_path / "b") as second:
        emitted = await started(first, 10)
        second.heard.tokens.update((attempt, list(tokens)) for attempt, tokens in emitted.items())
        again = [(attempt, REQUESTS[attempt], (tokens,), True) for attempt, tokens in emitted.items()]
        second.client.send([Submit(*values, source=KVSource(first.address)) for values in again])
        await eventually(lambda: all(len(second.heard.tokens[attempt]) >= 40 for attempt in REQUESTS))
        second.client.send([Abort(attempt) for attempt in REQUESTS])
        emitted = {attempt: tuple(second.heard.tokens[attempt]) for attempt in REQUESTS}
        # Attempts have numbers of their own; those of before are over.
        first.heard.tokens.clear()
        first.heard.tokens.update((10 + attempt, list(tokens)) for attempt, tokens in emitted.items())
        first.client.send(
            [
                Submit(10 + attempt, REQUESTS[attempt], (tokens,), True, source=KVSource(second.address))
                for attempt, tokens in emitted.items()
            ]
        )
        await eventually(lambda: all(10 + attempt in first.heard.ends for attempt in REQUESTS))
        assert {attempt: first.heard.tokens[10 + attempt] for attempt in REQUESTS} == {
            attempt: alone(request) for attempt, request in REQUESTS.items()
        }
        assert 0 < first.stats.pages_transferred <= second.stats.pages_transferred


async def test_a_source_that_ends_costs_recompute(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as source, node(tmp_path / "b") as target:
        emitted = await started(source, 7)
        await asyncio.to_thread(source.engine.stop)
        await finished(target, source, emitted)
        assert target.stats.pages_transferred == 0
        with pytest.raises(EngineEnded):
            await read(source, [bytes(32)])


async def read(source: Node, names: Sequence[BlockHash], size: int = 1) -> list[PageCopy]:
    return [copy async for copies in source.pages.read(names, size) for copy in copies]


async def test_only_pages_that_are_computed_and_named_are_given(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as source:
        (wanted,) = source.pages.block_hashes(Submit(1, REQUESTS[1], (tuple(alone(REQUESTS[1])),)))
        names = [name for name, _ in wanted]
        assert await read(source, names) == []
        source.client.send([Submit(1, REQUESTS[1])])
        seen = 0
        while 1 not in source.heard.ends:
            copies = await read(source, names, 10**6)
            assert [copy.tokens for copy in copies] == [tokens for _, tokens in wanted[: len(copies)]]
            for copy in copies:  # the first one's name says whose it is, too
                assert copy.page.content[0, : 4 * SIZE].tobytes() == copy.tokens[: 4 * SIZE], "it is computed"
            assert len(copies) >= seen
            seen = len(copies)
        assert len(await read(source, names)) == len(names)
        assert len(await read(source, names[5:9])) == 4
        assert await read(source, [bytes(32), *names]) == []
        assert len(await read(source, [names[3], names[5]])) == 1, "they are no sequence"
        await asyncio.wrap_future(source.engine.call(source.scheduler.cache.published.reset))
        assert await read(source, names) == []


async def test_what_is_evicted_while_others_are_read_ends_it(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as source:
        (wanted,) = source.pages.block_hashes(Submit(1, REQUESTS[1], (tuple(alone(REQUESTS[1])),)))
        source.client.send([Submit(1, REQUESTS[1])])
        await eventually(lambda: 1 in source.heard.ends)
        copies = source.pages.read([name for name, _ in wanted], 3 * LAYOUT.page_bytes)
        assert len(await anext(copies)) == 3
        await asyncio.wrap_future(source.engine.call(source.scheduler.cache.published.reset))
        assert [part async for part in copies] == []
