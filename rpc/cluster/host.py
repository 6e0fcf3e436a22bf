"""A server's engines in a Ray cluster, as it sees them: one driver process for all, which starts anew when it dies."""

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

MOST_LINE = 2**20  # bytes of what the driver tells in one
RAY_SECONDS = 60.0  # that it may take to start Ray, or to join a cluster


class Order:
    """An engine that was asked for. address: of its link, once it has one. ended: why it ended or did not start."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.address: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()


class RayCluster:
    """The driver process; starts with the first order. processes: of all engines together. model: its name."""

    def __init__(self, settings: EngineSettings, processes: int, model: str, log_format: str = "text") -> None:
        self._settings, self._processes, self._log_format = settings, processes, log_format
        self._name = f"quire:{model}"
        self._orders: dict[str, Order] = {}
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._broken = ""
        self._one_at_a_time = asyncio.Lock()
        self.directory: Path | None = None

    async def launch(self, name: str, config: EngineConfig, token: str) -> Order:
        """name: not used before."""
        async with self._one_at_a_time:
            if self._process is None:
                await self._start()
        order = self._orders[name] = Order()
        listen = "" if self._settings.ray_address else f"unix:{self.socket_of(name)}"
        self._write({"launch": name, "config": json.loads(config.to_json()), "listen": listen, "token": token})
        return order

    def socket_of(self, name: str) -> Path:
        """Of an engine in a cluster of this machine alone."""
        return (self.directory or Path()) / f"{name}.sock"

    async def end(self, name: str) -> None:
        """The engine's actor is killed, and gone; on a machine that cannot be reached it ends by itself."""
        order = self._orders.get(name)
        if order is None:
            return
        if not order.ended.done():
            self._write({"end": name})
            await asyncio.wait((order.ended,), timeout=STOP_SECONDS)
        if not order.ended.done():
            log.warning("engine %s was not ended within %g s", name, STOP_SECONDS)
            if self._settings.ray_address is None and self._process is not None:
                self._process.kill()  # whatever ails Ray here, a new cluster has not
        async with self._one_at_a_time:
            self._orders.pop(name, None)
            if not self._orders:
                await self._stop()

    async def _start(self) -> None:
        settings = self._settings
        directory = None if settings.ray_address else private_directory()
        # Ray shows the driver's command line as the job's entrypoint.
        command = (sys.executable, "-P", "-m", "rpc.cluster.driver", self._name)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, start_new_session=True, limit=MOST_LINE
            )
        except BaseException:  # who cancels it finds no process; asyncio has killed what there was of one
            if directory is not None:
                directory.rmdir()
            raise
        self._process, self.directory = process, directory
        self._broken = ""
        config = ClusterConfig(
            self._name,
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
            with suppress(OSError):  # `_read` finds that it has ended
                self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def _follow(self, process: Process, directory: Path | None) -> None:
        """Until the driver ends; then all engines have ended."""
        try:
            await self._read(process)
        except ValueError as error:  # a line that is none: nothing more can be understood
            log.error("Ray's driver cannot be understood: %s", error)
            process.kill()
        finally:
            await self._end_of(process, directory)

    async def _read(self, process: Process) -> None:
        """What the driver tells."""
        assert process.stdout is not None  # noqa: S101 - a pipe was asked for
        async for line in process.stdout:
            event = json.loads(line)
            if "broken" in event:
                self._broken = event["broken"]
                continue
            order = self._orders.get(event.get("started") or event.get("ended"))
            if order is None:
                continue
            future, text = (order.address, event["address"]) if "started" in event else (order.ended, event["why"])
            if not future.done():
                future.set_result(text)

    async def _end_of(self, process: Process, directory: Path | None) -> None:
        """Nothing of it stays, and all that it had been asked for has ended; its successor's orders are others."""
        code = await process.wait()
        why, orders = self._broken or f"Ray's driver has ended with code {code}", list(self._orders.values())
        self._process = None
        try:
            await asyncio.to_thread(kill_session, process.pid)  # it may have been killed, and its cluster not
        except TimeoutError as error:
            log.error("%s", error)
        finally:
            if directory is not None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            for order in orders:
                if not order.ended.done():
                    order.ended.set_result(why)

    async def _stop(self) -> None:
        """With the last engine goes the driver, and a cluster that was started for it."""
        process, reader = self._process, self._reader
        if process is not None and process.stdin is not None and reader is not None:
            process.stdin.close()
            done, _ = await asyncio.wait((reader,), timeout=STOP_SECONDS)
            if not done:
                log.warning("Ray's driver did not end within %g s and is killed", STOP_SECONDS)
                process.kill()
                await reader


class RayHost:
    """`EngineHost` of the engine of one number."""

    def __init__(self, number: int, cluster: RayCluster, config: EngineConfig, settings: EngineSettings) -> None:
        self._number, self._cluster, self._config, self._settings = number, cluster, config, settings
        self._name, self._launches = "", 0
        self._client: LinkClient | None = None

    async def prepare(self) -> None:
        """An engine's libraries are loaded in its own process."""

    async def launch(self, sink: Sink) -> EngineClient:
        self._launches += 1
        name = self._name = f"{self._number}-{self._launches}"
        # Of this launch alone: an address that has come to mean another engine is none.
        token = secrets.token_urlsafe(32)
        seconds = self._settings.start
        order = await self._cluster.launch(name, self._config, token)
        try:
            # The driver's own wait begins once Ray is there, and says more when it ends.
            waited = (order.address, order.ended)
            await asyncio.wait(waited, timeout=seconds + RAY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not order.address.done():
                raise EngineStartError(
                    order.ended.result()
                    if order.ended.done()
                    else f"engine {name} has no actor after {seconds + RAY_SECONDS:g} s"
                )
            reach = Reach(order.address.result(), token)
            client = self._client = LinkClient(reach, sink, self._config.request, self._settings.silence)
            await connect(client, asyncio.shield(order.ended), seconds)
        except BaseException:
            await self.stop()
            raise
        return client

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._name:
            await self._cluster.end(self._name)
        self._name, self._client = "", None  # now: who is cancelled before is asked again

    async def close(self) -> None:
        """The driver has ended with its last engine."""
