"""How well the generator itself kept up: what it measures is the server's only while it does."""

import asyncio
import time
from dataclasses import dataclass, field

BEAT = 0.02  # seconds between two looks at how late the event loop is


@dataclass(slots=True)
class Effort:
    """lags: seconds that the event loop came late to a timer. cpu: seconds of processor time of the process; loop: of
    the thread that has the event loop, which is one core at most. seconds: that all this is of.
    """

    lags: list[float] = field(default_factory=list)
    cpu: float = 0.0
    loop: float = 0.0
    seconds: float = 0.0


class Watch:
    """A context in which this process is watched. Lives on the event loop's thread."""

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
