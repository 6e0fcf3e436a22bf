"""The contract between a server and the engines behind its frontend, which are its own or another server's."""

import asyncio
import logging
from typing import Protocol

log = logging.getLogger("quire.engines")


class Fleet(Protocol):
    """The engines behind a frontend. `start` once; `stop` in any case, also after a `start` that raised.

    `drain`, `resume` and `restart` raise RequestFailed for an engine that is not usable.
    """

    @property
    def summary(self) -> str:
        """Description for the line that a server prints when it is ready; "" for a single engine of its own."""

    async def start(self) -> None:
        """Starts or reaches the engines; returns once requests can be taken. Raises what prevented that."""

    async def stop(self) -> None:
        """Ends own engines and links, and with them all live requests.

        Raises:
            TimeoutError: An engine does not end.
        """

    def drain(self, number: int) -> int:
        """Keeps new requests from an engine, moves those that it has, and returns their count."""

    def resume(self, number: int) -> None:
        """Ends the drain of an engine."""

    async def restart(self, number: int) -> int:
        """Moves an engine's requests, replaces the engine, and returns the count of requests that moved."""


def log_failure(task: asyncio.Task[None]) -> None:
    """Logs the exception of a task that watches engines: one that ends by itself is a bug that would stay unseen."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("an engine is not watched any more", exc_info=error)
