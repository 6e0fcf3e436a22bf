"""Looks at what engines have to do, and has more of them started, or one ended."""

import asyncio
import logging
import time
from typing import Protocol

from rpc.frontend.frontend import Frontend
from rpc.observe.metrics import Metrics
from scheduler.autoscaling import Autoscaler, Load

log = logging.getLogger("quire.engines")

LOOK_SECONDS = 1.0  # between two looks


class Scalable(Protocol):
    """Engines, of which there can be more and fewer."""

    @property
    def count(self) -> int:
        """Those that serve, are being started, or wait for room."""

    def grow(self) -> bool:
        """One more, as soon as there is room for it. False where there cannot be more."""

    async def shrink(self) -> bool:
        """One fewer: requests of the one that has the least to do go on elsewhere. False where it is the last one."""


class Scaling:
    """`run` until cancelled."""

    def __init__(self, autoscaler: Autoscaler, frontend: Frontend, metrics: Metrics) -> None:
        self._autoscaler, self._frontend, self._metrics = autoscaler, frontend, metrics

    async def run(self, engines: Scalable) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(engines)
            except Exception:  # an engine that does not end, say: what serves goes on, and so does this
                log.exception("the number of replicas cannot be changed")

    async def look(self, engines: Scalable) -> None:
        """Once."""
        before, decision = engines.count, self._autoscaler.decide(self._load(engines.count))
        self._metrics.replicas_wanted(decision.replicas)
        grown = sum(engines.grow() for _ in range(before, decision.replicas))
        if grown or decision.replicas < before:
            log.info("replicas: %d instead of %d, since %s", decision.replicas, before, decision.why)
        self._metrics.scaled("up", grown)
        for _ in range(decision.replicas, before):
            if await engines.shrink():
                self._metrics.scaled("down")

    def _load(self, count: int) -> Load:
        frontend = self._frontend
        taking = frontend.replicas.open
        use = [
            max(
                replica.stats.pages_used / replica.client.info.pages,
                replica.stats.running / replica.client.info.limits.sequences,
            )
            for replica in taking
            if replica.client is not None
        ]
        return Load(
            now=time.monotonic(),
            serving=len(taking),
            starting=count - len(taking),
            backlog=sum(replica.stats.waiting_seconds for replica in taking),
            use=sum(use) / max(len(use), 1),
            late=frontend.promises.late(),
        )
