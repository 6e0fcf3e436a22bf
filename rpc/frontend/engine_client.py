"""The contract between a frontend and an engine, in its own process or in another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.events import Event
from scheduler.limits import Limits


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Fixed properties of an engine.

    Attributes:
        limits: Requests that it can serve.
        pages: Count of pages in its pool.
        dtype: Type of weights and KV.
        device: "cpu", "cuda" or "simulated".
        page_size: Tokens of a page.
        numerics: Identity of the weights, formats and kernels that its results depend on. Engines with equal numerics
            give equal tokens.
        metrics: HOST:PORT of the engine's own metrics; "" where it serves none.
    """

    limits: Limits
    pages: int
    dtype: str
    device: str
    page_size: int = 16
    numerics: bytes = b""
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Reach:
    """Address of an engine's link, for other processes.

    Attributes:
        address: Target as gRPC writes it.
        token: Secret that a caller has to prove there.
    """

    address: str
    token: str = field(default="", repr=False)


class EngineClient(Protocol):
    """A frontend's hold on an engine. `StepOutputs` reach the sink that the engine got when it was made.

    When the engine dies, every live attempt ends with ENGINE_FAILED. The sink is called at least once after `failure`
    was set.
    """

    @property
    def info(self) -> EngineInfo:
        """Fixed properties of the engine."""

    @property
    def place(self) -> str:
        """Process or machine that the engine runs on, for people."""

    @property
    def reach(self) -> Reach | None:
        """Address of the engine's link; None where only this process reaches it."""

    def send(self, events: Sequence[Event]) -> None:
        """Hands over events, and never blocks on the engine's step. Runs on the frontend's loop."""

    def stalled_for(self) -> float:
        """Returns the seconds since the engine last made progress while it had work; 0 when idle."""

    def overdue(self) -> str:
        """Returns why the engine may wait in vain, as for a step that hangs; "" where nothing says so."""

    @property
    def failure(self) -> str | None:
        """Cause of the engine's death; None while it lives."""
