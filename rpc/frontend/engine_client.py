"""What a frontend sees of an engine, in its own process or in another."""

from collections.abc import Sequence
from typing import Protocol

from scheduler.events import Event
from scheduler.request import Limits


class EngineClient(Protocol):
    """`StepOutputs` reach a sink that the engine was given when it was made."""

    @property
    def limits(self) -> Limits:
        """What the engine can serve."""

    def send(self, events: Sequence[Event]) -> None:
        """Hands over events; never blocks on the engine's step."""

    def stalled_for(self) -> float:
        """Seconds since the engine last made progress while it had work; 0 when idle."""

    @property
    def failure(self) -> str | None:
        """Why the engine is dead, None while it lives."""
