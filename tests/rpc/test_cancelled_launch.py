"""A launch that is cancelled, whenever it is, leaves neither a process nor a file, though no call stops it."""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from rpc.cluster.host import RayCluster
from rpc.engines.launchers import Forker, Launcher, Spawner
from rpc.engines.process import ProcessHost
from rpc.settings import EngineConfig, EngineSettings
from tests.support.processes import temporary_directory, tree

TURNS = (0, 1, 2, 3, 4, 5, 8, 12)  # of the loop until it is cancelled


async def cancelled(turns: int, what: asyncio.Task) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
    what.cancel()
    with suppress(asyncio.CancelledError):
        await what


@pytest.mark.parametrize("launcher", [Spawner, Forker])
@pytest.mark.parametrize("turns", TURNS)
def test_of_a_process(turns: int, launcher: Callable[[], Launcher]) -> None:
    async def check() -> None:
        host = ProcessHost(launcher(), EngineConfig(), EngineSettings())
        await cancelled(turns, asyncio.create_task(host.launch(lambda _: None)))
        await host.close()
        assert tree(os.getpid()) == []

    with temporary_directory():
        asyncio.run(check())


def test_of_a_process_that_is_forked_but_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        connecting, forker = asyncio.Event(), Forker()

        async def never(**_: object) -> None:
            connecting.set()
            await asyncio.Event().wait()

        def children() -> set[int]:
            return {child.pid for child in psutil.Process().children()}  # those that have ended too

        before = children()
        monkeypatch.setattr("rpc.engines.launchers.asyncio.open_connection", never)
        starting = asyncio.create_task(forker.start("unix:nowhere", {}))
        await connecting.wait()
        await cancelled(0, starting)
        await forker.close()
        assert children() <= before

    with temporary_directory():
        asyncio.run(check())


@pytest.mark.parametrize("turns", TURNS)
def test_of_rays_driver(turns: int) -> None:
    async def check() -> None:
        cluster = RayCluster(EngineSettings(ray=True), 1, "m")
        await cancelled(turns, asyncio.create_task(cluster.launch("0-1", EngineConfig(), "t")))
        await cluster.end("0-1")  # as its host does where it had been launched
        assert tree(os.getpid()) == []

    with temporary_directory() as place:
        asyncio.run(check())
        assert list(place.iterdir()) == []


def test_of_a_driver_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        with pytest.raises(OSError, match="nosuch"):
            await RayCluster(EngineSettings(ray=True), 1, "m").launch("0-1", EngineConfig(), "t")

    monkeypatch.setattr("rpc.cluster.host.sys.executable", "/nosuch")
    with temporary_directory() as place:
        asyncio.run(check())
        assert list(place.iterdir()) == []
