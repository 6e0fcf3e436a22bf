"""Decides how long a batch job tries again, and which lines run isolated because an engine died under them.

After two deaths of its engine a line runs isolated, with no other line of the job beside it. Only if the engine dies
again is the line the cause, and gets an error. No other failure that may pass becomes an error of a line: the line is
tried again. If nothing succeeds for too long, the job stops, and the same command goes on later.
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
DEATHS_TO_ISOLATE = 2  # deaths under a line after which it runs isolated
SICK = 3  # deaths in a row, each under an isolated line, after which the engine is the cause
PAUSE = 0.5  # seconds, the first between two tries; each is longer than the one before
LONGEST_PAUSE = 10.0


class JobStoppedError(RuntimeError):
    """The job cannot go on now, through no fault of its lines; the same command goes on later."""


class Since:
    """Measures how long a state lasts, and stops the job if it lasts longer than `most` seconds."""

    def __init__(self, most: float) -> None:
        self._most, self._began = most, -1.0

    def clear(self) -> None:
        self._began = -1.0

    def check(self, what: str) -> bool:
        """Records that the state lasts.

        Args:
            what: Description of the state, for the error.

        Returns:
            Whether the state begins now.

        Raises:
            JobStoppedError: The state has lasted too long.
        """
        now = time.monotonic()
        begins = self._began < 0
        if begins:
            self._began = now
        if now - self._began > self._most:
            raise JobStoppedError(f"nothing has succeeded for {now - self._began:.0f} s: {what}")
        return begins


class RetryPolicy:
    """Retries of one job: how long nothing has succeeded, and which lines run isolated."""

    def __init__(self) -> None:
        self._away, self._busy = Since(AWAY), Since(BUSY)
        self._isolated_deaths = 0
        self._running = 0
        self._isolated = 0
        self._changed = asyncio.Condition()

    def succeeded(self) -> None:
        """Records that a line has its answer."""
        self.answered()
        self._busy.clear()
        self._isolated_deaths = 0

    def answered(self) -> None:
        """Records that the server can be reached, whatever it answered."""
        self._away.clear()

    def away(self, what: str) -> None:
        """Records that the server cannot be reached. Raises JobStoppedError if that lasts too long."""
        if self._away.check(what):
            log.warning("%s; waiting for it, %d s at most", what, AWAY)

    def busy(self, what: str) -> None:
        """Records that a line must be tried again. Raises JobStoppedError if no line has succeeded for too long."""
        self._busy.check(what)

    def died_isolated(self, failure: RequestFailed) -> None:
        """Records that the engine died under an isolated line.

        Raises:
            JobStoppedError: It died under several isolated lines in a row, so the engine is the cause.
        """
        self._isolated_deaths += 1
        if self._isolated_deaths >= SICK:
            raise JobStoppedError(f"the engine died under {SICK} lines in a row, each isolated: {failure.message}")

    @asynccontextmanager
    async def turn(self, isolated: bool) -> AsyncIterator[None]:
        """Waits until a line may run, and holds its place while the context is open.

        Args:
            isolated: Whether the line runs isolated. Such lines run before all other waiting ones, one by one.
        """
        self._isolated += isolated
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._running if isolated else not self._isolated)
                self._running += 1
            try:
                yield
            finally:
                self._running -= 1
        finally:
            self._isolated -= isolated
            async with self._changed:
                self._changed.notify_all()
