"""Keeps engines behind a frontend: starts them, replaces one that dies, ends them."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from model.errors import CheckpointError
from rpc.engines.fleet import say_why
from rpc.engines.host import EngineHost
from rpc.engines.process import EngineStartError
from rpc.engines.scaling import Scaling
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.replicas import Replica
from rpc.link.table import TableService

log = logging.getLogger("quire.engines")

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between two attempts to start an engine
RESTART_SECONDS = 900.0  # that a restart waits for the new engine
STEADY = 10.0  # seconds after which an engine's death counts as the first again


class Supervisor:
    """`Fleet` of own engines: at most one a host, each under its place in the list. least: engines at the start, None:
    one a host. table: for frontends that use them too. scaling: changes how many there are.
    """

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        frontend: Frontend,
        least: int | None = None,
        table: TableService | None = None,
        scaling: Scaling | None = None,
    ) -> None:
        self._keepers = [Keeper(number, host, frontend) for number, host in enumerate(hosts)]
        self._least = len(hosts) if least is None else least
        self._frontend, self._table, self._scaling = frontend, table, scaling
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by number, of those that there are or will be
        self._scaler: asyncio.Task[None] | None = None
        self._restarting: dict[int, asyncio.Task[int]] = {}

    @property
    def summary(self) -> str:
        least, most = self._least, len(self._keepers)
        return f"{least} to {most} replicas" if least < most else f"{most} replicas" if most > 1 else ""

    async def start(self) -> None:
        """Until all of them serve. `stop` is due whatever it raises.

        Raises OSError where the table's address cannot be had, and what the first `launch` that fails does.
        """
        if self._table is not None:
            await self._table.open()
        for keeper in self._keepers:
            await keeper.prepare()
        launches = [asyncio.create_task(keeper.launch()) for keeper in self._keepers[: self._least]]
        try:
            await asyncio.gather(*launches)
        finally:
            for launch in launches:
                launch.cancel()
            await asyncio.gather(*launches, return_exceptions=True)
        for number in range(self._least):
            self._watch(number, self._keepers[number].keep())
        if self._scaling is not None:
            self._scaler = asyncio.create_task(self._scaling.run(self))
            self._scaler.add_done_callback(say_why)

    def _watch(self, number: int, keeping: Coroutine[None, None, None]) -> None:
        task = self._tasks[number] = asyncio.create_task(keeping)
        task.add_done_callback(say_why)

    @property
    def count(self) -> int:
        return len(self._counted())

    def _counted(self) -> list[int]:
        """Numbers of those that serve, are being started, or wait for room; an operator's drained ones do not count."""
        return [number for number in self._tasks if not self._is_drained(number)]

    def _is_drained(self, number: int) -> bool:
        replica = self._frontend.replicas.get(number)
        return replica is not None and replica.drained

    def grow(self) -> bool:
        number = next((n for n in range(len(self._keepers)) if n not in self._tasks), None)
        if number is not None:
            self._watch(number, self._keepers[number].come())
        return number is not None

    async def shrink(self) -> bool:
        free = [number for number in self._counted() if number not in self._restarting]
        serving = [number for number in free if self._busy(number)[0]]
        if len(serving) == len(free) < 2:
            return False  # the last one that takes requests
        number = min(free, key=lambda number: (*self._busy(number), -number))
        task, replica = self._tasks.pop(number), self._frontend.replicas.get(number)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if replica is not None and replica.usable:
            await self._empty(replica)
        try:
            await self._keepers[number].stop()
        finally:
            self._frontend.detach(number)
            self._frontend.replicas.retire(number)
        return True

    def _busy(self, number: int) -> tuple[bool, int]:
        """Whether it serves, and how many requests."""
        replica = self._frontend.replicas.get(number)
        if replica is None or not replica.usable:
            return False, 0
        return True, replica.stats.running + replica.stats.waiting

    async def _empty(self, replica: Replica) -> int:
        """Requests leave it, also those of other frontends, and take their pages with them; how many were here."""
        moved = self._frontend.mark(replica, replica.drained, leaving=True)
        await self._frontend.until_moved()
        if self._table is not None:
            await self._table.settled()
        return moved

    def drain(self, number: int) -> int:
        """Raises RequestFailed also where there is no other engine."""
        return self._frontend.drain_replica(number)

    def resume(self, number: int) -> None:
        self._frontend.resume_replica(number)

    async def restart(self, number: int) -> int:
        """Where there is no other engine, the requests wait. It goes on where nobody waits for it any more."""
        replica = self._frontend.serving(number)
        if number not in self._restarting:
            task = self._restarting[number] = asyncio.create_task(self._restart(replica))
            task.add_done_callback(lambda _: self._restarting.pop(number))
        return await asyncio.shield(self._restarting[number])

    async def _restart(self, replica: Replica) -> int:
        keeper = self._keepers[replica.number]
        moved = await self._empty(replica)
        await keeper.restart(replica)
        return moved

    async def stop(self) -> None:
        """Ends the engines, and with them the requests that they have. Raises TimeoutError."""
        self._frontend.close()
        if self._table is not None:
            for replica in self._frontend.replicas:
                self._frontend.replicas.mark(replica, replica.drained, leaving=True)
            await self._table.settled()  # other frontends take their requests away; no engine dies with one
            await self._table.close()
        scaler = [] if self._scaler is None else [self._scaler]
        tasks: list[asyncio.Task[Any]] = [*self._restarting.values(), *self._tasks.values(), *scaler]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ends = await asyncio.gather(*(keeper.stop() for keeper in self._keepers), return_exceptions=True)
        ends += await asyncio.gather(*(keeper.close() for keeper in self._keepers), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


class Keeper:
    """Of the engine of one number."""

    def __init__(self, number: int, host: EngineHost, frontend: Frontend) -> None:
        self._number, self._host, self._frontend = number, host, frontend
        self._asked, self._restarted = asyncio.Event(), asyncio.Event()

    async def restart(self, replica: Replica) -> None:
        """Replaces this engine though it lives; until another one serves. Raises RequestFailed."""
        now = self._frontend.replicas.get(self._number)
        if now is not None and now is not replica and now.usable:
            return  # it died, and was replaced
        self._restarted.clear()
        if now is replica and replica.usable:
            self._asked.set()
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                await self._restarted.wait()
        except TimeoutError:
            message = f"engine {self._number} is not there again after {RESTART_SECONDS:g} s: the server's log says why"
            raise RequestFailed("UNAVAILABLE", "NOT_RESTARTED", message) from None

    async def prepare(self) -> None:
        """Once, before anything else."""
        await self._host.prepare()

    async def stop(self) -> None:
        """Raises TimeoutError."""
        await self._host.stop()

    async def close(self) -> None:
        """Once, after the last `stop`."""
        await self._host.close()

    async def come(self) -> None:
        """Starts an engine, however long there is no room for it, and then as `keep`."""
        await self._replace(0.0)
        log.info("engine %d takes requests", self._number)
        await self.keep()

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
