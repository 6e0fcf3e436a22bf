"""What the log says of servers that do not answer: who runs a gateway learns why, its clients only that none does."""

import logging
from collections.abc import Callable

from rpc.client.failures import Failure
from rpc.client.tries import LOST, Tries

MOST_TOLD = 8  # reasons of an outage

log = logging.getLogger("quire.gateway")


class LostServers:
    """Each reason is told once for a server, until it answers again. counted: gets each failure."""

    def __init__(self, counted: Callable[[Failure], None] = lambda _: None) -> None:
        self._told: dict[str, set[str]] = {}
        self._counted = counted

    def failed(self, server: str, failure: Failure) -> None:
        """A call to it ended with this. What Quire itself says is an answer."""
        self._counted(failure)
        if failure.code not in LOST or failure.reason:
            return
        told = self._told.setdefault(server, set())
        if failure.message not in told and len(told) < MOST_TOLD:
            told.add(failure.message)
            log.warning("server %s does not answer: %s", server, failure.message)

    def answered(self, server: str) -> None:
        if self._told.pop(server, None):
            log.info("server %s answers again", server)


class LoggedTries(Tries):
    """Tells what each failed call says, also where the next server goes on."""

    def __init__(self, lost: LostServers, servers: list[str], timeout: float) -> None:
        super().__init__(servers, timeout)
        self._lost = lost

    def pause(self, failure: Failure, progress: bool = False) -> float | None:
        self._lost.failed(self.server, failure)
        return super().pause(failure, progress)
