"""What a frontend sees of an engine, in its own process or in another."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from scheduler.events import Event
from scheduler.limits import Limits


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is. limits: what it can serve. pages: size of its KV pool. dtype: of weights and KV. device: cpu
    or cuda. page_size: tokens in a page. numerics: what the numbers that it computes depend on, beside tokens: engines
    for which this is equal give the same tokens. metrics: HOST:PORT where it shows its own; "" where it does not.
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
    """Where other processes find an engine's link. address: as gRPC writes one. token: what they have to show there."""

    address: str
    token: str = field(default="", repr=False)


class EngineClient(Protocol):
    """`StepOutputs` reach a sink that the engine was given when it was made.

    When the engine dies, every attempt that lives gets ENGINE_FAILED, and the sink is called at least once after
    `failure` was set.
    """

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""

    @property
    def place(self) -> str:
        """Where it runs, for people."""

    @property
    def reach(self) -> Reach | None:
        """None where only this process reaches it."""

    def send(self, events: Sequence[Event]) -> None:
        """Hands over events; never blocks on the engine's step. On the frontend's loop."""

    def stalled_for(self) -> float:
        """Seconds since the engine last made progress while it had work; 0 when idle."""

    def overdue(self) -> str:
        """What is wrong, where a step hangs; "" otherwise."""

    @property
    def failure(self) -> str | None:
        """Why the engine is dead, None while it lives."""
