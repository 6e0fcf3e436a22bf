"""Keeps engines behind a frontend: starts them, replaces one that dies, ends them."""

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from model.errors import CheckpointError
from rpc.engines.host import EngineHost
from rpc.engines.process import EngineStartError
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend

log = logging.getLogger("quire.engines")

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between two attempts to start an engine
RESTART_SECONDS = 900.0  # that a restart waits for the new engine
STEADY = 10.0  # seconds after which an engine's death counts as the first again


class Supervisor:
    """One engine a host, each under its place in the list. `start` once, `stop` once."""

    def __init__(self, hosts: Sequence[EngineHost], frontend: Frontend) -> None:
        self._keepers = [Keeper(number, host, frontend) for number, host in enumerate(hosts)]
        self._frontend = frontend
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Until all of them serve. Raises what the first `launch` that fails does; `stop` is due all the same."""
        launches = [asyncio.create_task(keeper.launch()) for keeper in self._keepers]
        try:
            await asyncio.gather(*launches)
        finally:
            for launch in launches:
                launch.cancel()
            await asyncio.gather(*launches, return_exceptions=True)
        self._tasks = [asyncio.create_task(keeper.keep()) for keeper in self._keepers]
        for task in self._tasks:
            task.add_done_callback(_say_why)

    async def restart(self, number: int) -> int:
        """Puts a new engine in the place of one that serves, whose requests go on elsewhere or wait; how many. Raises
        RequestFailed where none serves there.
        """
        replica = self._frontend.serving(number)
        moved = self._frontend.empty(replica)
        await self._frontend.until_moved()
        await self._keepers[number].restart()
        return moved

    async def stop(self) -> None:
        """Ends the engines, and with them the requests that they have. Raises TimeoutError."""
        self._frontend.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ends = await asyncio.gather(*(keeper.stop() for keeper in self._keepers), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


class Keeper:
    """Of the engine of one number."""

    def __init__(self, number: int, host: EngineHost, frontend: Frontend) -> None:
        self._number, self._host, self._frontend = number, host, frontend
        self._asked, self._restarted = asyncio.Event(), asyncio.Event()

    async def restart(self) -> None:
        """Replaces the engine though it lives; until the new one serves. Raises RequestFailed."""
        self._restarted.clear()
        self._asked.set()
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                await self._restarted.wait()
        except TimeoutError:
            message = f"engine {self._number} is not there again after {RESTART_SECONDS:g} s: the server's log says why"
            raise RequestFailed("UNAVAILABLE", "NOT_RESTARTED", message) from None

    async def stop(self) -> None:
        """Raises TimeoutError."""
        await self._host.stop()

    async def keep(self) -> None:
        """Replaces the engine whenever it dies, until cancelled."""
        clock = asyncio.get_running_loop().time
        delay, since = 0.0, clock()
        while True:
            asked = await self._until_due()
            if asked or clock() - since > STEADY:
                delay = 0.0
            self._frontend.detach(self._number)
            delay = await self._replace(delay)
            since = clock()
            log.info("engine %d is ready again", self._number)
            self._restarted.set()

    async def _until_due(self) -> bool:
        """Until the engine is dead, or another one is wanted in its place. Returns whether it was wanted."""
        lost, asked = (
            asyncio.create_task(self._frontend.engine_lost(self._number)),
            asyncio.create_task(self._asked.wait()),
        )
        try:
            await asyncio.wait((lost, asked), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                self._asked.clear()
                log.info("engine %d is replaced, as was asked for", self._number)
                return True
            log.error("engine %d has failed: %s. Starting a new one", self._number, lost.result())
            return False
        finally:
            for task in (lost, asked):
                task.cancel()

    async def _replace(self, delay: float) -> float:
        """Until an engine runs, waiting longer each time. Returns how long to wait if it dies soon."""
        while True:
            stopped = await self._succeeds(self._host.stop())
            await asyncio.sleep(delay)
            delay = min(max(FIRST_DELAY, 2 * delay), LONGEST_DELAY)
            if stopped and await self._succeeds(self.launch()):
                return delay

    async def launch(self) -> None:
        """Raises what the host's `launch` does."""
        self._frontend.attach(await self._host.launch(self._frontend.new_sink(self._number)), self._number)

    async def _succeeds(self, attempt: Awaitable[None]) -> bool:
        """Whatever it raises, a server without an engine goes on trying."""
        try:
            await attempt
        except Exception as error:
            known = isinstance(error, EngineStartError | CheckpointError | ValueError | OSError | MemoryError)
            log.error("engine %d cannot be replaced yet, trying again: %s", self._number, error, exc_info=not known)
            return False
        return True


def _say_why(task: asyncio.Task[None]) -> None:
    """A keeper that ends by itself is a bug; its engine would never be replaced, and nobody would know."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("an engine is not watched any more", exc_info=error)
