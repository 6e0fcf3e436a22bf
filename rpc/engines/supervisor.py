"""Keeps own engines behind a frontend: starts them, replaces those that die, ends them."""

import asyncio
import logging
import math
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from model.errors import CheckpointError
from rpc.engines.fleet import log_failure
from rpc.engines.host import EngineHost
from rpc.engines.process import EngineStartError
from rpc.engines.scaling import Scaling
from rpc.frontend.errors import RequestFailed
from rpc.frontend.frontend import Frontend
from rpc.frontend.replicas import Replica
from rpc.link.table import TableService

log = logging.getLogger("quire.engines")

FIRST_DELAY, LONGEST_DELAY = 1.0, 30.0  # seconds between two attempts to start an engine
RESTART_SECONDS = 900.0  # longest wait of a restart for the new engine
LEAST_GRACE = 30.0  # seconds, at least, for which the first engine that serves waits for the others
STEADY = 10.0  # seconds of life after which an engine is replaced without a delay


class Supervisor:
    """`Fleet` of own engines, at most one a host. An engine's number is the place of its host in the list.

    Args:
        hosts: Places that engines can run in.
        frontend: Frontend of the engines.
        least: Count of engines at the start; None: one a host.
        table: Serves the engines to frontends of other processes; None: there are none.
        scaling: Changes the count of engines with the load; None: it stays.

    Attributes:
        keeping: Task that keeps each engine alive, by number. Numbers without an engine have none.
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
        self.keeping: dict[int, asyncio.Task[None]] = {}
        self._launches: list[asyncio.Task[None]] = []  # the first ones, by number
        self._scaler: asyncio.Task[None] | None = None
        self._restarting: dict[int, asyncio.Task[int]] = {}

    @property
    def summary(self) -> str:
        least, most = self._least, len(self._keepers)
        return f"{least} to {most} replicas" if least < most else f"{most} replicas" if most > 1 else ""

    async def start(self) -> None:
        """Starts the engines; returns once each serves or has failed. `stop` is due even if this raises.

        Where some serve, those that did not start are tried again meanwhile: a broken GPU must not take the others
        along. Nor must one that hangs: those that serve wait for others as long again as the first of them took.

        Raises:
            OSError: The table cannot listen on its address, or none of the engines starts.
            EngineStartError: None of them starts; what the first one said.
            Exception: The exception of the first `launch` that fails otherwise, as of a wrong configuration.
        """
        if self._table is not None:
            await self._table.open()
        for keeper in self._keepers:
            await keeper.prepare()
        self._launches = await self._first_launches()
        failures = [launch.exception() if launch.done() else None for launch in self._launches]
        if all(failures) and (first := next(iter(failures), None)) is not None:
            raise first
        for number, launch in enumerate(self._launches):
            self._start_keeping(number, self._keepers[number].join_and_keep(launch))
        if self._scaling is not None:
            self._scaler = asyncio.create_task(self._scaling.run(self))
            self._scaler.add_done_callback(log_failure)

    async def _first_launches(self) -> list[asyncio.Task[None]]:
        """Launches an engine in each of the first places.

        Returns:
            Launches by number. Some may have failed, and, where an engine serves, be under way.

        Raises:
            Exception: The first exception of a launch that no machine is to blame for.
        """
        clock = asyncio.get_running_loop().time
        launches = [asyncio.create_task(keeper.launch()) for keeper in self._keepers[: self._least]]
        left, began, until = set(launches), clock(), math.inf
        try:
            while left and clock() < until:
                timeout = None if until == math.inf else until - clock()
                done, left = await asyncio.wait(left, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                for error in (launch.exception() for launch in done):
                    if error is None:
                        until = min(until, clock() + max(LEAST_GRACE, clock() - began))
                    elif not isinstance(error, (EngineStartError, OSError)):  # OSError: its process may not even end
                        raise error
        except BaseException:
            for launch in launches:
                launch.cancel()
            await asyncio.gather(*launches, return_exceptions=True)
            raise
        return launches

    def _start_keeping(self, number: int, keeping: Coroutine[None, None, None]) -> None:
        task = self.keeping[number] = asyncio.create_task(keeping)
        task.add_done_callback(log_failure)

    @property
    def count(self) -> int:
        return len(self._counted())

    def _counted(self) -> list[int]:
        """Returns numbers of engines that serve, are being started, or wait for room; a drained engine does not count.

        The autoscaler thus replaces the capacity that an operator takes out.
        """
        return [number for number in self.keeping if not self._is_drained(number)]

    def _is_drained(self, number: int) -> bool:
        replica = self._frontend.replicas.get(number)
        return replica is not None and replica.drained

    def grow(self) -> bool:
        number = next((n for n in range(len(self._keepers)) if n not in self.keeping), None)
        if number is not None:
            self._start_keeping(number, self._keepers[number].start_and_keep())
        return number is not None

    async def shrink(self) -> bool:
        free = [number for number in self._counted() if number not in self._restarting]
        serving = [number for number in free if self._load_of(number)[0]]
        if len(serving) == len(free) < 2:
            return False  # the last one that takes requests
        # One that does not serve yet goes first, then the least loaded; of equals the one with the highest number.
        number = min(free, key=lambda number: (*self._load_of(number), -number))
        task, replica = self.keeping.pop(number), self._frontend.replicas.get(number)
        task.cancel()  # before anything else, so that it does not replace the engine that ends
        await asyncio.gather(task, return_exceptions=True)
        if replica is not None and replica.usable:
            await self._move_away(replica)
        try:
            await self._keepers[number].stop()
        finally:
            self._frontend.detach(number)
            self._frontend.replicas.retire(number)
        return True

    def _load_of(self, number: int) -> tuple[bool, int]:
        """Returns whether the engine serves, and the count of its sequences."""
        replica = self._frontend.replicas.get(number)
        if replica is None or not replica.usable:
            return False, 0
        return True, replica.stats.running + replica.stats.waiting

    async def _move_away(self, replica: Replica) -> int:
        """Moves the requests of all frontends away from an engine, KV pages included. Returns this frontend's count."""
        moved = self._frontend.mark(replica, replica.drained, leaving=True)
        await self._frontend.until_moved()
        if self._table is not None:
            await self._table.settled()
        return moved

    def drain(self, number: int) -> int:
        """Drains an engine, as `Fleet.drain`. Raises RequestFailed also where no other engine takes requests."""
        return self._frontend.drain_replica(number)

    def resume(self, number: int) -> None:
        self._frontend.resume_replica(number)

    async def restart(self, number: int) -> int:
        """Restarts an engine, as `Fleet.restart`. Its requests wait where no other engine takes them.

        A restart goes on when the call is cancelled; a second call joins it.
        """
        replica = self._frontend.serving(number)
        if number not in self._restarting:
            if number not in self.keeping:  # autoscaling ends it, and still moves its requests away
                raise RequestFailed("NOT_FOUND", "NO_SUCH_REPLICA", f"replica {number} is about to end")
            task = self._restarting[number] = asyncio.create_task(self._restart(replica))
            task.add_done_callback(lambda _: self._restarting.pop(number))
        return await asyncio.shield(self._restarting[number])

    async def _restart(self, replica: Replica) -> int:
        keeper = self._keepers[replica.number]
        moved = await self._move_away(replica)
        await keeper.restart(replica)
        return moved

    async def stop(self) -> None:
        """Ends the engines, and with them the requests that they have.

        Raises:
            TimeoutError: An engine does not end.
        """
        self._frontend.close()
        if self._table is not None:
            for replica in self._frontend.replicas:
                self._frontend.replicas.mark(replica, replica.drained, leaving=True)
            await self._table.settled()  # other frontends move their requests first, so none is lost with its engine
            await self._table.close()
        scaler = [] if self._scaler is None else [self._scaler]
        tasks: list[asyncio.Task[Any]] = [*self._restarting.values(), *self.keeping.values(), *scaler, *self._launches]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ends = await asyncio.gather(*(keeper.stop() for keeper in self._keepers), return_exceptions=True)
        ends += await asyncio.gather(*(keeper.close() for keeper in self._keepers), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end


class Keeper:
    """Keeps an engine alive in one place, under one number."""

    def __init__(self, number: int, host: EngineHost, frontend: Frontend) -> None:
        self._number, self._host, self._frontend = number, host, frontend
        self._replacement_wanted, self._restarted = asyncio.Event(), asyncio.Event()

    async def restart(self, replica: Replica) -> None:
        """Replaces a live engine; returns once another one serves in its place.

        Raises:
            RequestFailed: No engine serves after RESTART_SECONDS.
        """
        now = self._frontend.replicas.get(self._number)
        if now is not None and now is not replica and now.usable:
            return  # it died meanwhile, and was replaced
        self._restarted.clear()
        if now is replica and replica.usable:
            self._replacement_wanted.set()
        try:
            async with asyncio.timeout(RESTART_SECONDS):
                await self._restarted.wait()
        except TimeoutError:
            message = f"engine {self._number} is not there again after {RESTART_SECONDS:g} s: the server's log says why"
            raise RequestFailed("UNAVAILABLE", "NOT_RESTARTED", message) from None

    async def prepare(self) -> None:
        """Prepares the host, once, before the first engine."""
        await self._host.prepare()

    async def stop(self) -> None:
        """Ends the engine. Raises TimeoutError where it does not end."""
        await self._host.stop()

    async def close(self) -> None:
        """Closes the host, once, after the last `stop`."""
        await self._host.close()

    async def join_and_keep(self, launch: asyncio.Task[None]) -> None:
        """Keeps the engine of a launch, which may be under way, or have failed. Cancels it when cancelled."""
        if not launch.done():
            log.warning("engine %d is not there yet: the others serve without it", self._number)
        if await self._succeeded(launch):
            await self.keep()
        else:
            await self.start_and_keep()

    async def start_and_keep(self) -> None:
        """Starts an engine, with as many attempts as it takes, and keeps it as `keep` does."""
        await self._replace(0.0)
        log.info("engine %d takes requests", self._number)
        self._replacement_wanted.clear()  # of the engine that was here before
        await self.keep()

    async def keep(self) -> None:
        """Replaces the engine whenever it dies, until cancelled."""
        clock = asyncio.get_running_loop().time
        delay, since = 0.0, clock()
        while True:
            asked = await self._wait_due()
            if asked or clock() - since > STEADY:
                delay = 0.0
            self._frontend.detach(self._number)
            delay = await self._replace(delay)
            since = clock()
            log.info("engine %d is ready again", self._number)
            self._restarted.set()

    async def _wait_due(self) -> bool:
        """Waits until the engine is dead or a restart is wanted. Returns whether a restart was wanted."""
        lost, asked = (
            asyncio.create_task(self._frontend.engine_lost(self._number)),
            asyncio.create_task(self._replacement_wanted.wait()),
        )
        try:
            await asyncio.wait((lost, asked), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                self._replacement_wanted.clear()
                log.info("engine %d is replaced, as was asked for", self._number)
                return True
            log.error("engine %d has failed: %s. Starting a new one", self._number, lost.result())
            return False
        finally:
            for task in (lost, asked):
                task.cancel()

    async def _replace(self, delay: float) -> float:
        """Ends the engine, and starts another one, with as many attempts as it takes.

        Args:
            delay: Seconds before the first attempt; it doubles from attempt to attempt.

        Returns:
            Seconds before the next attempt, if the new engine dies soon.
        """
        while True:
            stopped = await self._succeeded(self._host.stop())
            await asyncio.sleep(delay)
            delay = min(max(FIRST_DELAY, 2 * delay), LONGEST_DELAY)
            if stopped and await self._succeeded(self.launch()):
                return delay

    async def launch(self) -> None:
        """Launches an engine, and attaches it. Raises what the host's `launch` raises."""
        self._frontend.attach(await self._host.launch(self._frontend.new_sink(self._number)), self._number)

    async def _succeeded(self, attempt: Awaitable[None]) -> bool:
        """Awaits an attempt, and returns whether it succeeded; logs its exception, since the server goes on trying."""
        try:
            await attempt
        except Exception as error:
            known = isinstance(error, EngineStartError | CheckpointError | ValueError | OSError | MemoryError)
            log.error("engine %d cannot be started yet, trying again: %s", self._number, error, exc_info=not known)
            return False
        return True
