"""The contract between a server and the place where its engine runs; `rpc.hosts` chooses the place."""

from typing import Protocol

from rpc.frontend.engine_client import EngineClient
from scheduler.engine import Sink


class EngineHost(Protocol):
    """Runs one engine at a time."""

    async def prepare(self) -> None:
        """Loads the libraries that an engine in this process needs. Called once, before the first `launch`."""

    async def launch(self, sink: Sink) -> EngineClient:
        """Starts an engine; returns once it takes requests.

        Raises:
            EngineStartError: The engine did not become ready.
            CheckpointError: The model's files cannot be used.
            ValueError: The configuration does not fit the model or the machine.
        """

    async def stop(self) -> None:
        """Ends the engine, dead or alive, and leaves nothing of it behind.

        Raises:
            TimeoutError: The engine, or a process of it, does not end.
        """

    async def close(self) -> None:
        """Releases all that was kept for the next `launch`. Called once, after the last `stop`."""
