"""Keeps an engine behind a frontend: starts one, replaces it when it dies, ends it."""

import asyncio
import logging
from collections.abc import Awaitable

from model.errors import CheckpointError
from rpc.engines.host import EngineHost
from rpc.engines.process import EngineStartError
from rpc.frontend.frontend import Frontend

log = logging.getLogger("quire.engines")

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between two attempts to start an engine
STEADY = 60.0  # seconds after which an engine's death counts as the first again


class Supervisor:
    """`start` once, then `keep` runs as a task until `stop`."""

    def __init__(self, host: EngineHost, frontend: Frontend) -> None:
        self._host, self._frontend = host, frontend
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """The first engine. Raises what the host's `launch` does."""
        await self._launch()
        self._keeper = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ends the engine. Raises TimeoutError."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._host.stop()

    async def _keep(self) -> None:
        clock = asyncio.get_running_loop().time
        delay, since = 0.0, clock()
        while True:
            log.error("the engine has failed: %s. Starting a new one", await self._frontend.engine_lost())
            if clock() - since > STEADY:
                delay = 0.0
            self._frontend.detach()
            delay = await self._replace(delay)
            since = clock()
            log.info("a new engine is ready")

    async def _replace(self, delay: float) -> float:
        """Until an engine runs, waiting longer each time. Returns how long to wait if it dies soon."""
        while True:
            stopped = await self._succeeds(self._host.stop())
            await asyncio.sleep(delay)
            delay = min(max(FIRST_DELAY, 2 * delay), LONGEST_DELAY)
            if stopped and await self._succeeds(self._launch()):
                return delay

    async def _launch(self) -> None:
        self._frontend.attach(await self._host.launch(self._frontend.new_sink()))

    async def _succeeds(self, attempt: Awaitable[None]) -> bool:
        """Whatever it raises, a server without an engine goes on trying."""
        try:
            await attempt
        except Exception as error:
            known = isinstance(error, EngineStartError | CheckpointError | ValueError | OSError | MemoryError)
            log.error("the engine cannot be replaced yet, trying again: %s", error, exc_info=not known)
            return False
        return True
