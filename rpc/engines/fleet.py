"""The engines behind a frontend: who sees to it that there are some."""

import asyncio
import logging
from typing import Protocol

log = logging.getLogger("quire.engines")


class Fleet(Protocol):
    """`start` once, `stop` always. The others raise RequestFailed for an engine that is not there."""

    @property
    def summary(self) -> str:
        """What is special about it, for the line that says that a server is ready; "" where nothing is."""

    async def start(self) -> None:
        """Until requests can be taken. Raises what kept it from that."""

    async def stop(self) -> None:
        """Requests that are live end. Raises TimeoutError where an engine does not end."""

    def drain(self, number: int) -> int:
        """Nothing new goes to an engine, and what it has goes elsewhere; how many requests."""

    def resume(self, number: int) -> None:
        """Requests go to it again."""

    async def restart(self, number: int) -> int:
        """Puts a new engine in its place, from which its requests go elsewhere first; how many."""


def say_why(task: asyncio.Task[None]) -> None:
    """For tasks that watch engines: one that ends by itself is a bug, and nobody else would know."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("an engine is not watched any more", exc_info=error)
