"""An engine in a process of its own, behind the engine link.

The process is `python -m rpc.engines.engine_process ADDRESS`, or a fork that runs the same, in a session of its own. It
reads an EngineConfig as one line of JSON, and a line with the token that frontends have to show, from its standard
input, whose end tells it to stop; serves the link at the address; and, where it cannot start or has failed, says why in
a line on its standard output. Its standard error is the server's.
"""

import asyncio
import logging
import secrets
import shutil
import sys
import tempfile
from collections.abc import Awaitable
from pathlib import Path

from rpc.engines.launchers import EngineProcess, Launcher
from rpc.engines.reaping import kill_session
from rpc.frontend.engine_client import EngineClient, Reach
from rpc.link.client import LinkClient
from rpc.settings import EngineConfig, EngineSettings
from scheduler.engine import Sink

log = logging.getLogger("quire.engines")

STOP_SECONDS = 10.0


class EngineStartError(RuntimeError):
    """An engine's process did not become ready; says why."""


class ProcessHost:
    """`EngineHost` of engines in processes that `launcher`, which other hosts may share, starts."""

    def __init__(self, launcher: Launcher, config: EngineConfig, settings: EngineSettings) -> None:
        self._launcher, self._config, self._settings = launcher, config, settings
        self._process: EngineProcess | None = None
        self._client: LinkClient | None = None
        self._directory: Path | None = None

    async def prepare(self) -> None:
        """An engine's libraries are loaded in its own process."""

    async def launch(self, sink: Sink) -> EngineClient:
        reach = Reach(self._new_address(), secrets.token_urlsafe(32))
        process = self._process = await self._launcher.start(reach.address)
        assert process.stdin is not None  # noqa: S101 - a pipe was asked for
        process.stdin.write(f"{self._config.to_json()}\n{reach.token}\n".encode())
        place = f"process {process.pid}"
        client = self._client = LinkClient(reach, sink, self._config.request, self._settings.silence, place)
        try:
            await connect(client, _last_words(process), self._settings.start)
        except BaseException:
            await self._end(0.0)  # there is nothing to wait for
            raise
        return client

    def _new_address(self) -> str:
        """Linux has names of sockets that are no files: nothing of one stays, whoever is killed."""
        if sys.platform == "linux":
            return f"unix-abstract:quire-{secrets.token_hex(8)}"
        self._directory = private_directory()
        return f"unix:{self._directory}/engine.sock"

    async def stop(self) -> None:
        await self._end(STOP_SECONDS)

    async def close(self) -> None:
        await self._launcher.close()

    async def _end(self, grace: float) -> None:
        """grace: seconds for a living process to end by itself."""
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
    """Until the engine takes requests. ended: why its process has ended. Raises EngineStartError where it ends, hangs
    up or takes too long.
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


async def _last_words(process: EngineProcess) -> str:
    """Why the process, once it has ended, did not serve."""
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    words = (await process.stdout.read()).decode(errors="replace").strip()
    code = await process.wait()
    return words or f"the engine's process ended with code {code} before it was ready"


def private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for sockets in it."""
    place = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="quire-", dir=place if len(place) <= 20 else "/tmp"))  # noqa: S108 - mkdtemp
