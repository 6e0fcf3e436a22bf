"""Measures whether the generator itself keeps up: otherwise its figures are not the server's."""

import asyncio
import time
from dataclasses import dataclass, field

BEAT = 0.02  # seconds between two measurements of the event loop's lateness


@dataclass(slots=True)
class Effort:
    """Work and lateness of the generator.

    Attributes:
        lags: Seconds by which the event loop was late for each timer.
        cpu: CPU seconds of the process.
        loop: CPU seconds of the event loop's thread, at most one core.
        seconds: Wall-clock seconds of the measurement.
    """

    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0
    loop: float = 0.0
    seconds: float = 0.0


class EffortMeter:
    """Measures the effort of this process while its context is open. Lives on the event loop's thread."""

    def __init__(self) -> None:
        self.effort = Effort()
        self._began = (0.0, 0.0, 0.0)

    async def __aenter__(self) -> Effort:
        self._began = self._now()
        self._beats = asyncio.create_task(self._beat())
        return self.effort

    async def __aexit__(self, *_: object) -> None:
        self._beats.cancel()
        await asyncio.gather(self._beats, return_exceptions=True)
        effort = self.effort
        effort.cpu, effort.loop, effort.seconds = (
            now - began for now, began in zip(self._now(), self._began, strict=True)
        )

    async def _beat(self) -> None:
        while True:
            due = time.monotonic() + BEAT
            await asyncio.sleep(BEAT)
            self.effort.lags.append(max(0.0, time.monotonic() - due))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        return time.process_time(), time.thread_time(), time.monotonic()
