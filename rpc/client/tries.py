"""Chooses the server of each try of a request, and decides whether and when another try follows."""

import random
import time
from collections.abc import Sequence

import grpc

from rpc.client.failures import Failure

ROUNDS, PAUSE = 3, 0.5  # tries of all servers without progress; seconds between two rounds
LOST = (grpc.StatusCode.UNAVAILABLE,)
FULL = ("QUEUE_FULL", "QUEUE_TIMEOUT")
SPREAD = 0.25  # share of a wait that is added at random: clients refused together must not return together


class Tries:
    """Retries of one request over its servers, in turn.

    Lost servers: after `ROUNDS` rounds over all servers without progress the request fails. Full servers: the request
    waits at most `refusals` times; a stream that moved from a lost server waits without that limit.

    Args:
        servers: HOST:PORT of each; the first is asked first.
        timeout: Seconds for the whole request; None sets no limit.
        refusals: Waits while all servers are full, each as long as a server says.

    Attributes:
        server: HOST:PORT of the current try.

    Raises:
        ValueError: `servers` is empty.
    """

    def __init__(self, servers: Sequence[str], timeout: float | None, refusals: int = 0) -> None:
        if not servers:
            raise ValueError("there is no server to ask")
        self._servers = list(servers)
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._refusals, self._turn, self._failures, self._full = refusals, 0, 0, 0
        self._moved = False  # a lost server had given tokens, from which the request goes on
        self.server = self._servers[0]

    @property
    def first(self) -> bool:
        """Whether no server was asked before the current one."""
        return self._turn <= 1

    def begin(self) -> float | None:
        """Moves to the next server.

        Returns:
            Seconds left of the timeout; None without one.
        """
        self.server = self._servers[self._turn % len(self._servers)]
        self._turn += 1
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause(self, failure: Failure, progress: bool = False) -> float | None:
        """Decides on another try after a failed call.

        Args:
            failure: The call's failure.
            progress: The call gave tokens.

        Returns:
            Seconds until the next try; None if there is none.
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
            # Within a round the next server is asked at once; between rounds there is a pause.
            return max(PAUSE, failure.retry_after or 0.0) if self._failures % len(self._servers) == 0 else 0.0
        if failure.reason in FULL and failure.retry_after is not None:
            self._full += 1
            if self._full % len(self._servers):
                return 0.0  # another one may have room
            if self._moved or self._refusals > 0:
                self._refusals -= 1
                return failure.retry_after * random.uniform(1.0, 1.0 + SPREAD)  # noqa: S311 - it hides nothing
        return None
