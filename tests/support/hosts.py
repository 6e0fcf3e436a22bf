"""A place where engines run that does what a test tells it, and the time that its supervisor sees."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from scheduler.limits import Limits
from tests.support.links import MortalEngine, Sink


class FakeHost:
    """Launches puppets. failures: how the launches fail, one after the other; None where one does not.

    gate: launches wait for it. trouble: what no supervisor may ask of a host.
    """

    def __init__(self, failures: Iterable[Exception | None] = ()) -> None:
        self.failures = iter(failures)
        self.engines: list[MortalEngine] = []
        self.limits = Limits(vocabulary=320, context=256, pool_tokens=4096, sequences=8)
        self.launches = self.stops = self.closes = self.cancelled = 0
        self.running = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.trouble: list[str] = []

    async def prepare(self) -> None:
        """A puppet needs no libraries."""

    async def launch(self, sink: Sink) -> MortalEngine:
        if self.running:
            self.trouble.append("an engine was launched beside another")
        self.launches += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        failure = next(self.failures, None)
        if failure is not None:
            raise failure
        self.running = True
        engine = MortalEngine(sink)
        engine.info = replace(engine.info, limits=self.limits, pages=100 * self.launches)
        self.engines.append(engine)
        return engine

    async def stop(self) -> None:
        self.stops += 1
        self.running = False

    async def close(self) -> None:
        self.closes += 1


class Time:
    """Stands in for asyncio in a module: notes its delays instead of sleeping them, has a clock to turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        self.now, self.delays = 0.0, list[float]()
        monkeypatch.setattr(module, "asyncio", self)

    async def sleep(self, delay: float) -> None:
        self.delays.append(delay)

    def get_running_loop(self) -> SimpleNamespace:
        return SimpleNamespace(time=lambda: self.now)

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)
