"""Logs why servers do not answer. Clients learn only that none does: the reasons can hold addresses."""

import logging
from collections.abc import Callable

from rpc.client.failures import Failure
from rpc.client.tries import LOST, Tries

MOST_LOGGED = 8  # reasons of one outage

log = logging.getLogger("quire.gateway")


class LostServers:
    """Logs each reason once for a server, until it answers again.

    Args:
        counted: Called with each failure, for the metrics.
    """

    def __init__(self, counted: Callable[[Failure], None] = lambda _: None) -> None:
        self._logged: dict[str, set[str]] = {}
        self._counted = counted

    def failed(self, server: str, failure: Failure) -> None:
        """Records a failed call to a server. A failure with a reason comes from Quire, so the server answered."""
        self._counted(failure)
        if failure.code not in LOST or failure.reason:
            return
        logged = self._logged.setdefault(server, set())
        if failure.message not in logged and len(logged) < MOST_LOGGED:
            logged.add(failure.message)
            log.warning("server %s does not answer: %s", server, failure.message)

    def answered(self, server: str) -> None:
        if self._logged.pop(server, None):
            log.info("server %s answers again", server)


class LoggedTries(Tries):
    """`Tries` that logs each failed call, also if the next server goes on."""

    def __init__(self, lost: LostServers, servers: list[str], timeout: float) -> None:
        super().__init__(servers, timeout)
        self._lost = lost

    def pause(self, failure: Failure, progress: bool = False) -> float | None:
        self._lost.failed(self.server, failure)
        return super().pause(failure, progress)
