"""The rate of KV transfers: bytes that came while at least one ran, by the time that one did."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from scheduler.costs import CopyCost

FORGET_SECONDS = 60.0  # age at which the rate of earlier transfers is outdated


class TransferRate:
    """Measures transfers that overlap as one, and predicts how long the next one takes. Used on one loop alone."""

    def __init__(self) -> None:
        self._cost, self._since, self._received, self._running = CopyCost(), 0.0, 0, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts a transfer as running, until the block ends."""
        if not self._running:
            self._since, self._received = time.monotonic(), 0
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                now = time.monotonic()
                self._cost.observe(self._received, now - self._since)
                self._since = now

    def receive(self, size: int) -> None:
        """Counts bytes that a running transfer has brought."""
        self._received += size

    def cost(self) -> CopyCost:
        """Returns the measured cost of a copy; none is known where the last transfer ended too long ago."""
        if not self._running and time.monotonic() - self._since > FORGET_SECONDS:
            self._cost = CopyCost()
        return self._cost
