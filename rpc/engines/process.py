"""An engine in a process of its own, behind the engine link.

The process is `python -m rpc.engines.engine_process ADDRESS`, or a fork that runs the same, in a session of its own.
From its standard input it reads an EngineConfig as one line of JSON, and a line with the token that frontends have to
prove. The end of that input stops it. It serves the link at the address. If it cannot start or fails, it writes the
reason as one line on its standard output. Its standard error is the server's.
"""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from rpc.engines.launchers import EngineProcess, Launcher
from rpc.engines.reaping import kill_session
from rpc.frontend.engine_client import EngineClient, Reach
from rpc.link.client import LinkClient
from rpc.settings import EngineConfig, EngineSettings
from scheduler.engine import Sink

log = logging.getLogger("quire.engines")

STOP_SECONDS = 10.0


class EngineStartError(RuntimeError):
    """An engine's process did not become ready; the message has the cause."""


class ProcessHost:
    """`EngineHost` of engines in processes of their own.

    Args:
        launcher: Starts the processes; other hosts may share it.
        config: Configuration of the engine.
        settings: Times of its start and of its link.
        environment: Variables of their environment beside those of this process.
    """

    def __init__(
        self, launcher: Launcher, config: EngineConfig, settings: EngineSettings,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.launcher, self.config, self.settings, self.environment = launcher, config, settings, environment
        self._process: EngineProcess | None = None
        self._client: LinkClient | None = None
        self._directory: Path | None = None

    async def prepare(self) -> None:
        """Does nothing, since an engine's libraries are loaded in its own process."""

    async def launch(self, sink: Sink) -> EngineClient:
        reach = Reach(self._new_address(), secrets.token_urlsafe(32))
        process = self._process = await self.launcher.start(reach.address, self.environment)
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        process.stdin.write(f"{self.config.to_json()}\n{reach.token}\n".encode())
        place = f"process {process.pid}"
        client = self._client = LinkClient(reach, sink, self.config.request, self.settings.silence, place)
        try:
            await connect(client, _exit_reason(process), self.settings.start)
        except BaseException:
            await self._end(0.0)  # an engine that never served has nothing to finish
            raise
        return client

    def _new_address(self) -> str:
        """Returns an address for the engine's link.

        On Linux it is an abstract socket, which is no file: a killed process leaves nothing of it.
        """
        if sys.platform == "linux":
            return f"unix-abstract:quire-{secrets.token_hex(8)}"
        self._directory = private_directory()
        return f"unix:{self._directory}/engine.sock"

    def kill(self) -> None:
        """Kills the engine's process with SIGKILL, and leaves it to others to notice. Does nothing without one."""
        if self._process is not None:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(self._process.pid, signal.SIGKILL)

    async def stop(self) -> None:
        await self._end(STOP_SECONDS)

    async def close(self) -> None:
        await self.launcher.close()

    async def _end(self, grace: float) -> None:
        """Ends the process, and removes all that it leaves.

        Args:
            grace: Seconds for a live process to end by itself.
        """
        process, client, directory = self._process, self._client, self._directory
        if process is not None and process.stdin is not None:
            process.stdin.write_eof()
            try:
                async with asyncio.timeout(grace):
                    if client is not None and client.failure is None:
                        await process.wait()
            except TimeoutError:
                if grace:
                    log.warning("the engine's process did not end within %g s and is killed", grace)
            await asyncio.to_thread(kill_session, process.pid)
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
            process.stdin.close()
        if client is not None:
            await client.close()
        if directory is not None:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        self._process = self._client = self._directory = None


async def connect(client: LinkClient, ended: Awaitable[str], seconds: float) -> None:
    """Connects a client to an engine that starts; returns once the engine takes requests.

    Args:
        client: Client of the engine's link.
        ended: Waits for the end of the engine's process, and returns its cause.
        seconds: Time that the start may take.

    Raises:
        EngineStartError: The process ended, hung up or took too long.
    """
    connected, end = asyncio.create_task(client.connect()), asyncio.ensure_future(ended)
    try:
        await asyncio.wait((connected, end), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if connected.done() and connected.exception() is None:
            return
        if not connected.done() and not end.done():
            raise EngineStartError(f"the engine's process was not ready within --engine-start-timeout {seconds:g} s")
        await asyncio.wait((end,), timeout=STOP_SECONDS)
        raise EngineStartError(end.result() if end.done() else "the engine's process hung up and did not end")
    finally:
        for task in (connected, end):
            task.cancel()
        await asyncio.gather(connected, end, return_exceptions=True)


async def _exit_reason(process: EngineProcess) -> str:
    """Waits for the process to end, and returns why it did not serve."""
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    words = (await process.stdout.read()).decode(errors="replace").strip()
    code = await process.wait()
    return words or f"the engine's process ended with code {code} before it was ready"


def private_directory() -> Path:
    """Returns a new directory that only this user can enter, with a path short enough for sockets in it."""
    place = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir=place if len(place) <= 20 else "/tmp"))  # noqa: S108 - mkdtemp
