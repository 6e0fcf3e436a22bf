"""What a server knows of the place where its engine runs; `rpc.hosts` chooses it."""

from typing import Protocol

from rpc.frontend.engine_client import EngineClient
from scheduler.engine import Sink


class EngineHost(Protocol):
    """Runs one engine at a time."""

    async def prepare(self) -> None:
        """Loads the libraries that an engine in this process needs. Due once, before the first `launch`."""

    async def launch(self, sink: Sink) -> EngineClient:
        """Starts an engine; returns once it takes requests. Raises EngineStartError, CheckpointError, ValueError."""

    async def stop(self) -> None:
        """Ends the engine, dead or alive, and leaves nothing of it behind. Raises TimeoutError."""

    async def close(self) -> None:
        """Ends what it kept for the next `launch`. Due once, after the last `stop`."""
