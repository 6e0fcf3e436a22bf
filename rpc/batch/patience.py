"""How long a batch job goes on trying, and which line is run alone because an engine died under it.

After two deaths of its engine a line runs with no other line of the job beside it; only if the engine dies then, too,
is the line the cause, and an error. Nothing else that may pass by itself ever becomes an error of a line: it is tried
again, until nothing has succeeded for so long that the job stops, to be gone on with later.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rpc.frontend.errors import RequestFailed

log = logging.getLogger("quire.batch")

AWAY = 60.0  # seconds without an answer after which a server that cannot be reached is lost
BUSY = 1200.0  # seconds without a success from one that answers: it may be loading a large model, or serving others
SUSPECT = 2  # deaths under a line after which it runs alone
SICK = 3  # deaths in a row, each under a line that ran alone, after which the engine is the cause
PAUSE = 0.5  # seconds, the first between two tries; each is longer than the one before
LONGEST_PAUSE = 10.0


class JobStoppedError(RuntimeError):
    """The job cannot go on now, through no fault of its lines; the same command goes on later."""


class Since:
    """When something began that must not go on for more than so many seconds."""

    def __init__(self, most: float) -> None:
        self._most, self._began = most, -1.0

    def clear(self) -> None:
        self._began = -1.0

    def check(self, what: str) -> bool:
        """Returns whether it begins now. Raises JobStoppedError where it has gone on for too long."""
        now = time.monotonic()
        begins = self._began < 0
        if begins:
            self._began = now
        if now - self._began > self._most:
            raise JobStoppedError(f"nothing has succeeded for {now - self._began:.0f} s: {what}")
        return begins


class Patience:
    """Of one job: for how long nothing has succeeded, and who runs alone."""

    def __init__(self) -> None:
        self._away, self._busy = Since(AWAY), Since(BUSY)
        self._deaths_alone = 0
        self._running = 0
        self._suspects = 0
        self._changed = asyncio.Condition()

    def succeeded(self) -> None:
        """A line has its answer."""
        self.answered()
        self._busy.clear()
        self._deaths_alone = 0

    def answered(self) -> None:
        """There is somebody, whatever the answer was."""
        self._away.clear()

    def away(self, what: str) -> None:
        """Nobody answered. Raises JobStoppedError where that has gone on for too long."""
        if self._away.check(what):
            log.warning("%s; waiting for it, %d s at most", what, AWAY)

    def busy(self, what: str) -> None:
        """A line was told to come again. Raises JobStoppedError where no line has fared better for too long."""
        self._busy.check(what)

    def died_alone(self, failure: RequestFailed) -> None:
        """The engine died under a line that ran alone. Raises JobStoppedError where it always does."""
        self._deaths_alone += 1
        if self._deaths_alone >= SICK:
            raise JobStoppedError(f"the engine died under {SICK} lines in a row, each alone: {failure.message}")

    @asynccontextmanager
    async def turn(self, suspect: bool) -> AsyncIterator[None]:
        """Runs a line beside others, or alone. Suspects come first, one by one."""
        self._suspects += suspect
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._running if suspect else not self._suspects)
                self._running += 1
            try:
                yield
            finally:
                self._running -= 1
        finally:
            self._suspects -= suspect
            async with self._changed:
                self._changed.notify_all()
