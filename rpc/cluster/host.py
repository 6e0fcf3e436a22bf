"""The server's side of its engines in a Ray cluster: one driver process for all engines, replaced when it dies."""

import asyncio
import json
import logging
import secrets
import shutil
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path

from rpc.cluster.config import ClusterConfig
from rpc.engines.process import STOP_SECONDS, EngineStartError, connect, private_directory
from rpc.engines.reaping import kill_session
from rpc.frontend.engine_client import EngineClient, Reach
from rpc.link.client import LinkClient
from rpc.settings import EngineConfig, EngineSettings
from scheduler.engine import Sink

log = logging.getLogger("quire.cluster")

MOST_LINE = 2**20  # bytes of one line of the driver
RAY_SECONDS = 60.0  # longest start of Ray, or joining of a cluster


class EngineLaunch:
    """A launch of an engine that was ordered.

    Attributes:
        address: Address of its link, once it has one.
        ended: Reason why it ended or did not start.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.address: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()


class RayCluster:
    """The driver process, which starts with the first launch and ends with the last engine.

    Args:
        settings: Cluster and times.
        processes: Count of processes of all engines together.
        model: Name of the model.
        log_format: Format of the log lines.

    Attributes:
        name: Name of the server in the cluster.
        directory: Directory of a cluster of this machine alone; None otherwise, and before the first launch.
    """

    def __init__(self, settings: EngineSettings, processes: int, model: str, log_format: str = "text") -> None:
        self._settings, self._processes, self._log_format = settings, processes, log_format
        self.name = f"quire:{model}"
        self._launches: dict[str, EngineLaunch] = {}
        self._unwanted = set[str]()  # those of them that are to end
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._broken = ""
        self._one_at_a_time = asyncio.Lock()
        self.directory: Path | None = None

    async def launch(self, name: str, config: EngineConfig, token: str) -> EngineLaunch:
        """Orders an engine.

        Args:
            name: Name of the launch, not used before.
            config: Configuration of the engine.
            token: Secret that a frontend has to prove to the engine.
        """
        async with self._one_at_a_time:
            if self._process is None:
                await self._start()
        launch = self._launches[name] = EngineLaunch()
        listen = "" if self._settings.ray_address else f"unix:{self.socket_of(name)}"
        self._write({"launch": name, "config": json.loads(config.to_json()), "listen": listen, "token": token})
        return launch

    def socket_of(self, name: str) -> Path:
        """Returns the path of the link of an engine in a cluster of this machine alone."""
        return (self.directory or Path()) / f"{name}.sock"

    async def end(self, name: str) -> None:
        """Ends an engine, and waits until its actor is gone. On a machine that cannot be reached it ends by itself.

        Raises:
            TimeoutError: It does not end, and others that are wanted share its cluster, which is of this machine alone.
        """
        launch, process = self._launches.get(name), self._process
        if launch is None:
            return
        self._unwanted.add(name)
        if not launch.ended.done():
            self._write({"end": name})
            await asyncio.wait((launch.ended,), timeout=STOP_SECONDS)
        if not launch.ended.done():
            log.warning("engine %s was not ended within %g s", name, STOP_SECONDS)
            if self._settings.ray_address is None:
                wanted = (one for other, one in self._launches.items() if other not in self._unwanted)
                if not all(one.ended.done() for one in wanted):
                    raise TimeoutError(f"engine {name} was not ended within {STOP_SECONDS:g} s")
                if process is not None and process is self._process:
                    _kill(process)  # such a Ray is replaced, with its cluster, at the next launch
        async with self._one_at_a_time:
            self._launches.pop(name, None)
            self._unwanted.discard(name)
            if not self._launches:
                await self._stop()

    async def _start(self) -> None:
        settings = self._settings
        directory = None if settings.ray_address else private_directory()
        # Ray shows the driver's command line as the job's entrypoint.
        command = (sys.executable, "-P", "-m", "rpc.cluster.driver", self.name)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=MOST_LINE
            )
        except BaseException:  # asyncio has killed the process of a cancelled start
            if directory is not None:
                directory.rmdir()
            raise
        self._process, self.directory = process, directory
        self._broken = ""
        config = ClusterConfig(
            self.name,
            None if directory is None else str(directory),
            self._processes,
            settings.start,
            settings.ray_address,
            settings.ray_token_file,
            settings.ray_cpus,
            settings.lease if settings.ray_address else None,
            settings.spread,
            self._log_format,
        )
        self._write(json.loads(config.to_json()))
        self._reader = asyncio.create_task(self._follow(process, directory))

    def _write(self, order: dict[str, object]) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # the driver has ended, and `_read` finds its end
                self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _follow(self, process: Process, directory: Path | None) -> None:
        """Reads the driver's events until it ends; then all its engines have ended."""
        try:
            await self._read(process)
        except ValueError as error:  # a broken line: the lines after it cannot be trusted
            log.error("Ray's driver cannot be understood: %s", error)
            _kill(process)
        finally:
            await self._end_of(process, directory)

    async def _read(self, process: Process) -> None:
        """Reads the driver's events, and resolves the launches' futures."""
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        async for line in process.stdout:
            event = json.loads(line)
            if "broken" in event:
                self._broken = event["broken"]
                continue
            launch = self._launches.get(event.get("started") or event.get("ended"))
            if launch is None:
                continue
            future, text = (launch.address, event["address"]) if "started" in event else (launch.ended, event["why"])
            if not future.done():
                future.set_result(text)

    async def _end_of(self, process: Process, directory: Path | None) -> None:
        """Removes all that a driver leaves, and ends its launches; launches that its successor gets are not touched."""
        code = await process.wait()
        why, launches = self._broken or f"Ray's driver has ended with code {code}", list(self._launches.values())
        self._process = None
        try:
            await asyncio.to_thread(kill_session, process.pid)  # a driver that was killed leaves its cluster
        except TimeoutError as error:
            log.error("%s", error)
        finally:
            if directory is not None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            for launch in launches:
                if not launch.ended.done():
                    launch.ended.set_result(why)

    async def _stop(self) -> None:
        """Ends the driver, and with it a cluster of this machine."""
        process, reader = self._process, self._reader
        if process is not None and process.stdin is not None and reader is not None:
            process.stdin.close()
            done, _ = await asyncio.wait((reader,), timeout=STOP_SECONDS)
            if not done:
                log.warning("Ray's driver did not end within %g s and is killed", STOP_SECONDS)
                _kill(process)
                await reader


