"""Decides how long a batch job tries again. No failure that may pass becomes an error of a line.

If nothing succeeds for too long, the job stops, and the same command goes on later. A line under which engines die is
found by the frontend (`rpc.frontend.quarantine`), whose failure then does not pass.
"""

import logging
import time

log = logging.getLogger("quire.batch")

AWAY = 60.0  # seconds without an answer after which a server that cannot be reached is lost
BUSY = 1200.0  # seconds without a success from one that answers: it may be loading a large model, or serving others
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
    """Retries of one job: how long nothing has succeeded."""

    def __init__(self) -> None:
        self._away, self._busy = Since(AWAY), Since(BUSY)

    def succeeded(self) -> None:
        """Records that a line has its answer."""
        self.answered()
        self._busy.clear()

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
