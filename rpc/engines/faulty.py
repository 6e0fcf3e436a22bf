"""Faults of simulated engines at given times, as `--sim-faults` orders them."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from model.simulated.faults import KILL, Fault
from rpc.engines.host import EngineHost
from rpc.frontend.engine_client import EngineClient
from rpc.settings import EngineConfig
from scheduler.engine import Sink

log = logging.getLogger("quire.engines")


class MortalHost(EngineHost, Protocol):
    """An `EngineHost` whose engine can be killed.

    Attributes:
        config: Configuration of the next engine.
    """

    config: EngineConfig

    def kill(self) -> None:
        """Kills the engine with SIGKILL, and leaves it to others to notice. Does nothing without one."""


class FaultyHost:
    """`EngineHost` of simulated engines in one place, which have faults at given times.

    Times count from when an engine first serves here, and go on while there is none. Each fault happens once, to the
    engine that serves then; those that come while none serves do not happen. The server kills. An engine gets faults of
    its steps with its configuration, since it cannot be told later.

    Args:
        host: Runs the engines.
        faults: Faults of engines in this place.

    Attributes:
        left: Faults that are yet to happen, the next one first.
    """

    def __init__(self, host: MortalHost, faults: Sequence[Fault]) -> None:
        self._host = host
        self.left = sorted(faults, key=lambda fault: fault.at)
        self._first: float | None = None  # when the first engine began to serve, on the loop's clock
        self._following: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        await self._host.prepare()

    async def launch(self, sink: Sink) -> EngineClient:
        self._forget_missed()
        now = self._seconds()  # the engine's own clock begins later by the time of its start, as it is forked little
        faults = tuple(replace(fault, at=fault.at - now) for fault in self.left if fault.kind != KILL)
        self._host.config = replace(self._host.config, step_faults=faults)
        client = await self._host.launch(sink)
        if self._first is None:
            self._first = asyncio.get_running_loop().time()
        else:
            self._forget_missed()  # while it started
        self._following = asyncio.create_task(self._follow())
        return client

    def _seconds(self) -> float:
        """Returns the seconds since an engine first served here."""
        return 0.0 if self._first is None else asyncio.get_running_loop().time() - self._first

    def _forget_missed(self) -> None:
        """Forgets faults that came while no engine served."""
        now = self._seconds()
        self.left = [fault for fault in self.left if fault.at >= now]

    async def _follow(self) -> None:
        """Kills the engine at the first time that says so, and logs the faults before."""
        while self.left:
            await asyncio.sleep(self.left[0].at - self._seconds())
            fault = self.left.pop(0)  # before it happens: the next engine must not have it again
            log.warning("engine %d: %s, as --sim-faults says", fault.engine, fault.kind)
            if fault.kind == KILL:
                self._host.kill()
                return

    async def stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
        await self._host.stop()

    async def close(self) -> None:
        await self._host.close()
