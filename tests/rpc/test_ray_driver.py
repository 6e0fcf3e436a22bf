"""A server's talk with Ray's driver; a script stands in for the driver."""

import asyncio
import json
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rpc.cluster.host import RayCluster, RayHost
from rpc.settings import EngineConfig, EngineSettings
from tests.support.links import eventually
from tests.support.processes import temporary_directory

HERE = EngineSettings(ray=True)

# An engine's link is "at" something, one of number 7 does not end, and an event of an unknown one comes first.
DRIVER = """#!{python}
import json, sys
def tell(**event): print(json.dumps(event), flush=True)
config = json.loads(sys.stdin.readline())
with open({log!r}, "a") as log: print(json.dumps([sys.argv[1:], config]), file=log)
for line in sys.stdin:
    order = json.loads(line)
    if "end" in order and order["end"].startswith("7-"):
        pass
    elif "end" in order:
        tell(ended=order["end"], why="asked for")
    elif order["token"] == "broken":
        tell(broken="there is no memory")
        sys.exit(1)
    elif order["token"] == "garbage":
        print("what?", flush=True)
    else:
        tell(started="9-9", address="nowhere")
        tell(started=order["launch"], address="at " + order["listen"])
"""


class Rig:
    """A cluster, and what its drivers were told: arguments and configuration."""

    def __init__(self, place: Path, settings: EngineSettings) -> None:
        self.cluster, self._log = RayCluster(settings, 2, "m", "json"), place / "log"

    async def launch(self, name: str, token: str = "fine") -> Any:  # noqa: S107 - what the script does
        return await self.cluster.launch(name, EngineConfig(), token)

    def told(self) -> list[tuple[list[str], dict[str, Any]]]:
        return [tuple(json.loads(line)) for line in self._log.read_text().splitlines()]


@asynccontextmanager
async def started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: EngineSettings = HERE
) -> AsyncIterator[Rig]:
    driver = tmp_path / "driver"
    driver.write_text(DRIVER.format(python=sys.executable, log=str(tmp_path / "log")))
    driver.chmod(0o700)
    with temporary_directory() as place:
        monkeypatch.setattr("rpc.cluster.host.sys.executable", str(driver))
        rig = Rig(tmp_path, settings)
        yield rig
        assert list(place.iterdir()) == [], "of a driver that has ended"


async def test_a_cluster_of_this_machine_is_private_and_ends_with_its_last_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path, monkeypatch) as rig:
        first, second = await rig.launch("0-1"), await rig.launch("1-1")
        directory = rig.cluster.directory
        assert directory is not None
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert await first.address == f"at unix:{directory}/0-1.sock"
        ((arguments, config),) = rig.told()
        assert arguments == ["-P", "-m", "rpc.cluster.driver", "quire:m"]
        assert (config["name"], config["directory"], config["processes"]) == ("quire:m", str(directory), 2)
        assert (config["address"], config["lease"], config["log_format"]) == (None, None, "json")
        await rig.cluster.end("0-1")
        assert await first.ended == "asked for"
        assert await second.address == f"at unix:{directory}/1-1.sock"
        assert directory.exists(), "another engine is there"
        await rig.cluster.end("1-1")
        assert not directory.exists()


async def test_an_engine_that_does_not_end_takes_no_other_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 0.2)
    async with started(tmp_path, monkeypatch) as rig:
        stuck, other, last = [await rig.launch(name) for name in ("7-1", "1-1", "7-2")]
        await last.address
        with pytest.raises(TimeoutError, match="engine 7-1 was not ended within"):
            await rig.cluster.end("7-1")
        assert not stuck.ended.done()
        assert not other.ended.done(), "the driver goes on"
        monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 30)
        await rig.cluster.end("1-1")
        assert await other.ended == "asked for"
        monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 0.2)
        await rig.cluster.end("7-2")
        monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 30)
        await rig.cluster.end("7-1")  # again, as a supervisor does
        again = await rig.launch("2-2")
        await again.address
        assert len(rig.told()) == 2, "a new driver, as the old one had no other engine"
        await rig.cluster.end("2-2")


async def test_a_launch_that_is_cancelled_is_so_where_its_engine_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connecting = asyncio.Event()

    async def never(*_: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("rpc.cluster.host.connect", never)
    monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 0.2)
    async with started(tmp_path, monkeypatch) as rig:
        await rig.launch("1-1")
        host = RayHost(7, rig.cluster, EngineConfig(), HERE)
        launch = asyncio.create_task(host.launch(lambda _: None))
        await connecting.wait()
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch
        with pytest.raises(TimeoutError, match="engine 7-1 was not ended within"):
            await host.stop()
        monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 30)
        await rig.cluster.end("1-1")
        monkeypatch.setattr("rpc.cluster.host.STOP_SECONDS", 0.2)
        await host.stop()


async def test_one_that_is_there_is_told_how_long_engines_stay_without_a_frontend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EngineSettings(ray_address="10.0.0.4:6379", ray_cpus=3.0, spread=True, lease=7.0)
    async with started(tmp_path, monkeypatch, settings) as rig:
        order = await rig.launch("0-1")
        assert await order.address == "at ", "a port that the engine chooses"
        ((_, config),) = rig.told()
        assert (config["directory"], config["address"]) == (None, "10.0.0.4:6379")
        assert (config["lease"], config["cpus"], config["spread"]) == (7.0, 3.0, True)
        await rig.cluster.end("0-1")


@pytest.mark.parametrize(("token", "why"), [("broken", "there is no memory"), ("garbage", "Ray's driver has ended")])
async def test_a_driver_that_ends_says_why_and_the_next_engine_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str, why: str
) -> None:
    async with started(tmp_path, monkeypatch) as rig:
        running, failing = await rig.launch("0-1"), await rig.launch("1-1", token)
        assert (await failing.ended).startswith(why)
        assert (await running.ended).startswith(why), "its driver is gone"
        for name in ("0-1", "1-1"):
            await rig.cluster.end(name)
        again = await rig.launch("0-2")
        await eventually(lambda: len(rig.told()) == 2)
        assert (await again.address).endswith("0-2.sock")
        await rig.cluster.end("0-2")