def _kill(process: Process) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        process.kill()


class RayHost:
    """`EngineHost` of one engine in a Ray cluster.

    Args:
        number: Number of the engine.
        cluster: Driver process, shared by all engines of the server.
        config: Configuration of the engine.
        settings: Times of its start and of its link.
    """

    def __init__(self, number: int, cluster: RayCluster, config: EngineConfig, settings: EngineSettings) -> None:
        self._number, self.cluster, self.config, self._settings = number, cluster, config, settings
        self._name, self._launch_count = "", 0
        self._client: LinkClient | None = None

    async def prepare(self) -> None:
        """Does nothing, since an engine's libraries are loaded in its own process."""

    async def launch(self, sink: Sink) -> EngineClient:
        self._launch_count += 1
        name = self._name = f"{self._number}-{self._launch_count}"
        # A new token for each launch, so that an address which now belongs to another engine is not taken for this one.
        token = secrets.token_urlsafe(32)
        seconds = self._settings.start
        launch = await self.cluster.launch(name, self.config, token)
        try:
            # The driver's own wait begins once Ray is there, so it ends first, and its message says more.
            waited = (launch.address, launch.ended)
            await asyncio.wait(waited, timeout=seconds + RAY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not launch.address.done():
                raise EngineStartError(
                    launch.ended.result()
                    if launch.ended.done()
                    else f"engine {name} has no actor after {seconds + RAY_SECONDS:g} s"
                )
            reach = Reach(launch.address.result(), token)
            client = self._client = LinkClient(reach, sink, self.config.request, self._settings.silence)
            await connect(client, asyncio.shield(launch.ended), seconds)
        except BaseException:
            try:
                await self.stop()
            except TimeoutError as error:  # the next `stop` tries again
                log.warning("%s", error)
            raise
        return client

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._name:
            await self.cluster.end(self._name)
        self._name, self._client = "", None  # last, so that a call after a cancelled one ends the engine again

    async def close(self) -> None:
        """Does nothing, since the driver has ended with its last engine."""
