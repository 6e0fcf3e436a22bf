"""Which server a request is sent to, and whether and when there is another try."""

import random
import time
from collections.abc import Sequence

import grpc

from rpc.client.failures import Failure

ROUNDS, PAUSE = 3, 0.5  # tries of all servers without progress; seconds between two rounds
LOST = (grpc.StatusCode.UNAVAILABLE,)
FULL = ("QUEUE_FULL", "QUEUE_TIMEOUT")
SPREAD = 0.25  # of a wait, at random on top: clients that were refused together need not come back together


class Tries:
    """Of one request. servers: HOST:PORT of each, the first of which is asked first. timeout: seconds for all of it.
    refusals: how often it waits, as long as a server says, where none has room for it; what has begun waits as often as
    it takes. server: that is asked.
    """

    def __init__(self, servers: Sequence[str], timeout: float | None, refusals: int = 0) -> None:
        if not servers:
            raise ValueError("there is no server to ask")
        self._servers = list(servers)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._refusals, self._turn, self._failures, self._full = refusals, 0, 0, 0
        self._moved = False  # it goes on from what a server that was lost had given
        self.server = self._servers[0]

    @property
    def first(self) -> bool:
        """Nobody has been asked before this one."""
        return self._turn <= 1

    def begin(self) -> float | None:
        """The next server is asked; seconds that are left for it."""
        self.server = self._servers[self._turn % len(self._servers)]
        self._turn += 1
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause(self, failure: Failure, progress: bool = False) -> float | None:
        """The call ended with this: seconds before the next one, None where there is none. progress: something came of
        it.
        """
        wait = self._wait(failure, progress)
        late = wait is not None and self._deadline is not None and time.monotonic() + wait >= self._deadline
        return None if late else wait

    def _wait(self, failure: Failure, progress: bool) -> float | None:
        if failure.code in LOST:
            self._moved = self._moved or progress
            self._failures = 1 if progress else self._failures + 1
            if self._failures >= ROUNDS * len(self._servers):
                return None
            return max(PAUSE, failure.retry_after or 0.0) if self._failures % len(self._servers) == 0 else 0.0
        if failure.reason in FULL and failure.retry_after is not None:
            self._full += 1
            if self._full % len(self._servers):
                return 0.0  # another one may have room
            if self._moved or self._refusals > 0:
                self._refusals -= 1
                return failure.retry_after * random.uniform(1.0, 1.0 + SPREAD)  # noqa: S311 - it hides nothing
        return None
