"""Watches the load of the engines, and has engines started or ended to match it."""

import asyncio
import logging
import time
from typing import Protocol

from rpc.frontend.frontend import Frontend
from rpc.observe.metrics import Metrics
from scheduler.autoscaling import Autoscaler, EngineLoad

log = logging.getLogger("quire.engines")

LOOK_SECONDS = 1.0  # interval of the looks at the load


class Scalable(Protocol):
    """A set of engines that can grow and shrink."""

    @property
    def count(self) -> int:
        """Count of engines that serve, are being started, or wait for room."""

    def grow(self) -> bool:
        """Adds an engine as soon as there is room for it. Returns False where no more can be added."""

    async def shrink(self) -> bool:
        """Ends the least loaded engine, whose requests go on elsewhere. Returns False where it is the last one."""


class Scaling:
    """Applies the autoscaler's decisions to a set of engines.

    Args:
        autoscaler: Decides on the number of engines.
        frontend: Frontend of the engines, which knows their load and SLOs.
        metrics: Gets the wanted number and the changes.
    """

    def __init__(self, autoscaler: Autoscaler, frontend: Frontend, metrics: Metrics) -> None:
        self._autoscaler, self._frontend, self._metrics = autoscaler, frontend, metrics

    async def run(self, engines: Scalable) -> None:
        """Looks at the load once a LOOK_SECONDS, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look(engines)
            except Exception:  # an engine that does not end, say: the others serve on, and the next look tries again
                log.exception("the number of replicas cannot be changed")

    async def look(self, engines: Scalable) -> None:
        """Looks at the load once, and grows or shrinks the engines by it."""
        before, decision = engines.count, self._autoscaler.decide(self._load(engines.count))
        self._metrics.replicas_wanted(decision.replicas)
        grown = sum(engines.grow() for _ in range(before, decision.replicas))
        if grown or decision.replicas < before:
            log.info("replicas: %d instead of %d, since %s", decision.replicas, before, decision.why)
        self._metrics.scaled("up", grown)
        for _ in range(decision.replicas, before):
            if await engines.shrink():
                self._metrics.scaled("down")

    def _load(self, count: int) -> EngineLoad:
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
        return EngineLoad(
            now=time.monotonic(),
            serving=len(taking),
            starting=count - len(taking),
            backlog=sum(replica.stats.waiting_seconds for replica in taking),
            use=sum(use) / max(len(use), 1),
            late=frontend.slo.late(),
        )
